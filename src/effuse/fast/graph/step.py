"""A recorded training step over static buffers, and the key by which fits share it."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Fit, Work, deal, kept_state, mean_gradient, mean_loss
from effuse.core.model import Arch, Model, Net, draws_inside, fill
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.solvers import Solver
from effuse.core.task import Batch
from effuse.fast.ops.dropout import KeyedNet, seed_of
from effuse.machines.eager import AVERAGE, Step

if TYPE_CHECKING:
    from effuse.fast.graph.captured import Captured


class TrainingStep:
    """One recorded step over static buffers."""

    def __init__(self, machine: "Captured", arch: Arch, work: Work, frozen: tuple[str, ...]) -> None:
        self.machine, self.task, self.solver, device = machine, work.task, work.solver, machine.device
        self.used = False  # in the current run
        data, size = work.shard.dataset, work.solver.batch
        self.module = machine.network(arch).train()
        self.seed = seed_of(self.module)
        self.net = KeyedNet(self.module, machine.trained(self.module), arch)
        self.params = self.net.params
        for name in frozen:
            self.params[name].requires_grad_(False)
        self.lr = torch.zeros((), device=device)
        self.optimiser = self.solver.optimiser(list(self.params.values()), self.lr)
        self.given = {
            k: machine.companion(v.arch) if isinstance(v, Model) else _buffer(v, device) for k, v in work.given.items()
        }
        self.average = {k: torch.zeros_like(p) for k, p in self.params.items()} if self.solver.ema else None
        if self.average is not None:
            self.given[AVERAGE] = self.average
        self.total = {k: torch.zeros_like(p) for k, p in self.params.items()} if work.report_gradient else None
        self.uphill = torch.zeros((), device=device) if work.uphill is not None else None
        self.stored = torch.zeros((size, *data.images.shape[1:]), dtype=data.images.dtype, device=device)
        self.labels = torch.zeros(size, dtype=torch.int64, device=device)
        self.weight = torch.ones(size, device=device)
        self.mirrored = torch.zeros(size, dtype=torch.bool, device=device) if data.flip else None
        self.columns = {
            k: torch.zeros((size, *c.shape[1:]), dtype=c.dtype, device=device) for k, c in work.shard.columns.items()
        }
        generator = Stream(("capture",)).torch(device)
        image = data.images.shape[1:]
        self.drawn = {k: v.contiguous().clone() for k, v in self.task.draw(size, image, self.labels, generator).items()}
        self.loss = torch.zeros((), device=device)
        self.noted: Tensor | None = None  # the second value of a loss that returns one
        self.draws = draws_inside(self.module)
        self._record(work, data)

    def _record(self, work: Work, data: Dataset) -> None:
        # a recording outlives its first fit and its run, so it must not hold references to their data
        data = dataclasses.replace(
            data, images=data.images[:0].clone(), labels=data.labels[:0].clone(), groups=None, domains=None
        )
        work = dataclasses.replace(work, shard=Shard.whole(data), given={}, optimiser=None, average=None)
        descend = Step(self.net, self.optimiser, work, self.given, self.average, self.total, self.uphill, self._evaluation)

        def step() -> None:
            x = data.floats(self.stored)
            if self.mirrored is not None:
                x = torch.where(self.mirrored[:, None, None, None], x.flip(-1), x)
            x = x.contiguous(memory_format=torch.channels_last)
            batch = Batch(x, self.labels, self.task, self.drawn, self.weight, self.columns)

            loss, noted = descend(batch)
            self.loss.copy_(loss)
            if noted is not None:
                if self.noted is None:  # in the warm-up, before recording
                    self.noted = torch.zeros((), device=self.machine.device)
                self.noted.copy_(noted)

        self.graph = self.machine.recorded(step, self.machine.stream)

    def _evaluation(self) -> torch.autocast:
        """The context of an evaluation of the loss: bf16 and new dropout masks, also for the second pass of a SAM step."""
        self.net.others = 0
        if self.seed is not None:
            self.seed.add_(1)
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)

    @torch.no_grad()
    def run(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        """Replay a whole fit: copy the weights in, make the steps, copy the weights out."""
        self.used = True
        ours, theirs = ([*n.params.values(), *n.buffers.values()] for n in (self.net, net))
        torch._foreach_copy_(ours, theirs)
        self._reset(work)
        data, size, device = work.shard.dataset, self.solver.batch, self.machine.device
        dealt = list(deal(work))
        positions, sizes = torch.stack([d.positions for d in dealt]), [d.real for d in dealt]
        rows = work.shard.rows[positions].to(data.images.device)
        chosen = {k: positions.to(c.device) for k, c in work.shard.columns.items()}
        generator = work.stream.child("draw").torch(device)
        losses, notes = torch.zeros(2, len(sizes), device=device)
        last = 0
        for i, n in enumerate(sizes):
            torch.index_select(data.images, 0, rows[i], out=self.stored)
            torch.index_select(data.labels, 0, rows[i], out=self.labels)
            for k, column in self.columns.items():
                column.copy_(work.shard.columns[k].index_select(0, chosen[k][i]))
            for k, v in self.task.draw(size, data.images.shape[1:], self.labels, generator).items():
                self.drawn[k].copy_(v)
            if self.mirrored is not None:
                torch.lt(torch.rand(size, device=device, generator=generator), 0.5, out=self.mirrored)
            if n != last:
                self.weight.fill_(1.0)
                self.weight[n:] = 0.0
                last = n
            self.graph.replay()
            losses[i].copy_(self.loss)
            if self.noted is not None:
                notes[i].copy_(self.noted)
            self.machine.meter.trained(n)
        mean = mean_loss(list(losses.unbind()), sizes, work)
        noted = None if self.noted is None else mean_loss(list(notes.unbind()), sizes, work)
        torch._foreach_copy_(theirs, ours)
        kept = None
        if work.solver.state == "kept":  # with the moments of layers that this fit did not train
            kept = Params({**(work.optimiser or {}), **kept_state(self.optimiser, self.params)})
        average = None
        if self.average is not None:
            average = Params({k: t.clone(memory_format=torch.contiguous_format) for k, t in self.average.items()})
        return Fit(len(sizes), sum(sizes), mean, average, mean_gradient(self.total, len(sizes)), noted), kept

    def _reset(self, work: Work) -> None:
        self.lr.fill_(work.lr)
        if self.seed is not None:
            self.seed.fill_(work.stream.child("dropout").seed)
        moments = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        sums = list((self.total or {}).values())
        if moments or sums:
            torch._foreach_zero_(moments + sums)
        for full, value in (work.optimiser or {}).items():
            key, _, name = full.partition("/")
            own = self.optimiser.state[self.params[name]].get(key)
            if own is not None:  # a layer that is frozen since has moments and no step
                own.copy_(value)  # in place: the recording refers to these tensors by address
        for k, v in work.given.items():
            _fill(self.given[k], v)
        if self.uphill is not None and work.uphill is not None:
            self.uphill.fill_(work.uphill)
        if self.average is not None:
            start = work.average or self.params
            torch._foreach_copy_(list(self.average.values()), [start[k] for k in self.average])


def step_key(arch: Arch, work: Work, frozen: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of a recording. Fits that differ only in weights, data, rates and amounts of work share it."""
    data = work.shard.dataset
    given = tuple((k, _layout(v)) for k, v in sorted(work.given.items()))
    columns = tuple((k, tuple(c.shape[1:]), c.dtype) for k, c in sorted(work.shard.columns.items()))
    return (
        arch,
        work.task,
        kind_of(work.solver),
        work.loss,
        work.direction,
        given,
        work.uphill is None,
        work.report_gradient,
        work.updates,
        tuple(data.images.shape[1:]),
        data.images.dtype,
        data.peak,
        data.flip,
        columns,
        frozen,
    )


def _layout(value: Any) -> Any:
    if isinstance(value, Model):
        return value.arch
    if isinstance(value, Params):
        return tuple((k, tuple(t.shape), t.dtype) for k, t in value.items())
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__


def kind_of(solver: Solver) -> Solver:
    """A solver with fixed values for everything that may differ between fits."""
    return dataclasses.replace(solver, lr=1.0, epochs=None, steps=1, schedule=type(solver).schedule, state="fresh")


def _buffer(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return Params({k: torch.zeros_like(t, device=device) for k, t in value.items()})
    if isinstance(value, Tensor):
        return torch.zeros_like(value, device=device)
    return torch.zeros((), device=device)


def _fill(buffer: Any, value: Any) -> None:
    if isinstance(buffer, Net):
        fill(buffer, value)
    elif isinstance(buffer, Params):
        for k, t in buffer.items():
            t.copy_(value[k])
    elif isinstance(value, Tensor):
        buffer.copy_(value)
    else:
        buffer.fill_(value)
