"""The captured machine: a training step or a network evaluation is recorded once as a CUDA graph, then replayed.

On one GPU, Python and kernel launches limit a round of a small U-Net, not arithmetic. Here a step (forward, loss, backward,
direction, clipping, optimiser) works on static buffers. A client's weights, data and randomness are copied in before each
replay, so one recording per (network, solver, loss, direction, batch shape) serves every client of every round.
"""

import gc
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.fit import Fit, Work
from effuse.core.metric import Images
from effuse.core.model import Arch, Net, draws_inside
from effuse.core.params import Params
from effuse.core.rng import SETTINGS, Stream, keyed
from effuse.core.sampler import Sampler
from effuse.core.task import Feature, Given, Task
from effuse.fast.graph.private import PrivateSteps
from effuse.fast.graph.recording import RECORDERS, deterministic, record
from effuse.fast.graph.sampling import Evaluation, Recorded
from effuse.fast.graph.static import StaticFit
from effuse.fast.graph.step import TrainingStep, step_key
from effuse.fast.layout import channels_last, for_tensor_cores
from effuse.fast.ops.bf16 import Bf16Weights
from effuse.fast.ops.kernels import available
from effuse.machines.eager import Eager

T = TypeVar("T")
KERNELS = ("norm", "attention", "cast")  # replaced by our kernels where these run; "norm" includes the adjacent biases
TRIES_TILINGS = "write_are_deterministic_algorithms_enabled"  # if False, the compiler tries tilings in deterministic mode
VARIANTS = (
    256  # compiled variants of a function in a process; torch's default of 8 is too few for a table of pruned networks
)


class Captured(Eager):
    """A GPU whose steps are CUDA graphs in bf16; weights and optimiser state stay fp32."""

    arithmetic = "bf16"
    stream: torch.cuda.Stream

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
        # a recording uses its stream's scratch memory, so recordings that may run at the same time need separate streams:
        # the server may draw from one client's model while the next client trains
        self.stream, self.drawing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.captures = 0  # recordings made, for tests
        self._steps: dict[Any, StaticFit] = {}
        self._evaluations: dict[Any, Evaluation] = {}

    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        if not recordable(net.module, work):
            with SETTINGS:  # a recording in another thread would choose other algorithms, and fail beside this fit's
                return super().fit(net, work)
        frozen = tuple(k for k, p in net.params.items() if not p.requires_grad)
        key = step_key(net.arch, work, frozen)
        if key not in self._steps:
            kind: type[TrainingStep | PrivateSteps] = TrainingStep if work.private is None else PrivateSteps
            self._steps[key] = self._made(lambda: kind(self, net.arch, work, frozen))
        step = self._steps[key]
        if not step.draws:
            return step.run(net, work)
        with keyed(work.stream.child("dropout")):
            return step.run(net, work)

    def apply(self, net: Net, function: Feature, task: Task, shard: Shard, given: Given, stream: Stream) -> Tensor:
        with SETTINGS:
            return super().apply(net, function, task, shard, given, stream)

    def _made(self, make: Callable[[], T]) -> T:
        """A recording, made while no other thread relies on torch's settings."""
        with SETTINGS:
            made = self.recorder.submit(make).result()
        self.captures += 1
        return made

    def forget(self, arch: Arch) -> None:
        super().forget(arch)
        for recordings in (self._steps, self._evaluations):
            self._drop(recordings, [key for key in recordings if key[0] == arch])

    def reset_for(self, networks: Collection[Arch]) -> None:
        """Drop recordings that the last run did not use: those of a table of many methods would fill a GPU."""
        super().reset_for(networks)
        self._drop(self._steps, [key for key, step in self._steps.items() if not step.used])
        for step in self._steps.values():
            step.used = False

    def _drop(self, recordings: dict[Any, Any], keys: list[Any]) -> None:
        for key in keys:
            del recordings[key]
        if keys:
            gc.collect()  # compiled networks have reference cycles
            torch.cuda.empty_cache()

    def _known(self) -> set[Arch]:
        return super()._known() | {key[0] for recordings in (self._steps, self._evaluations) for key in recordings}

    @torch.no_grad()
    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        return self._drawn(Recorded(self, net.eval()), net.arch, task, n, sampler, labels, stream)

    def evaluation(self, arch: Arch, x: Tensor, t: Tensor, labels: bool) -> Evaluation:
        """The recording for batches of that shape."""
        key = (arch, tuple(x.shape), t.dtype, labels)
        if key not in self._evaluations:
            self._evaluations[key] = self._made(lambda: Evaluation(self, arch, x, t, labels))
        return self._evaluations[key]

    def network(self, arch: Arch, plain: bool = False) -> nn.Module:
        """A new network for a recording, laid out for the tensor cores; a plain one keeps torch's own operations."""
        with keyed(Stream(("blank",))), torch.device(self.device):
            module = channels_last(arch.build()) if plain else for_tensor_cores(arch.build(), self.kernels)
        for name, p in module.named_parameters():
            p.requires_grad_(not arch.constant(name))
        return module

    def companion(self, arch: Arch, plain: bool = False) -> Net:
        """A frozen network that a loss may call. Each fit fills it."""
        module = self.network(arch, plain).eval().requires_grad_(False)
        return Net(module, module if plain else self.faster(module), arch)

    def faster(self, module: Any) -> Any:
        if not self.compiled:
            return module
        # beyond this limit torch runs uncompiled; the setting is per thread, so it is set here, in the recording thread
        torch._dynamo.config.recompile_limit = VARIANTS
        # in torch's deterministic mode, used for recordings, the compiler would not try tilings of reductions; a tiling
        # repeats to the bit, so only a run that must give the same bits in every process skips the trial
        choice = "deterministic" if self.reproducible else TRIES_TILINGS
        options: dict[str, Any] | None = {choice: self.reproducible} if hasattr(torch._inductor.config, choice) else None
        return torch.compile(module, dynamic=False, options=options)

    def trained(self, net: nn.Module) -> Any:
        """The callable of the network for a training step."""
        return Bf16Weights(net, self.faster) if "cast" in self.kernels else self.faster(net)

    def recorded(self, step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        return deterministic(lambda: record(step, stream, trying=not self.reproducible), always=self.reproducible)


def recordable(net: nn.Module, work: Work) -> bool:
    """Whether a recording does the same as an eager fit."""
    if work.private is not None:
        return not draws_inside(net)  # the units of a batch would share the masks of keyed dropout
    mixing = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    return not (mixing and work.solver.ragged_on(len(work.shard)))  # padding would change the statistics of a batch
