"""Costs, counted by hand on a network of two layers and on the published U-Net."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
from torch import Tensor, nn
from toy import ToyUnet

from effuse.core.data import Shape
from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.metrics.cost import activation_bytes, costs, layer_macs, macs, macs_by_operation, parameters
from effuse.models.unet import CifarUnet, DigitsUnet


@spec
class TwoLayers(Arch):
    __abstract__ = True

    def build(self) -> nn.Module:
        side, channels, classes = self.shape
        head = nn.Linear(4 * side * side, classes)
        return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), head)


class TinyUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.outward(self.inward(x))


@spec
class TinyParts(Arch):
    __abstract__ = True
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder": ("inward",), "decoder": ("outward",)}

    def build(self) -> nn.Module:
        return TinyUnet()


def test_a_classifier_by_hand() -> None:
    """5x5x3 in: convolution 25 * 27 * 4 = 2700 and linear 100 * 7 = 700; outputs 100 + 100 + 100 + 7 floats."""
    arch = TwoLayers().resolved(Shape(5, 3, 7))
    assert parameters(arch) == {"total": 4 * 27 + 4 + 700 + 7}
    assert macs_by_operation(arch) == {"convolution": 2700, "addmm": 700}
    assert macs(arch) == 3400
    assert activation_bytes(arch) == 307 * 4


def test_parts_by_hand() -> None:
    arch = TinyParts().resolved(Shape(4, 1, 2))
    assert parameters(arch) == {"total": 7, "encoder": 4, "decoder": 3}
    assert macs(arch) == 16 * 2 + 16 * 2
    assert activation_bytes(arch) == (32 + 16) * 4


def test_the_published_cifar_network() -> None:
    """Without attention's products, within 0.2 % of the 6.0655 G of a per-layer counter with norms."""
    arch = CifarUnet().resolved(Shape(32, 3, 10))
    assert parameters(arch) == {"total": 35_746_307, "encoder": 10_523_008, "bottleneck": 2_888_704, "decoder": 22_334_595}
    counted = macs_by_operation(arch)
    assert macs(arch) == sum(counted.values())
    assert abs(macs(arch) - counted["bmm"] - 6.0655e9) < 0.002 * 6.0655e9


def test_macs_up_to_the_features() -> None:
    """16 pixels: 36 products and 4 biases each, then 16 and 4, are 960; the last layer has 36 and 1 more: 1552."""
    arch = ToyUnet().resolved(Shape(4, 1, 2))
    assert (layer_macs(arch, "features"), layer_macs(arch)) == (16 * 40 + 16 * 20, 1552)
    assert (macs(arch, "features"), macs(arch)) == (16 * 36 + 16 * 16, 16 * 36 + 16 * 16 + 16 * 36)


def test_macs_by_layer() -> None:
    """5x5x3: convolution 2700 and 100 biases, linear 700 and 7.

    Published: 6.0655 G for 32x32 and 23.24 G for 64x64 images.
    """
    assert layer_macs(TwoLayers().resolved(Shape(5, 3, 7))) == 2700 + 100 + 700 + 7
    assert layer_macs(CifarUnet().resolved(Shape(32, 3, 10))) == 6_065_456_000
    assert layer_macs(CifarUnet().resolved(Shape(64, 3, 4))) == 23_240_624_000


def test_a_conditional_network_gets_labels() -> None:
    arch = DigitsUnet().resolved(Shape(8, 1, 10))
    assert macs(arch) > 0
    assert activation_bytes(arch) > 0


def sent(**links: tuple[float, float]) -> dict:
    """Links with so many MiB up and down."""
    return {
        name.replace("_", "-"): {"up": {"bytes": round(up * 2**20)}, "down": {"bytes": round(down * 2**20)}}
        for name, (up, down) in links.items()
    }


def test_the_published_costs():
    """(0.2 n_cc + 0.002 n_ce) V for one aggregation in the cloud, with V the saved model: 136.53 MiB, or 77.93 when pruned.

    FedAvg: 4 uploads, 0.8 * 136.53 = 109.224 (printed 109.22); with E=1 five times that, 546.12 (546.10 is five times
    109.22); SCAFFOLD twice, 218.45 (218.44). FedPhD: 2 edges in both directions and 20 client uploads, (0.8 + 0.04) * 77.93
    = 65.461 (65.46).
    """
    V, pruned = 136.53, 77.93
    fedavg = costs(sent(client_server=(4 * V, 4 * V)))
    assert fedavg["paper"] == pytest.approx(109.224, abs=1e-4) and fedavg["symmetric"] == pytest.approx(218.448, abs=1e-4)
    assert costs(sent(client_server=(20 * V, 20 * V)))["paper"] == pytest.approx(546.12, abs=1e-4)
    assert costs(sent(client_server=(8 * V, 8 * V)))["paper"] == pytest.approx(218.448, abs=1e-4)
    fedphd = costs(sent(edge_cloud=(2 * pruned, 2 * pruned), client_edge=(20 * pruned, 20 * pruned)))
    assert fedphd["paper"] == pytest.approx(65.4612, abs=1e-4) and fedphd["symmetric"] == pytest.approx(68.5784, abs=1e-4)
    savings = [100 * (1 - 65.46 / other) for other in (546.10, 109.22)]
    assert savings == pytest.approx([88.0, 40.1], abs=0.05)


def test_costs_of_directions_that_differ():
    """Clients send 10 MiB to the cloud and receive 30, send 100 to edges and receive 700; edges send 5 and receive 2.

    The paper: 0.2 * (10 + 7) + 0.002 * 100 = 3.6. Both directions everywhere: 0.2 * (40 + 7) + 0.002 * 800 = 11.
    """
    found = costs(sent(client_server=(10, 30), client_edge=(100, 700), edge_cloud=(5, 2)))
    assert [found["paper"], found["symmetric"]] == pytest.approx([3.6, 11.0])
