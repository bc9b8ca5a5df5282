"""One fit as a value: what to minimise, how, on what, with which randomness; and how its batches are dealt."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import ModelError, TrainingError
from effuse.core.model import Net
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.solvers import Solver
from effuse.core.task import Batch, Direction, Given, Loss, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One fit: what to minimise, how, on what, with which randomness."""

    solver: Solver
    task: Task
    shard: Shard
    lr: float
    stream: Stream
    place: int  # the client's id, or the server's
    where: str  # 'round 3, client 7, job train', for errors
    loss: Loss | None = None  # in place of the task's own
    direction: Direction | None = None
    given: Given = dataclasses.field(default_factory=dict)
    optimiser: Params | None = None  # kept optimiser state
    average: Params | None = None  # where the per-step moving average left off
    uphill: float | None = None  # SAM: the gradient is taken this far uphill of the weights, on the same batch
    report_gradient: bool = False  # the mean of the raw gradients over the steps
    updates: bool = True  # False: weights stay as they are, and only the gradient is looked at


class Fit(NamedTuple):
    """What a fit did."""

    steps: int
    images: int
    loss: float  # the mean over all images seen
    average: Params | None = None  # the per-step moving average of the weights, where the solver keeps one
    gradient: Params | None = None  # the mean of the raw gradients over the steps, where it was asked for
    noted: float | None = None  # the mean over all images of what the loss returned beside itself


class BatchRows(NamedTuple):
    """The images of one batch."""

    positions: Tensor  # in the shard; a ragged batch is filled up with its first image
    real: int  # how many of them count


def deal(work: Work) -> Iterator[BatchRows]:
    """The batches of a fit: shuffled epochs, cut short where the solver counts steps."""
    n, size = len(work.shard), work.solver.batch
    order = work.stream.child("order").torch()
    left = work.solver.steps_on(n)
    if left and not n:
        raise TrainingError(f"{work.where}: there are no images to learn from")  # or it would look for a batch for ever
    while left:
        for some in torch.randperm(n, generator=order).split(size)[:left]:
            left -= 1
            real = len(some)
            yield BatchRows(some if real == size else torch.cat([some, some[:1].expand(size - real)]), real)


def task_loss(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss, where an algorithm brings none of its own."""
    return batch.task.loss(net, batch)


def loss_and_note(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What a loss returned: the loss, and the value beside it where there is one."""
    return found if isinstance(found, tuple) else (found, None)


def mean_loss(losses: list[Tensor], sizes: list[int], work: Work) -> float:
    """The mean over images; a non-finite step is an error that names it."""
    values = torch.stack(losses).double().cpu()
    if not values.isfinite().all():
        step = int((~values.isfinite()).nonzero()[0])
        raise TrainingError(
            f"{work.where}: the loss became {values[step].item()} in step {step + 1} of {len(sizes)}; "
            f"lower the learning rate ({work.lr:g}) or set clip"
        )
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float((values * weights).sum() / weights.sum())


def mean_gradient(total: Mapping[str, Tensor] | None, steps: int) -> Params | None:
    """A sum over steps as their mean, where one was kept."""
    if total is None:
        return None
    return Params({k: (t / steps).contiguous() for k, t in total.items()})


def kept_state(optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> Params:
    """An optimiser's moments as named tensors."""
    kept = {}
    for name, p in params.items():
        for key, value in optimiser.state[p].items():
            if value is not None:
                kept[f"{key}/{name}"] = torch.as_tensor(value, dtype=torch.float32).detach().clone()
    return Params(kept)


def restore(optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor], kept: Params) -> None:
    """Give an optimiser the moments it had."""
    for full, value in kept.items():
        key, _, name = full.partition("/")
        if name not in params or (value.dim() and value.shape != params[name].shape):  # shapes Adam would not notice
            raise ModelError(f"the kept moments '{full}', {tuple(value.shape)}, are of another network")
        # the step count too: a fused optimiser wants it there
        optimiser.state[params[name]][key] = value.to(params[name].device, copy=True)
