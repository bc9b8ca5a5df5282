"""Plain PyTorch, one operation after another. It is the reference for every faster machine, and alone calls `backward()`."""

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.fit import (
    Fit,
    Work,
    deal,
    kept_state,
    loss_and_note,
    mean_gradient,
    mean_loss,
    restore,
    task_loss,
)
from effuse.core.machine import Machine, Meter, require_rows
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net, draws_inside, fill
from effuse.core.params import Params
from effuse.core.rng import Stream, keyed
from effuse.core.sampler import Sampler
from effuse.core.spans import span
from effuse.core.task import Batch, Feature, Given, Task
from effuse.machines.private import PrivateStep, private_fit

APPLIED = 256  # images per batch of `apply`
AVERAGE = "average"  # the moving average of the weights in `given`


class Step:
    """One training step: the gradient, then the direction computed from it, then the update."""

    def __init__(
        self,
        net: Net,
        optimiser: torch.optim.Optimizer,
        work: Work,
        given: Given,
        average: Mapping[str, Tensor] | None,
        total: Mapping[str, Tensor] | None,
        uphill: float | Tensor | None,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.net, self.params, self.optimiser, self.given = net, net.params, optimiser, given
        self.loss, self.around = work.loss or task_loss, around  # `around` is entered for every evaluation of the loss
        self.direction, self.clip, self.ema, self.updates = work.direction, work.solver.clip, work.solver.ema, work.updates
        self.average, self.total, self.uphill = average, total, uphill

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss and its second value."""
        loss, noted = self.gradient(batch)
        with torch.no_grad():
            if self.total is not None:
                grads = {k: p.grad for k, p in self.params.items() if p.grad is not None}
                torch._foreach_add_([self.total[k] for k in grads], list(grads.values()))
            if self.updates:
                self.direct()
                self.update()
        return loss.detach(), None if noted is None else noted.detach()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        with self.around():
            return loss_and_note(self.loss(self.net, batch, self.given))

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Set the parameters' `grad` to the gradient of the mean loss; SAM takes it uphill of the weights."""
        self.optimiser.zero_grad(set_to_none=True)
        loss, noted = self.forward(batch)
        loss.backward()
        if self.uphill is not None:
            before = climb([p for p in self.params.values() if p.grad is not None], self.uphill)
            self.optimiser.zero_grad(set_to_none=True)
            self.forward(batch)[0].backward()
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)  # subtracting what was added would round
        return loss, noted

    def direct(self) -> None:
        """Replace the gradient by the algorithm's direction."""
        if self.direction is not None:
            grads = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in self.params.items()}
            for k, g in self.direction(grads, self.params, self.given).items():
                if self.params[k].requires_grad:  # a frozen layer would move by its weight decay
                    self.params[k].grad = g

    def update(self) -> None:
        """Clip, move the weights, and update their moving average."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.clip, foreach=True)
        self.optimiser.step()
        if self.average is not None and self.ema is not None:
            torch._foreach_lerp_(list(self.average.values()), list(self.params.values()), 1 - self.ema)


@torch.no_grad()
def climb(params: list[Tensor], rho: float | Tensor) -> list[tuple[Tensor, Tensor]]:
    """Move weights by rho along their gradient; returns each with its value before. Each must have a gradient."""
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    before = [(p, p.clone()) for p in params]
    torch._foreach_add_(params, torch._foreach_mul(grads, rho / (norm + 1e-12)))
    return before


class Eager(Machine):
    """Plain PyTorch, one operation after another: the reference for every faster machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.meter = Meter()
        self._free: dict[Arch, list[Net]] = defaultdict(list)
        self._lent: dict[object, list[Net]] = defaultdict(list)
        self._lending = threading.Lock()  # the server may load while a client does
        if device.type == "cuda":
            torch.backends.cudnn.deterministic = True  # otherwise some gradients are summed in random order

    def load(self, model: Model, owner: object = None) -> Net:
        with self._lending:
            # building a U-Net takes longer than a training step, so networks are reused
            free = self._free[model.arch]
            net = free.pop() if free else self._built(model.arch)
            self._lent[owner].append(net)
        fill(net, model)
        # the last job may have changed this
        for p in net.params.values():
            p.requires_grad_(True)
        return net.train()

    def _built(self, arch: Arch) -> Net:
        with keyed(Stream(("blank",))), torch.device(self.device):
            module = arch.build()
        for name, p in module.named_parameters():
            p.requires_grad_(not arch.constant(name))
        return Net(module, arch=arch)

    def release(self, owner: object = None) -> None:
        with self._lending:
            for net in self._lent.pop(owner, []):
                self._free[net.arch].append(net)

    def forget(self, arch: Arch) -> None:
        self._free.pop(arch, None)

    def reset_for(self, networks: Collection[Arch]) -> None:
        """Prepare for another run: reset counts and loans, and free all networks but those of these architectures."""
        self.meter, self._lent = Meter(), defaultdict(list)
        for other in self._known() - set(networks):
            self.forget(other)

    def _known(self) -> set[Arch]:
        return set(self._free)

    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        solver, params = work.solver, net.params
        net.train()
        optimiser = solver.optimiser(list(params.values()), work.lr)
        if work.optimiser is not None:
            restore(optimiser, params, work.optimiser)
        begun = Params.of(net) if work.average is None else work.average
        # in the order and on the device of the network: the average may come from a message
        average = {k: begun[k].to(p.device, copy=True) for k, p in params.items()} if solver.ema else None
        total = {k: torch.zeros_like(p) for k, p in params.items()} if work.report_gradient else None
        # dropout needs torch's one default generator: networks without it need not wait for each other
        alone = self.threads is None or draws_inside(net.module)
        drawing = keyed(work.stream.child("dropout")) if alone else contextlib.nullcontext()
        with self._companions(work.given) as given, drawing:
            if average is not None:
                given[AVERAGE] = average
            step = Step(net, optimiser, work, given, average, total, work.uphill)
            done = self._shuffled(step, work) if work.private is None else private_fit(PrivateStep(step, work), work, self)
        for p in params.values():
            p.grad = None  # frees as much memory as the weights take
        moments = kept_state(optimiser, params) if solver.state == "kept" else None
        gradient = mean_gradient(total, done.steps)
        return done._replace(average=Params(average) if average else None, gradient=gradient), moments

    def _shuffled(self, step: Step, work: Work) -> Fit:
        losses: list[Tensor] = []
        notes: list[Tensor] = []
        sizes: list[int] = []
        for batch in self._batches(work):
            loss, noted = step(batch)
            losses.append(loss)
            notes += [] if noted is None else [noted]
            sizes.append(len(batch.labels))
            self.meter.trained(len(batch.labels))
        noted_mean = mean_loss(notes, sizes, work) if notes else None
        return Fit(len(sizes), sum(sizes), mean_loss(losses, sizes, work), noted=noted_mean)

    def _batches(self, work: Work) -> Iterator[Batch]:
        """The batches of a fit. Random numbers are drawn for a full batch, so that padding does not change them."""
        generator = work.stream.child("draw").torch(self.device)
        for positions, real in deal(work):
            with span("data"):
                batch = self.batch(work, positions[:real], generator, work.solver.batch)
            yield batch

    def batch(self, work: Work, positions: Tensor, generator: torch.Generator, size: int) -> Batch:
        """The images at these positions; random numbers are drawn for `size` images."""
        data, n = work.shard.dataset, len(positions)
        x, labels, columns = self._rows(work.shard, positions)
        drawn = work.task.draw(size, x.shape[1:], labels, generator)
        x = data.changed(x, {k: v[:n] for k, v in data.chances(size, generator).items()})
        return Batch(x, labels, work.task, {k: v[:n] for k, v in drawn.items()}, columns=columns)

    def _rows(self, shard: Shard, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        data, rows = shard.dataset, shard.rows[positions].to(shard.dataset.images.device)
        columns = {k: c[positions.to(c.device)].to(self.device) for k, c in shard.columns.items()}
        return data.floats(data.images[rows]), data.labels[rows], columns

    @contextlib.contextmanager
    def _companions(self, given: Given) -> Iterator[dict[str, Any]]:
        """The values passed to a loss, on this device; a Model becomes a frozen network."""
        borrower = object()
        try:
            yield {k: self._companion(v, borrower) if isinstance(v, Model) else self._placed(v) for k, v in given.items()}
        finally:
            self.release(borrower)

    def _companion(self, model: Model, borrower: object) -> Net:
        net = self.load(model, borrower).eval()
        for p in net.params.values():
            p.requires_grad_(False)
        return net

    def _placed(self, value: Any) -> Any:
        if isinstance(value, (Params, Tensor)):
            return value.to(self.device)
        return torch.as_tensor(value, dtype=torch.float32, device=self.device) if isinstance(value, float) else value

    @torch.no_grad()
    def apply(self, net: Net, function: Feature, task: Task, shard: Shard, given: Given, stream: Stream) -> Tensor:
        net.eval()
        generator = stream.child("draw").torch(self.device)
        with self._companions(given) as placed:
            rows: list[Tensor] = []
            for positions in torch.arange(len(shard)).split(APPLIED):
                x, labels, columns = self._rows(shard, positions)
                drawn = {k: v[: len(x)] for k, v in task.draw(APPLIED, x.shape[1:], labels, generator).items()}
                rows.append(function(net, Batch(x, labels, task, drawn, columns=columns), placed))
                require_rows(rows[-1], len(x), function)
        return torch.cat(rows)

    @torch.no_grad()
    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        return self._drawn(net.eval(), net.arch, task, n, sampler, labels, stream)

    def _drawn(
        self,
        run: Callable[..., Tensor],
        arch: Arch,
        task: Task,
        n: int,
        sampler: Sampler,
        labels: Tensor | None,
        stream: Stream,
    ) -> Images:
        shape = arch.shape
        drawn: list[Tensor] = []
        for seed, first, size in batch_seeds(stream, n, sampler.batch):
            wanted = None if labels is None else labels[first : first + size].to(self.device)
            generator = torch.Generator(self.device).manual_seed(seed)
            image = torch.Size((size, shape.channels, shape.side, shape.side))
            tick = functools.partial(self.meter.sampled, size)
            drawn.append(sampler.draw(run, task, image, wanted, generator, tick).cpu())
        return Images(torch.cat(drawn), None if labels is None else labels.cpu())


def batch_seeds(stream: Stream, n: int, batch: int) -> list[tuple[int, int, int]]:
    """(seed, first image, size) of each batch of a draw, so that it can be repeated with plain diffusers."""
    return [(stream.child("batch", i).seed, i, min(batch, n - i)) for i in range(0, n, batch)]
