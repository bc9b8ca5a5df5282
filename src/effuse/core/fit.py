"""One fit as a value, the order of its batches, and its results."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import ModelError, TrainingError
from effuse.core.model import Net
from effuse.core.noise import Noise
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.solvers import Solver
from effuse.core.task import Batch, Direction, Given, Loss, Task
from effuse.core.units import PrivacyUnits


class Private(NamedTuple):
    """How a fit protects the units of its shard: DP-SGD as resolved for this client."""

    clip: float
    sigma: float | None  # noise over clip; None only in a rehearsal, before it is solved
    units: PrivacyUnits
    rate: float  # q: the probability that a unit takes part in a step
    repeats: int  # rows of a unit
    physical: int  # units in memory at a time
    noise: Noise

    @property
    def expected(self) -> float:
        """The expected number of units in a step, which divides the sum."""
        return self.rate * len(self.units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One fit: the objective, the solver, the data and the random stream."""

    solver: Solver
    task: Task
    shard: Shard
    lr: float
    stream: Stream
    place: int  # the client's id, or the server's
    where: str  # 'round 3, client 7, job train', for errors
    loss: Loss | None = None  # replaces the task's loss
    direction: Direction | None = None
    given: Given = dataclasses.field(default_factory=dict)
    optimiser: Params | None = None  # the optimiser's state to continue from
    average: Params | None = None  # the moving average of the weights to continue from
    uphill: float | None = None  # SAM's rho: the gradient is taken this far uphill of the weights, on the same batch
    report_gradient: bool = False  # return the mean of the raw gradients over the steps
    private: Private | None = None  # replaces shuffled batches and their gradient by DP-SGD's
    updates: bool = True  # False: the weights do not move, and only the gradient is computed


class Fit(NamedTuple):
    """The result of a fit."""

    steps: int
    images: int  # of a private fit: expected
    loss: float | None  # the mean over all images seen; None where it is private
    average: Params | None = None  # the per-step moving average of the weights, where the solver keeps one
    gradient: Params | None = None  # the mean of the raw gradients over the steps, where requested
    noted: float | None = None  # the mean over all images of the loss's second value


class BatchRows(NamedTuple):
    """The images of one batch."""

    positions: Tensor  # in the shard; a smaller last batch is padded with its first image
    real: int  # how many of them are not padding


def deal(work: Work) -> Iterator[BatchRows]:
    """The batches of a fit: shuffled epochs, truncated where the solver counts steps."""
    n, size = len(work.shard), work.solver.batch
    order = work.stream.child("order").torch()
    left = work.solver.steps_on(n)
    if left and not n:
        raise TrainingError(f"{work.where}: there are no images to learn from")  # otherwise the loop below would not end
    while left:
        for rows in torch.randperm(n, generator=order).split(size)[: min(left, work.solver.batches_in(n))]:
            left -= 1
            real = len(rows)
            yield BatchRows(rows if real == size else torch.cat([rows, rows[:1].expand(size - real)]), real)


class UnitRows(NamedTuple):
    """PrivacyUnits of a private step: `repeats` images of each."""

    positions: Tensor  # in the shard, unit after unit; fewer units than fit are padded with the first position
    real: int  # how many units are not padding


def deal_units(work: Work) -> Iterator[list[UnitRows]]:
    """The Poisson batches of a private fit, each in parts that fit into memory; a batch may be empty."""
    private = work.private
    assert private is not None
    order = work.stream.child("order").torch()
    for _ in range(work.solver.steps_on(len(private.units))):
        chosen = private.noise.included(len(private.units), private.rate).nonzero().flatten()
        parts = []
        for units in chosen.split(private.physical) if len(chosen) else ():
            rows = private.units.rows(units, private.repeats, order)
            padding = torch.zeros((private.physical - len(units)) * private.repeats, dtype=torch.int64)
            parts.append(UnitRows(torch.cat([rows, padding]), len(units)))
        yield parts


def task_loss(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss, used where an algorithm has none of its own."""
    return batch.task.loss(net, batch)


def loss_and_note(returned: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The loss that a loss function returned, and its second value if there is one."""
    return returned if isinstance(returned, tuple) else (returned, None)


def mean_loss(losses: list[Tensor], sizes: list[int], work: Work) -> float:
    """The mean over images; a non-finite loss is an error that names the step."""
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
    """The mean over steps of their sum; None where gradients were not requested."""
    if total is None:
        return None
    return Params({k: (t / steps).contiguous() for k, t in total.items()})


def kept_state(optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> Params:
    """An optimiser's moments as named tensors."""
    moments = {}
    for name, p in params.items():
        for key, value in optimiser.state[p].items():
            if value is not None:
                moments[f"{key}/{name}"] = torch.as_tensor(value, dtype=torch.float32).detach().clone()
    return Params(moments)


def restore(optimiser: torch.optim.Optimizer, params: Mapping[str, Tensor], moments: Params) -> None:
    """Restore an optimiser's moments."""
    for full, value in moments.items():
        key, _, name = full.partition("/")
        if name not in params or (value.dim() and value.shape != params[name].shape):  # Adam would broadcast other shapes
            raise ModelError(f"the optimiser's moments '{full}', {tuple(value.shape)}, are of another network")
        # the step count, too, must be on the device of a fused optimiser
        optimiser.state[params[name]][key] = value.to(params[name].device, copy=True)
