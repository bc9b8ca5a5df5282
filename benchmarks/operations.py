"""Count the operations of a network's training step, forwards and backwards, as recorded; needs no GPU.

    python benchmarks/operations.py [--json] [9M ...]

Views and allocations are not counted. An operation is one kernel or a few.
"""

import argparse
import collections
import json
from typing import Any

import networks
import torch

from effuse.fast.graph.captured import KERNELS
from effuse.fast.layout import for_tensor_cores
from effuse.fast.ops.bf16 import Bf16Weights

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def computes(func: Any, args: tuple[Any, ...]) -> str | None:
    """The name of an operator that computes something; None for views and allocations."""
    name = func.overloadpacket.__name__
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return None if view or name in ALLOCATES else name


def counted(name: str) -> "tuple[collections.Counter[str], collections.Counter[str]]":
    """The operations of the network's step on two images, forwards and backwards."""
    arch = networks.ARCHS[name]
    net = for_tensor_cores(arch.build(), KERNELS).train()
    side, channels, _ = arch.shape
    x = torch.randn(2, channels, side, side).contiguous(memory_format=torch.channels_last)
    with networks.Calls(computes) as forwards, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = Bf16Weights(net, lambda run: run)(x, torch.tensor([3, 700])).float().square().mean()
    with networks.Calls(computes) as backwards:
        loss.backward()
    return forwards.seen, backwards.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"some of {', '.join(networks.ARCHS)}; by default all")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.networks if name not in networks.ARCHS]:
        parser.error(f"no network {unknown[0]}; there are {', '.join(networks.ARCHS)}")
    found = {name: counted(name) for name in arguments.networks or networks.ARCHS}
    if arguments.json:
        print(json.dumps({name: {"forwards": f, "backwards": b} for name, (f, b) in found.items()}))
        return
    for name, (forwards, backwards) in found.items():
        print(f"{name}: {forwards.total()} operations forwards, {backwards.total()} backwards")
        for operation, n in (forwards + backwards).most_common(12):
            print(f"{n:>6} {operation}")


if __name__ == "__main__":
    main()
