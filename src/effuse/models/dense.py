"""DENSE's generator: labelled images from trained inputs (Zhang et al., 2022)."""

import math
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.model import Arch
from effuse.core.spec import spec

SLOPE = 0.2  # of the leaky ReLU
DEVIATION = 0.02  # of the first weights


@spec
class DenseGenerator(Arch):
    """A network that draws one batch of images, each from an input z that is trained with it."""

    conditional: ClassVar[bool] = True  # its images are drawn for labels

    batch: PositiveInt = 256  # images
    z: PositiveInt = 256  # numbers that an image is drawn from
    width: PositiveInt = 64

    def __post_init__(self) -> None:
        if self.side is not None and self.side % 4:
            raise ValueError(
                f"side {self.side} is no multiple of 4, and the generator doubles a side twice; resize the data"
            )

    def build(self) -> nn.Module:
        side, channels, _ = self.shape
        return GeneratorNet(self.batch, self.z, self.width, side, channels)

    def example(self) -> tuple[Tensor | None, ...]:
        """The number of one image."""
        with torch.device("meta"):
            return (torch.zeros(1, dtype=torch.int64),)


class GeneratorNet(nn.Module):
    """Linear, then twice up, and a sigmoid: images in [-1, 1]. It also remembers the best batch that a loss has seen."""

    best: Tensor
    lowest: Tensor

    def __init__(self, batch: int, z: int, width: int, side: int, channels: int) -> None:
        super().__init__()
        self.quarter = side // 4
        self.z = nn.Parameter(torch.randn(batch, z))
        self.first = nn.Linear(z, 2 * width * self.quarter**2)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(SLOPE),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(module.weight, 0.0, DEVIATION)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.register_buffer("best", torch.zeros(batch, channels, side, side))
        self.register_buffer("lowest", torch.full((), math.inf))

    def forward(self, rows: Tensor) -> Tensor:
        maps = self.first(self.z[rows]).unflatten(1, (-1, self.quarter, self.quarter))
        return 2.0 * self.layers(maps) - 1.0

    @torch.no_grad()
    def remember(self, images: Tensor, loss: Tensor) -> None:
        """Keep these images if their loss is the lowest so far; without a branch, so that a step can be recorded."""
        self.best.copy_(torch.where(loss < self.lowest, images, self.best))
        self.lowest.copy_(torch.minimum(loss, self.lowest))
