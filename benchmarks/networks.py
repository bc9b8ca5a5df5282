"""The networks of the benchmarks, and the operations of their training steps."""

import collections
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from effuse.core.data import Shape
from effuse.core.model import Arch
from effuse.fast.graph.captured import KERNELS
from effuse.fast.layout import for_tensor_cores
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import CifarUnet
from effuse.pruning.prune import cut

ARCHS: dict[str, Arch] = {
    "3M": ConvnextUnet().resolved(Shape(28, 1, 10)),
    "36M": CifarUnet().resolved(Shape(32, 3, 10)),
}
# the network of FedPhD's comparison
ARCHS["9M"] = CifarUnet(widths=(64, 128, 128, 128), groups=16, dropout=0.0).resolved(Shape(32, 3, 10))
ARCHS["20M"], ARCHS["5M"] = (cut(ARCHS[name], 0.2) for name in ("36M", "9M"))  # as FedPhD prunes them
BATCH = 128
T = TypeVar("T", bound=Hashable)


class Calls(TorchDispatchMode):
    """Counts the values of `note` for every operator and its arguments; None is not counted."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.note, self.seen = note, collections.Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        noted = self.note(func, args)
        if noted is not None:
            self.seen[noted] += 1
        return func(*args, **(kwargs or {}))


def operations(name: str, note: Callable[[Any, tuple[Any, ...]], T | None]) -> "collections.Counter[T]":
    """The values of `note` in the forward pass of a step, with counts; nothing is computed."""
    side, channels, _ = ARCHS[name].shape
    with torch.device("meta"):
        net = torch.nn.Module.to(for_tensor_cores(ARCHS[name].build(), KERNELS).train(), torch.bfloat16)
        x = torch.zeros(BATCH, channels, side, side, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        with Calls(note) as calls:
            net(x, torch.zeros(BATCH, dtype=torch.int64))
    return calls.seen
