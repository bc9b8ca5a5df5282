"""MobileNetV2 of Sandler et al., 2018: inverted residual blocks with a thin trunk."""

from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.models.resnet import Head, LevelledNet, Norm, headed, projector
from effuse.models.saved import write_plain

STEM = 32
# of each stage: expansion, width, blocks, stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@spec
class MobileNetV2(Arch, name="mobilenet_v2"):
    """MobileNetV2, whose last width is FedDifRC's 512. The published network has last=1280, norm=batch and dropout 0.2."""

    featured: ClassVar[bool] = True
    levelled: ClassVar[bool] = True

    last: PositiveInt = 512  # the width of the features
    norm: Norm = "group"  # batch statistics are not private, and averaging them over skewed clients is harmful
    groups: PositiveInt = 8
    stride: PositiveInt = 2  # of the stem; 1 for small images
    projection: PositiveInt | None = None  # width of a two-layer projection before the head, as MOON's networks have
    head: Head = "linear"

    def __post_init__(self) -> None:
        widths = [STEM, self.last, *(width for _, width, _, _ in STAGES)]
        odd = [w for w in widths if w % self.groups]
        if odd and self.norm == "group":
            raise ValueError(f"width {odd[0]} is not a multiple of groups={self.groups}; change either")

    def build(self) -> nn.Module:
        _, channels, classes = self.shape
        return headed(MobileNet(channels, classes, self), self.head, scale=20.0)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


class MobileNet(LevelledNet):
    """A stem, stages of inverted residuals, a 1x1 convolution to the features, and a linear head.

    Its levels are the stem, the last block of each resolution but the smallest, and the last convolution.
    """

    def __init__(self, channels: int, classes: int, arch: MobileNetV2) -> None:
        super().__init__()
        self.stem = _layer(arch, channels, STEM, 3, arch.stride)
        blocks: list[nn.Module] = []
        width = STEM
        self.ends: set[int] = set()  # the blocks before a halving
        for expansion, w_out, count, stride in STAGES:
            self.ends |= {len(blocks) - 1} if stride > 1 else set()
            for block in range(count):
                blocks.append(Inverted(arch, width, w_out, stride if block == 0 else 1, expansion))
                width = w_out
        self.stages = nn.Sequential(*blocks, _layer(arch, width, arch.last, 1))
        self.projection = projector(arch.last, arch.projection)
        self.head = nn.Linear(arch.projection or arch.last, classes)

    def encoded(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))

    def maps(self, x: Tensor) -> list[Tensor]:
        *blocks, last = self.stages
        assert isinstance(last, nn.Sequential)
        found = [self.stem[:2](x)]
        x = F.relu6(found[0])
        for n, block in enumerate(blocks):
            x = block(x)
            found += [x] if n in self.ends else []  # a block has no activation at its end
        return [*found, last[:2](x)]

    def pooled(self, last: Tensor) -> Tensor:
        return F.relu6(last).mean(dim=(2, 3))


class Inverted(nn.Module):
    """Widen, convolve each channel alone, narrow without an activation; a shortcut where shapes agree."""

    def __init__(self, arch: MobileNetV2, width_in: int, width_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = width_in * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [_layer(arch, width_in, inner, 1)]
        layers.append(_layer(arch, inner, inner, 3, stride, alone=True))
        layers += [nn.Conv2d(inner, width_out, 1, bias=False), _norm(arch, width_out)]
        self.branch = nn.Sequential(*layers)
        self.shortcut = stride == 1 and width_in == width_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.shortcut else self.branch(x)


def _layer(
    arch: MobileNetV2, width_in: int, width_out: int, kernel: int, stride: int = 1, alone: bool = False
) -> nn.Sequential:
    groups = width_in if alone else 1
    convolution = nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, _norm(arch, width_out), nn.ReLU6())


def _norm(arch: MobileNetV2, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if arch.norm == "batch" else nn.GroupNorm(arch.groups, width)
