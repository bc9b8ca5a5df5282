"""Sampling on a GPU: a network evaluation is recorded once per batch shape, and filled with each model's weights."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effuse.core.model import Arch, Net
from effuse.fast.ops.bf16 import to_bf16

if TYPE_CHECKING:
    from effuse.fast.graph.captured import Captured


class Evaluation:
    """One recorded network evaluation, for sampling."""

    def __init__(self, machine: "Captured", arch: Arch, x: Tensor, t: Tensor, labels: bool) -> None:
        device = machine.device
        self.net = machine.network(arch).eval()
        if "cast" in machine.kernels:
            to_bf16(self.net)
        self.x = torch.zeros_like(x)
        self.t = torch.zeros(len(x), dtype=t.dtype, device=device)
        self.labels = torch.zeros(len(x), dtype=torch.int64, device=device) if labels else None
        self.out = torch.zeros_like(x)
        run = machine.faster(self.net)

        @torch.no_grad()
        def evaluate() -> None:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                y = run(self.x.contiguous(memory_format=torch.channels_last), self.t, self.labels)
            self.out.copy_(y)

        self.graph = machine.recorded(evaluate, machine.drawing)

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """The network's output for at most as many images as were recorded. Images do not influence each other."""
        n = len(x)
        self.x[:n].copy_(x)
        self.t[:n].copy_(t)
        if self.labels is not None and labels is not None:
            self.labels[:n].copy_(labels)
        self.graph.replay()
        return self.out[:n].clone()  # a multistep sampler keeps outputs beyond the next replay

    def fill(self, net: Net) -> None:
        """Copy a network's present weights."""
        own, given = self.net.state_dict(keep_vars=True), net.module.state_dict(keep_vars=True)
        torch._foreach_copy_(list(own.values()), list(given.values()))


class Recorded:
    """Replaces a network during sampling by the recording for the batch shape, filled with the network's present weights."""

    def __init__(self, machine: "Captured", net: Net) -> None:
        self.machine, self.net = machine, net
        self.filled: Evaluation | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        if self.filled is None or len(self.filled.x) < len(x):  # a smaller last batch uses the same recording
            self.filled = self.machine.evaluation(self.net.arch, x, t, labels is not None)
            self.filled.fill(self.net)
        return self.filled(x, t, labels)
