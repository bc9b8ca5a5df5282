"""What a run costs: parameters, multiply-accumulates and activations, counted on shapes, and traffic by FedPhD's prices."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from effuse.core.algorithm import Algorithm
from effuse.core.capabilities import Companions
from effuse.core.ledger import CLIENT_EDGE, CLIENT_SERVER, DIRECTIONS, EDGE_CLOUD
from effuse.core.model import Arch, Model
from effuse.core.task import Give
from effuse.models.cut import Cuttable

MIB = 2**20
# the price of a MiB to the cloud (distance 10) and to an edge (distance 1): FedPhD, section V
TO_CLOUD, TO_EDGE = 0.2, 0.002


def parameters(arch: Arch) -> dict[str, int]:
    """The number of parameters in total and in each part."""
    counts = {"total": 0} | dict.fromkeys(arch.parts, 0)
    for name, p in arch.hollow_net().named_parameters():
        counts["total"] += p.numel()
        if arch.parts:
            counts[arch.part_of(name)] += p.numel()
    return counts


def macs(arch: Arch, give: Give = "output") -> int:
    """Multiply-accumulates of one image's forward pass, including attention's products."""
    return sum(macs_by_operation(arch, give).values())


def macs_by_operation(arch: Arch, give: Give = "output") -> dict[str, int]:
    """The same for each torch operation: published counts often omit attention's products (`bmm`)."""
    net = arch.hollow_net()
    with FlopCounterMode(display=False) as counter:
        _forward(arch, net, give)
    # torch counts a multiplication and an addition as two
    return {str(op).removeprefix("aten."): flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}


def layer_macs(arch: Arch, give: Give = "output") -> int:
    """Multiply-accumulates as the pruning literature counts them, layer by layer.

    A bias counts one operation for every output, a normalisation two for every value, and attention's products nothing.
    """
    total = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            grid = inputs[0] if isinstance(module, nn.ConvTranspose2d) else output
            positions = grid.numel() // grid.shape[-1 if isinstance(module, nn.Linear) else 1]
            total += positions * module.weight.numel() + (output.numel() if module.bias is not None else 0)
        elif isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm)):
            total += 2 * output.numel()

    _hooked(arch, add, give)
    return total


def activation_bytes(arch: Arch) -> int:
    """The bytes of all layers' outputs for one image: an estimate of what the forward pass keeps for the backward pass."""
    total = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += output.numel() * output.element_size()

    _hooked(arch, add)
    return total


def costs(links: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, float]:
    """Traffic weighted by distance, in MiB: as FedPhD counts it, and with both directions of every link.

    The paper counts only clients' uploads, but both directions between edges and cloud.
    """

    def mib(link: str, *directions: str) -> float:
        return sum(links[link][d]["bytes"] for d in directions) / MIB if link in links else 0.0

    tree = TO_CLOUD * mib(EDGE_CLOUD, *DIRECTIONS)
    return {
        "paper": tree + TO_CLOUD * mib(CLIENT_SERVER, "up") + TO_EDGE * mib(CLIENT_EDGE, "up"),
        "symmetric": tree + TO_CLOUD * mib(CLIENT_SERVER, *DIRECTIONS) + TO_EDGE * mib(CLIENT_EDGE, *DIRECTIONS),
    }


def figures(model: Model, algorithm: Algorithm, costs: Mapping[str, float]) -> dict[str, float]:
    """The figures for tables: parameters in millions and costs weighted by distance.

    A network that can be pruned adds its multiply-adds in billions, and those of frozen companions for every training image.
    """
    counted = {}
    if isinstance(model.arch, Cuttable):
        counted["gmacs"] = layer_macs(model.arch) / 1e9
        if isinstance(algorithm, Companions):
            counted["gmacs_frozen"] = algorithm.frozen * layer_macs(model.arch, "features") / 1e9
    return {"parameters_m": model.params.numel / 1e6, **counted, **{f"{name}_cost": c for name, c in costs.items()}}


def _hooked(arch: Arch, hook: Callable[[nn.Module, tuple[Tensor, ...], Tensor], None], give: Give = "output") -> None:
    """Run a forward pass and call the hook for every layer, with its inputs and its output."""
    net = arch.hollow_net()
    for module in net.modules():
        if not any(module.children()):
            module.register_forward_hook(hook)
    _forward(arch, net, give)


@torch.no_grad()
def _forward(arch: Arch, net: nn.Module, give: Give) -> None:
    options: dict[str, Any] = {} if give == "output" else {"give": give}
    with torch.device("meta"):
        net(*arch.example(), **options)
