"""The captured machine: a training step or a network evaluation is recorded once as a CUDA graph and replayed ever after.

On one GPU a round of a small U-Net is bound by Python and kernel launches, not by arithmetic. Here the step (forward, loss, backward,
direction, clipping, optimiser) works on static buffers; a client's weights, data and randomness are copied in before each replay, so one
recording per (network, solver, loss, direction, batch shape) serves every client of every round.
"""

import dataclasses
import gc
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Fit, Work, deal, kept_state, loss_and_note, mean_gradient, mean_loss, own_loss
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net, fill
from effuse.core.params import Params
from effuse.core.rng import Stream, keyed
from effuse.core.sampler import Sampler
from effuse.core.solvers import Solver
from effuse.core.task import Batch, Task
from effuse.fast.graph.recording import RECORDERS, orderly, record
from effuse.fast.graph.sampling import Evaluation, Recorded
from effuse.fast.layout import for_tensor_cores
from effuse.fast.ops.dropout import KeyedNet, seed_of
from effuse.fast.ops.halves import Halved
from effuse.fast.ops.kernels import available
from effuse.machines.eager import AVERAGE, Eager, Step

KERNELS = ("norm", "attention", "cast")  # what we do ourselves, where our kernels run; "norm" with the biases around
TRIES_TILINGS = "write_are_deterministic_algorithms_enabled"  # unless it is told that it is in torch's deterministic mode
VARIANTS = 256  # of a network's code that a process may compile; torch's own 8 are fewer than a table of pruned networks has


class Captured(Eager):
    """A GPU whose steps are CUDA graphs in bf16; weights and optimiser state stay fp32."""

    arithmetic = "bf16"

    def __init__(
        self,
        device: torch.device,
        compiled: bool = True,
        reproducible: bool = False,
        kernels: Collection[str] = KERNELS,
    ) -> None:
        super().__init__(device)
        self.compiled, self.reproducible, self.recorder = compiled, reproducible, RECORDERS[not reproducible]
        self.kernels = frozenset(kernels) if available(device) else frozenset()
        # a recording keeps the scratch memory of the stream it was made on: two that may play at once need streams of their own,
        # and the server may draw from one client's model while the next one trains
        self.stream, self.drawing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.captures = 0  # recordings made, for whoever checks that there are few
        self._steps: dict[Any, TrainingStep] = {}
        self._evaluations: dict[Any, Evaluation] = {}

    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.module.modules()):
            return super().fit(net, work)  # padding would enter its statistics
        frozen = tuple(k for k, p in net.params.items() if not p.requires_grad)
        key = step_key(net.arch, work, frozen)
        if key not in self._steps:
            self._steps[key] = self.recorder.submit(TrainingStep, self, net.arch, work, frozen).result()
            self.captures += 1
        step = self._steps[key]
        if not step.draws:
            return step.run(net, work)
        with keyed(work.stream.child("dropout")):
            return step.run(net, work)

    def forget(self, arch: Arch) -> None:
        super().forget(arch)
        for kept in (self._steps, self._evaluations):
            self._drop(kept, [key for key in kept if key[0] == arch])

    def anew(self, arch: Arch) -> None:
        """What the last run did not play is let go: a table of many methods would fill a GPU with their recordings."""
        super().anew(arch)
        self._drop(self._steps, [key for key, step in self._steps.items() if not step.played])
        for step in self._steps.values():
            step.played = False

    def _drop(self, kept: dict[Any, Any], keys: list[Any]) -> None:
        for key in keys:
            del kept[key]
        if keys:
            gc.collect()  # compiled networks are held in circles
            torch.cuda.empty_cache()

    def _known(self) -> set[Arch]:
        return super()._known() | {key[0] for kept in (self._steps, self._evaluations) for key in kept}

    @torch.no_grad()
    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        return self._drawn(Recorded(self, net.eval()), net.arch, task, n, sampler, labels, stream)

    def evaluation(self, arch: Arch, x: Tensor, labels: bool) -> Evaluation:
        """The recording for batches of that shape."""
        key = (arch, tuple(x.shape), labels)
        if key not in self._evaluations:
            self._evaluations[key] = self.recorder.submit(Evaluation, self, arch, x, labels).result()
            self.captures += 1
        return self._evaluations[key]

    def network(self, arch: Arch) -> nn.Module:
        """A network of a recording's own, laid out for the tensor cores."""
        with keyed(Stream(("blank",))), torch.device(self.device):
            module = for_tensor_cores(arch.build(), self.kernels)
        for name, p in module.named_parameters():
            p.requires_grad_(not arch.constant(name))
        return module

    def companion(self, arch: Arch) -> Net:
        """A frozen network that a loss may call, to be filled for each fit."""
        module = self.network(arch).eval().requires_grad_(False)
        return Net(module, self.faster(module), arch)

    def faster(self, module: Any) -> Any:
        if not self.compiled:
            return module
        # beyond that number torch goes on uncompiled; its settings are each thread's own, so it is said here, where recordings are made
        torch._dynamo.config.recompile_limit = VARIANTS
        # recordings are made in torch's deterministic mode, in which the compiler would not try tilings of reductions either; a tiling
        # repeats to the bit, and only a run that must give the same bits in any process goes without the trial
        choice = "deterministic" if self.reproducible else TRIES_TILINGS
        options = {choice: self.reproducible} if hasattr(torch._inductor.config, choice) else None
        return torch.compile(module, dynamic=False, options=options)

    def trained(self, net: nn.Module) -> Any:
        """The network as a training step calls it."""
        return Halved(net, self.faster) if "cast" in self.kernels else self.faster(net)

    def recorded(self, step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        return orderly(lambda: record(step, stream, trying=not self.reproducible), always=self.reproducible)


class TrainingStep:
    """One recorded step over static buffers."""

    def __init__(self, machine: Captured, arch: Arch, work: Work, frozen: tuple[str, ...]) -> None:
        self.machine, self.task, self.solver, device = machine, work.task, work.solver, machine.device
        self.played = False  # since its machine was last made ready for a run
        data, size = work.shard.dataset, work.solver.batch
        self.module = machine.network(arch).train()
        self.seed = seed_of(self.module)
        self.net = KeyedNet(self.module, machine.trained(self.module), arch)
        self.params = self.net.params
        for name in frozen:
            self.params[name].requires_grad_(False)
        self.lr = torch.zeros((), device=device)
        self.optimiser = self.solver.optimiser(list(self.params.values()), self.lr)
        self.given = {k: machine.companion(v.arch) if isinstance(v, Model) else _buffer(v, device) for k, v in work.given.items()}
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
        self.noted: Tensor | None = None  # where the loss returns a value beside itself
        self.draws = draws_inside(self.module)
        self._record(work, data)

    def _record(self, work: Work, data: Dataset) -> None:
        # a recording outlives its first fit, and its run: it must hold on to neither's data
        data = dataclasses.replace(
            data, images=data.images[:0].clone(), labels=data.labels[:0].clone(), groups=None, domains=None
        )
        work = dataclasses.replace(work, shard=Shard.whole(data), given={}, optimiser=None, average=None)
        descend = Step(self.params, self.optimiser, work, self.given, self.average, self.total, self.uphill)
        loss_of = work.loss or own_loss

        def step() -> None:
            x = data.floats(self.stored)
            if self.mirrored is not None:
                x = torch.where(self.mirrored[:, None, None, None], x.flip(-1), x)
            x = x.contiguous(memory_format=torch.channels_last)
            batch = Batch(x, self.labels, self.task, self.drawn, self.weight, self.columns)

            def forward() -> tuple[Tensor, Tensor | None]:
                self.net.others = 0
                if self.seed is not None:
                    self.seed.add_(1)  # another mask for every step, and for both passes of one that looks uphill
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                    return loss_and_note(loss_of(self.net, batch, self.given))

            loss, noted = descend(forward)
            self.loss.copy_(loss)
            if noted is not None:
                if self.noted is None:  # in the warm-up, so before anything is recorded
                    self.noted = torch.zeros((), device=self.machine.device)
                self.noted.copy_(noted)

        self.graph = self.machine.recorded(step, self.machine.stream)

    @torch.no_grad()
    def run(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        """Play a whole fit: weights in, steps, weights out."""
        self.played = True
        ours, theirs = list(self.params.values()), list(net.params.values())
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
        kept = kept_state(self.optimiser, self.params) if work.solver.state == "kept" else None
        average = (
            None
            if self.average is None
            else Params({k: t.clone(memory_format=torch.contiguous_format) for k, t in self.average.items()})
        )
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
            self.optimiser.state[self.params[name]][key].copy_(value)  # the recording knows these tensors by address
        for k, v in work.given.items():
            _fill(self.given[k], v)
        if self.uphill is not None and work.uphill is not None:
            self.uphill.fill_(work.uphill)
        if self.average is not None:
            start = work.average or self.params
            torch._foreach_copy_(list(self.average.values()), [start[k] for k in self.average])


def draws_inside(net: nn.Module) -> bool:
    """Whether a step draws from torch's default generator, of which a process has only one."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in net.modules())


def step_key(arch: Arch, work: Work, frozen: tuple[str, ...]) -> tuple[Any, ...]:
    """What makes two fits the same recording: all but weights, data, rates and amounts of work."""
    data = work.shard.dataset
    given = tuple((k, _layout(v)) for k, v in sorted(work.given.items()))
    columns = tuple((k, tuple(c.shape[1:]), c.dtype) for k, c in sorted(work.shard.columns.items()))
    return (
        arch, work.task, kind_of(work.solver), work.loss, work.direction, given, work.uphill is None, work.report_gradient,
        work.updates, tuple(data.images.shape[1:]), data.images.dtype, data.peak, data.flip, columns, frozen,
    )  # fmt: skip


def _layout(value: Any) -> Any:
    if isinstance(value, Model):
        return value.arch
    if isinstance(value, Params):
        return tuple((k, tuple(t.shape)) for k, t in value.items())
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def kind_of(solver: Solver) -> Solver:
    """A solver without what may differ from fit to fit."""
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
