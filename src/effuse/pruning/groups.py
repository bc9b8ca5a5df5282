"""Groups of channels that must be removed together: Torch-Pruning's dependency graph of a network, as plain numbers."""

import dataclasses
import functools
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.errors import ModelError
from effuse.core.model import Arch
from effuse.models.cut import CONVOLUTIONS, depthwise, width_of

IN, OUT = "in", "out"
TRACING = threading.Lock()  # clients may run in parallel threads, and the tracer is not thread-safe


@dataclasses.dataclass(frozen=True)
class ChannelSlot:
    """Some input or output channels of one layer, and the group's channels that they belong to."""

    layer: str
    side: str
    at: Tensor  # indices in the layer
    channel: Tensor  # the group's channel at each of these indices

    def axes(self, layer: nn.Module) -> dict[str, int]:
        """The layer's parameters that have these channels, and the axis of each."""
        if isinstance(layer, nn.Embedding):
            return {f"{self.layer}.weight": 1}
        transposed = isinstance(layer, nn.ConvTranspose2d)  # its weight has the input channels first
        axis = 0 if self.side == OUT else 1
        found = {f"{self.layer}.weight": 1 - axis if transposed else axis}
        if self.side == OUT and getattr(layer, "bias", None) is not None:
            found[f"{self.layer}.bias"] = 0
        return found


@dataclasses.dataclass(frozen=True)
class Group:
    """Channels that can only be removed together, throughout the network."""

    name: str  # of its first layer
    channels: int
    blocks: int  # contiguous blocks of channels that must keep equal sizes: a GroupNorm's groups, attention's heads
    slots: tuple[ChannelSlot, ...]

    @property
    def layers(self) -> list[str]:
        return sorted({slot.layer for slot in self.slots})

    def keeps(self, ratio: float) -> int:
        """How many channels of each block stay: rounded down, but at least one."""
        # 8 * 0.7 = 5.6 keeps five; the epsilon is for floats such as 10 * (1 - 0.8), which is below 2
        return max(1, math.floor(self.channels // self.blocks * (1 - ratio) + 1e-9))


@functools.lru_cache(maxsize=8)
def groups_of(arch: Arch) -> tuple[Group, ...]:
    """Every group of a network, found on shapes alone."""
    import torch_pruning

    net = arch.hollow_net()
    with TRACING:
        graph = torch_pruning.DependencyGraph().build_dependency(net, example_inputs=arch.example())
    names = {module: name for name, module in net.named_modules()}
    found: list[Group] = []
    seen: set[str] = set()
    # convolutions first: a linear layer that scales and shifts them has twice their width
    for kind in (CONVOLUTIONS, nn.Linear):
        for module, name in names.items():
            if not isinstance(module, kind) or name in seen or depthwise(module) or _fixed(arch, name):
                continue
            slots = _slots(graph, module, names)
            seen |= {s.layer for s in slots if s.side == OUT}
            if not any(s.side == OUT and _fixed(arch, s.layer) for s in slots):
                found.append(_group(net, name, slots))
    return tuple(found)


def _slots(graph: Any, root: nn.Module, names: dict[nn.Module, str]) -> list[ChannelSlot]:
    pruner = graph.get_pruner_of_module(root)
    width = width_of(root)
    assert width is not None  # a convolution or a linear layer
    members = graph.get_pruning_group(root, pruner.prune_out_channels, list(range(width.out)))
    slots = []
    for member in members:
        layer = member.dep.target.module
        if layer in names and width_of(layer) is not None:
            side = OUT if graph.is_out_channel_pruning_fn(member.dep.handler) else IN
            order = torch.tensor(member.idxs).argsort(stable=True)
            slots.append(
                ChannelSlot(names[layer], side, torch.tensor(member.idxs)[order], torch.tensor(member.root_idxs)[order])
            )
    # the graph's own order may differ between processes, and with it the float sums
    return sorted(slots, key=lambda s: (s.layer, s.side, s.at[0].item()))


def _group(net: nn.Module, name: str, slots: list[ChannelSlot]) -> Group:
    width = width_of(net.get_submodule(name))
    assert width is not None  # a convolution or a linear layer
    channels, blocks = width.out, 1
    for slot in slots:
        layer = net.get_submodule(slot.layer)
        if isinstance(layer, nn.GroupNorm):
            blocks = math.lcm(blocks, layer.num_groups)
        parent: Any = net.get_submodule(slot.layer.rpartition(".")[0])
        if slot.side == OUT and slot.layer.rpartition(".")[2] in ("to_q", "to_k", "to_v"):  # of diffusers' attention
            blocks = math.lcm(blocks, parent.heads)
    if channels % blocks:
        raise ModelError(f"'{name}' has {channels} channels, which {blocks} equal blocks cannot share; it cannot be pruned")
    return Group(name, channels, blocks, tuple(slots))


def _fixed(arch: Arch, name: str) -> bool:
    return any(name == end or name.endswith("." + end) for end in arch.uncut)
