"""How many operations a recorded training step asks for, forwards and backwards, without views; needs no GPU.

    python benchmarks/operations.py [9M ...]

An operation is one kernel or a few. A step of a small network waits for their number as much as for what they compute.
"""

import collections
import sys
from typing import Any

import networks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from effuse.core.captured import KERNELS
from effuse.core.halves import Halved
from effuse.core.layout import for_tensor_cores

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Operations(TorchDispatchMode):
    """Counts what is computed: no views, no mere allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not aliases and name not in ALLOCATES:
            self.seen[name] += 1
        return out


def counted(name: str) -> "tuple[collections.Counter[str], collections.Counter[str]]":
    """Operations forwards, and backwards, of the network's step on two images."""
    arch = networks.ARCHS[name]
    net = for_tensor_cores(arch.build(), KERNELS).train()
    side, channels, _ = arch.shape
    x = torch.randn(2, channels, side, side).contiguous(memory_format=torch.channels_last)
    with _Operations() as forwards, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = Halved(net, lambda run: run)(x, torch.tensor([3, 700])).float().square().mean()
    with _Operations() as backwards:
        loss.backward()
    return forwards.seen, backwards.seen


def main() -> None:
    for name in sys.argv[1:] or list(networks.ARCHS):
        forwards, backwards = counted(name)
        print(f"{name}: {forwards.total()} operations forwards, {backwards.total()} backwards")
        for operation, n in (forwards + backwards).most_common(12):
            print(f"{n:>6} {operation}")


if __name__ == "__main__":
    main()
