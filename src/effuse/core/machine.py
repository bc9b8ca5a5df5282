"""The machine under a workbench: it does the arithmetic of training and sampling, and is the only place with `backward()`."""

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.errors import ModelError, TrainingError
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, fill
from effuse.core.params import Buffers, Params, named_values
from effuse.core.rng import Stream, keyed
from effuse.core.sampler import Sampler
from effuse.core.solvers import Fit, Solver
from effuse.core.spans import span
from effuse.core.task import Batch, Direction, Given, Loss, Net, Task


@dataclasses.dataclass
class Meter:
    """Counts work as it is done, for whoever shows progress."""

    images: int = 0  # trained
    evaluations: int = 0  # network evaluations while sampling
    watcher: Callable[[], None] = lambda: None
    stopped: bool = False  # nobody wants the work any more: whoever counts here is to stop
    lock: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, repr=False
    )  # slots count from threads of their own

    def trained(self, images: int) -> None:
        self._count(images, 0)

    def sampled(self, images: int) -> None:
        self._count(0, images)

    def _count(self, images: int, evaluations: int) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        with self.lock:
            self.images += images
            self.evaluations += evaluations
        self.watcher()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One fit: what to minimise, how, on what, with which randomness."""

    solver: Solver
    shard: Shard
    lr: float
    stream: Stream
    place: int  # the client's id, or the server's
    where: str  # 'round 3, client 7, job train', for errors
    loss: Loss | None = None
    direction: Direction | None = None
    given: Given = dataclasses.field(default_factory=dict)
    optimiser: Params | None = None  # kept optimiser state
    average: Params | None = None  # where the per-step EMA left off
    rho: float | None = None  # SAM: the gradient is taken this far uphill of the weights, on the same batch
    gradient: bool = False  # report the mean of the raw gradients over the steps


class Machine(ABC):
    """Where networks live, learn and draw."""

    device: torch.device
    meter: Meter
    stream: "torch.cuda.Stream | None" = None  # where it works beside other machines of the same GPU
    threads: int | None = None  # torch's own for each client at a time, where several machines share a CPU

    def initial(self, arch: Arch, stream: Stream) -> Model:
        """A model to start from."""
        return arch.initial(stream).to(self.device)

    @abstractmethod
    def load(self, model: Model, owner: object = None) -> nn.Module:
        """A network holding the model's values; it is the owner's until `release`."""

    def release(self, owner: object = None) -> None:
        """Take back every network that the owner was lent."""

    def forget(self, arch: Arch) -> None:
        """Drop what is kept for networks of an architecture that the run has left behind."""

    def values(self, net: nn.Module) -> tuple[Params, Buffers]:
        """Copies of a network's present values."""
        return Params.of(net), Buffers.of(net)

    @abstractmethod
    def fit(self, net: nn.Module, work: Work) -> tuple[Fit, Params | None]:
        """Train the network; returns what was done and the optimiser's state where it is kept."""

    @abstractmethod
    def generate(
        self, net: nn.Module, arch: Arch, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream
    ) -> Images:
        """Draw images from a trained network."""


class Eager(Machine):
    """Plain PyTorch, one operation after another: the reference for every faster path."""

    def __init__(self, device: torch.device, task: Task) -> None:
        self.device = device
        self.task = task
        self.meter = Meter()
        self._free: dict[Arch, list[nn.Module]] = defaultdict(list)
        self._lent: dict[object, list[nn.Module]] = defaultdict(list)
        self._lending = threading.Lock()  # the server may load while a client does
        if device.type == "cuda":
            torch.backends.cudnn.deterministic = True  # or some gradients are sums in whatever order threads come

    def load(self, model: Model, owner: object = None) -> nn.Module:
        with self._lending:
            # building a U-Net costs more than a training step: networks are kept and refilled
            free = self._free[model.arch]
            net = free.pop() if free else self._built(model.arch)
            self._lent[owner].append(net)
        fill(net, model)
        net.arch = model.arch  # type: ignore[assignment]
        # as a new network is, whatever the last job left behind
        for p in named_values(net)[0].values():
            p.requires_grad_(True)
        return net if net.training else net.train()

    def _built(self, arch: Arch) -> nn.Module:
        with keyed(Stream(("blank",))), torch.device(self.device):
            net = arch.build()
        # walking through a U-Net's modules for their names costs as much as copying its weights
        net.__dict__["_named_values"] = named_values(net)
        return net

    def release(self, owner: object = None) -> None:
        with self._lending:
            for net in self._lent.pop(owner, []):
                self._free[net.arch].append(net)  # type: ignore[index]

    def forget(self, arch: Arch) -> None:
        self._free.pop(arch, None)

    def anew(self, arch: Arch) -> None:
        """Ready for another run: nothing counted, nothing lent, nothing kept but for this architecture."""
        self.meter, self._lent = Meter(), defaultdict(list)
        for other in self._known() - {arch}:
            self.forget(other)

    def _known(self) -> set[Arch]:
        return set(self._free)

    def fit(self, net: nn.Module, work: Work) -> tuple[Fit, Params | None]:
        solver = work.solver
        net.train()
        params = dict(net.named_parameters())
        optimiser = solver.optimiser(list(params.values()), work.lr)
        if work.optimiser is not None:
            restore(optimiser, params, work.optimiser)
        given = {k: self._placed(v) for k, v in work.given.items()}
        loss_of, view = work.loss or own_loss, Net(net)
        begun = Params.of(net) if work.average is None else work.average
        # by the network's own order and place: the average may come from a message
        average = {k: begun[k].to(p.device, copy=True) for k, p in params.items()} if solver.ema else None
        total = {k: torch.zeros_like(p) for k, p in params.items()} if work.gradient else None
        losses: list[Tensor] = []
        notes: list[Tensor] = []
        sizes: list[int] = []
        # side by side are only networks without dropout, which would take turns at torch's one default generator
        drawing = keyed(work.stream.child("dropout")) if self.threads is None else contextlib.nullcontext()
        with drawing:
            for batch in self.batches(work):

                def forward(batch: Batch = batch) -> tuple[Tensor, Tensor | None]:
                    return parted(loss_of(view, batch, given))

                loss, noted = descend(forward, params, optimiser, work, given, average, total, work.rho)
                losses.append(loss)
                notes += [] if noted is None else [noted]
                sizes.append(len(batch.labels))
                self.meter.trained(len(batch.labels))
        mean, noted = mean_loss(losses, sizes, work), mean_loss(notes, sizes, work) if notes else None
        for p in params.values():
            p.grad = None  # a pooled network must not hold a second copy of itself between jobs
        kept = kept_state(optimiser, params) if solver.state == "kept" else None
        gradient = shared_out(total, len(sizes))
        return Fit(len(sizes), sum(sizes), mean, Params(average) if average else None, gradient, noted), kept

    def batches(self, work: Work) -> Iterator[Batch]:
        """The batches of a fit, their randomness drawn; always drawn for a full batch, so that padding changes nothing."""
        data, size, solver = work.shard.dataset, work.solver.batch, work.solver
        order, generator = work.stream.child("order").torch(), work.stream.child("draw").torch(self.device)
        left = solver.steps_on(len(work.shard))
        if left and not len(work.shard):
            raise TrainingError(f"{work.where}: there are no images to learn from")  # or it would look for a batch for ever
        while left:
            rows = work.shard.rows[torch.randperm(len(work.shard), generator=order)]
            for i in range(0, len(rows), size):
                if not left:
                    return
                left -= 1
                with span("data"):
                    batch = self._batch(data, rows[i : i + size], size, generator)
                yield batch

    def _batch(self, data: Any, rows: Tensor, size: int, generator: torch.Generator) -> Batch:
        n = len(rows)
        rows = rows.to(data.images.device)
        x, labels = data.floats(data.images[rows]), data.labels[rows]
        drawn = self.task.draw(size, x.shape[1:], labels, generator)
        if data.flip:
            mirrored = torch.rand(size, device=self.device, generator=generator)[:n] < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return Batch(x, labels, self.task, {k: v[:n] for k, v in drawn.items()})

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Params):
            return value.to(self.device)
        return torch.as_tensor(value, dtype=torch.float32, device=self.device) if isinstance(value, float) else value

    @torch.no_grad()
    def generate(
        self, net: nn.Module, arch: Arch, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream
    ) -> Images:
        net.eval()
        shape = arch.shape
        drawn: list[Tensor] = []
        for seed, first, size in batch_seeds(stream, n, sampler.batch):
            some = None if labels is None else labels[first : first + size].to(self.device)
            generator = torch.Generator(self.device).manual_seed(seed)
            image = torch.Size((size, shape.channels, shape.side, shape.side))
            drawn.append(sampler.draw(net, self.task, image, some, generator, lambda: self.meter.sampled(size)).cpu())
        return Images(torch.cat(drawn), None if labels is None else labels.cpu())


def own_loss(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss, where an algorithm brings none of its own."""
    return batch.task.loss(net, batch)


def parted(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What a loss returned: the loss, and the value beside it where there is one."""
    return found if isinstance(found, tuple) else (found, None)


def descend(
    forward: Callable[[], tuple[Tensor, Tensor | None]],
    params: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    work: Work,
    given: Given,
    average: Mapping[str, Tensor] | None,
    total: Mapping[str, Tensor] | None,
    rho: float | Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One step of the optimiser, whose loss it returns with what was noted: gradient, direction, clipping, step, moving average."""
    optimiser.zero_grad(set_to_none=True)
    loss, noted = forward()
    loss.backward()
    if rho is not None:
        here = climb([p for p in params.values() if p.grad is not None], rho)
        optimiser.zero_grad(set_to_none=True)
        forward()[0].backward()
        with torch.no_grad():
            for p, value in here:
                p.copy_(value)  # and not minus what was added, which would round
    with torch.no_grad():
        if total is not None:
            learnt = [k for k, p in params.items() if p.grad is not None]
            torch._foreach_add_([total[k] for k in learnt], [params[k].grad for k in learnt])
        if work.direction is not None:
            grads = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in params.items()}
            for k, g in work.direction(grads, params, given).items():
                params[k].grad = g
        if work.solver.clip is not None:
            nn.utils.clip_grad_norm_(params.values(), work.solver.clip, foreach=True)
        optimiser.step()
        if average is not None:
            torch._foreach_lerp_(list(average.values()), list(params.values()), 1 - work.solver.ema)
    return loss.detach(), None if noted is None else noted.detach()


@torch.no_grad()
def climb(params: list[Tensor], rho: float | Tensor) -> list[tuple[Tensor, Tensor]]:
    """Move weights by rho along their gradient's direction; returns each with the value it had."""
    grads = [p.grad for p in params]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    here = [(p, p.clone()) for p in params]
    torch._foreach_add_(params, torch._foreach_mul(grads, rho / (norm + 1e-12)))
    return here


def shared_out(total: Mapping[str, Tensor] | None, steps: int) -> Params | None:
    """A sum over steps as their mean, where one was kept."""
    if total is None:
        return None
    return Params({k: (t / steps).contiguous() for k, t in total.items()})


def batch_seeds(stream: Stream, n: int, batch: int) -> list[tuple[int, int, int]]:
    """(seed, first image, size) of each batch of a draw, so that anybody can repeat it with plain diffusers."""
    return [(stream.child("batch", i).seed, i, min(batch, n - i)) for i in range(0, n, batch)]


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
