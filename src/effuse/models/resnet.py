"""Classifiers: the residual network of He et al., 2016, with a stem for small images, a small plain one, a linear one."""

import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.errors import ModelError
from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.core.task import Give, in_fp32
from effuse.models.saved import write_plain

Norm = Literal["group", "batch"]
Head = Literal["linear", "cosine"]  # cosine: a trained scale times the cosine of the features with fixed unit vectors


@spec
class Resnet(Arch):
    """A ResNet of basic blocks; the defaults are FedDiff's ResNet16, and blocks=[1, 1, 1, 1] is a ResNet-10."""

    featured: ClassVar[bool] = True
    levelled: ClassVar[bool] = True

    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 1)
    norm: Norm = "group"  # batch statistics are not private, and averaging them over skewed clients is harmful
    groups: PositiveInt = 32
    projection: PositiveInt | None = None  # width of a two-layer projection before the head, as MOON's networks have
    head: Head = "linear"

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.blocks) or not self.widths or min(self.blocks) < 1:
            raise ValueError(f"widths={list(self.widths)} and blocks={list(self.blocks)} must pair up, blocks from 1 on")
        _check_groups(self.widths, self.norm, self.groups)

    def build(self) -> nn.Module:
        _, channels, classes = self.shape
        net = ResNet(channels, classes, self.widths, self.blocks, self.norm, self.groups, self.projection)
        return headed(net, self.head, scale=20.0)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class Cnn(Arch):
    """A plain convolutional classifier that learns small images in seconds on a CPU."""

    featured: ClassVar[bool] = True
    levelled: ClassVar[bool] = True

    widths: tuple[int, ...] = (32, 64)
    norm: Norm = "group"
    groups: PositiveInt = 8
    projection: PositiveInt | None = None  # width of a two-layer projection before the head, as MOON's networks have
    head: Head = "linear"

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("widths is empty; a classifier needs at least one convolution")
        _check_groups(self.widths, self.norm, self.groups)
        if self.side is not None and self.side < 2 ** len(self.widths):
            raise ValueError(f"side {self.side} cannot be halved {len(self.widths)} times; use fewer widths")

    def build(self) -> nn.Module:
        side, channels, classes = self.shape
        net = ConvNet(side, channels, classes, self.widths, self.norm, self.groups, self.projection)
        return headed(net, self.head, scale=1.0)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class LinearClassifier(Arch):
    """A weight for each pixel and class: for the nearest class mean, and to see what a network adds."""

    featured: ClassVar[bool] = True

    def build(self) -> nn.Module:
        side, channels, classes = self.shape
        return LinearNet(channels * side**2, classes)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


class ClassifierNet(nn.Module, ABC):
    """`features(x)` gives one vector per image, `head` turns it into logits."""

    projection: nn.Module
    head: nn.Module

    @abstractmethod
    def encoded(self, x: Tensor) -> Tensor:
        """The output of the stages, one vector per image."""

    def features(self, x: Tensor) -> Tensor:
        """The input of the head."""
        return self.projection(self.encoded(x))

    def forward(self, x: Tensor, give: Give = "output") -> Any:
        features = self.features(x)
        if give == "features":
            return features
        return (self.head(features), features) if give == "both" else self.head(features)


class LevelledNet(ClassifierNet):
    """A classifier that also shows its levels."""

    @abstractmethod
    def maps(self, x: Tensor) -> list[Tensor]:
        """The map of each level before its ReLU, from the first on."""

    @abstractmethod
    def pooled(self, last: Tensor) -> Tensor:
        """What `encoded` makes of the last map."""

    def forward(self, x: Tensor, give: Give = "output") -> Any:
        if give != "levels":
            return super().forward(x, give)
        maps = self.maps(x)
        # in fp32 also under autocast: the levels of two images are compared
        levels = tuple(level.mean((2, 3), dtype=torch.float32) for level in maps)
        features = self.projection(self.pooled(maps[-1]))
        return self.head(features), features, levels


class ResNet(LevelledNet):
    """A stem, stages of basic blocks, and a linear head."""

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        norm: Norm,
        groups: int,
        projection: int | None,
    ) -> None:
        super().__init__()
        first = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, _norm(norm, groups, widths[0]), nn.ReLU())
        stages: list[nn.Module] = []
        for stage, (w_in, w_out) in enumerate(itertools.pairwise((widths[0], *widths))):
            for block in range(blocks[stage]):
                enters = block == 0
                stages.append(BasicBlock(w_in if enters else w_out, w_out, 2 if enters and stage else 1, norm, groups))
        self.ends = {n - 1 for n in itertools.accumulate(blocks)}  # the last block of each stage
        self.stages = nn.Sequential(*stages)
        self.projection = projector(widths[-1], projection)
        self.head = nn.Linear(projection or widths[-1], classes)

    def encoded(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))

    def maps(self, x: Tensor) -> list[Tensor]:
        x = self.stem[1](self.stem[0](x))
        found = [x]
        for n, block in enumerate(self.stages):
            assert isinstance(block, BasicBlock)
            x = block.summed(F.relu(x))
            found += [x] if n in self.ends else []
        return found

    def pooled(self, last: Tensor) -> Tensor:
        return F.relu(last).mean(dim=(2, 3))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, width_in: int, width_out: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False),
            _norm(norm, groups, width_out),
            nn.ReLU(),
            nn.Conv2d(width_out, width_out, 3, padding=1, bias=False),
            _norm(norm, groups, width_out),
        )
        changes = stride != 1 or width_in != width_out
        self.shortcut = (
            nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False), _norm(norm, groups, width_out))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.summed(x))

    def summed(self, x: Tensor) -> Tensor:
        """The output before its ReLU."""
        return self.branch(x) + self.shortcut(x)


class ConvNet(LevelledNet):
    """Convolution, normalisation and 2x2 maximum, once per width."""

    def __init__(
        self,
        side: int,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        norm: Norm,
        groups: int,
        projection: int | None,
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for w_in, w_out in itertools.pairwise((channels, *widths)):
            convolution = nn.Conv2d(w_in, w_out, 3, padding=1, bias=False)
            stages += [convolution, _norm(norm, groups, w_out), nn.ReLU(), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages)
        encoded = widths[-1] * (side // 2 ** len(widths)) ** 2
        self.projection = projector(encoded, projection)
        self.head = nn.Linear(projection or encoded, classes)

    def encoded(self, x: Tensor) -> Tensor:
        return self.stages(x).flatten(1)

    def maps(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self.stages:
            found += [x] if isinstance(layer, nn.ReLU) else []
            x = layer(x)
        return found

    def pooled(self, last: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(last), 2).flatten(1)


class LinearNet(ClassifierNet):
    """Pixels and a linear head."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.projection, self.head = nn.Identity(), nn.Linear(pixels, classes)

    def encoded(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class CosineHead(nn.Module):
    """Logits s cos(z, W_c). The rows of W are orthonormal at first and in no optimiser; s is trained."""

    weight: Tensor  # a buffer, so that it travels with the model and no fit changes it

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__()
        if classes > width:
            raise ModelError(f"{classes} classes have no orthonormal vectors among {width} features; use head=linear")
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(classes, width)))
        self.scale = nn.Parameter(torch.full((), scale))

    def forward(self, z: Tensor) -> Tensor:
        with in_fp32(z):
            return self.scale * F.linear(F.normalize(z.float(), dim=1), F.normalize(self.weight, dim=1))


def headed(net: ClassifierNet, head: Head, scale: float) -> ClassifierNet:
    """A classifier whose linear head is replaced, where another one is wanted."""
    if head == "cosine":
        assert isinstance(net.head, nn.Linear)
        net.head = CosineHead(net.head.in_features, net.head.out_features, scale)
    return net


def projector(encoded: int, width: int | None) -> nn.Module:
    """Two layers from what a network encodes to its features; nothing without a width."""
    if width is None:
        return nn.Identity()
    return nn.Sequential(nn.Linear(encoded, encoded), nn.ReLU(), nn.Linear(encoded, width))


def _norm(kind: Norm, groups: int, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(groups, width)


def _check_groups(widths: tuple[int, ...], norm: Norm, groups: int) -> None:
    odd = [w for w in widths if w % groups]
    if odd and norm == "group":
        raise ValueError(f"width {odd[0]} is not a multiple of groups={groups}; change either")
