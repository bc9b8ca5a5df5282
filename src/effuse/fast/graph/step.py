"""A recorded training step over static buffers, and the key by which fits share it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effuse.core.fit import Fit, Work, deal, mean_gradient, mean_loss
from effuse.core.model import Arch, Model, Net, draws_inside
from effuse.core.params import Params
from effuse.core.solvers import Solver
from effuse.fast.graph.static import StaticFit, located
from effuse.fast.ops.dropout import KeyedNet, seed_of

if TYPE_CHECKING:
    from effuse.fast.graph.captured import Captured


class TrainingStep(StaticFit):
    """One recorded step over static buffers."""

    net: KeyedNet

    def __init__(self, machine: "Captured", arch: Arch, work: Work, frozen: tuple[str, ...]) -> None:
        self.module = machine.network(arch).train()
        self.seed = seed_of(self.module)
        net = KeyedNet(self.module, machine.trained(self.module), arch)
        super().__init__(machine, net, work, frozen, work.solver.batch)
        self.weight = torch.ones(work.solver.batch, device=machine.device)
        self.loss = torch.zeros((), device=machine.device)
        self.noted: Tensor | None = None  # the second value of a loss that returns one
        self.draws = draws_inside(self.module)
        self._record(work)

    def _record(self, work: Work) -> None:
        descend = self.step(work, self._evaluation)

        def step() -> None:
            loss, noted = descend(self.batch(self.weight))
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
        return in_bf16()

    @torch.no_grad()
    def run(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        self.begin(net, work)
        if self.seed is not None:
            self.seed.fill_(work.stream.child("dropout").seed)
        dealt = list(deal(work))
        sizes = [d.real for d in dealt]
        rows, chosen = located(work.shard, torch.stack([d.positions for d in dealt]))
        generator = work.stream.child("draw").torch(self.machine.device)
        losses, notes = torch.zeros(2, len(sizes), device=self.machine.device)
        last = 0
        for i, n in enumerate(sizes):
            self.load(work.shard, rows[i], {k: positions[i] for k, positions in chosen.items()}, generator)
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
        average, kept = self.end(net, work)
        return Fit(len(sizes), sum(sizes), mean, average, mean_gradient(self.total, len(sizes)), noted), kept


def in_bf16() -> torch.autocast:
    """The context in which recorded steps evaluate a loss."""
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def step_key(arch: Arch, work: Work, frozen: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of a recording. Fits that differ only in weights, data, rates and amounts of work share it."""
    data, private = work.shard.dataset, work.private
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
        None if private is None else (private.clip, private.repeats, private.physical),
        tuple(data.images.shape[1:]),
        data.images.dtype,
        data.peak,
        data.flip,
        data.shift,
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
    whole = dataclasses.replace(solver, lr=1.0, epochs=None, steps=1, schedule=type(solver).schedule, state="fresh")
    return dataclasses.replace(whole, ragged="keep", privacy=None)
