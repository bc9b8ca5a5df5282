"""A conditional variational autoencoder of residual blocks, as FedCVAE needs it: labels go into the decoder only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.build import with_values
from effuse.core.model import Arch, Model
from effuse.core.params import Buffers
from effuse.core.spec import spec
from effuse.models.resnet import BasicBlock
from effuse.models.saved import write_plain


@spec
class Cvae(Arch):
    """An autoencoder whose decoder takes z and a label. The default has 5.97 M parameters for 32x32 grey images."""

    conditional: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder": ("encoder",), "decoder": ("decoder",)}

    widths: tuple[int, ...] = (32, 96, 128, 256, 384)  # a residual block each; every one halves the side
    z: PositiveInt = 25  # numbers that an image is drawn from; FedCVAE takes 10 for grey images
    groups: PositiveInt = 8  # of every GroupNorm
    only: Literal["decoder"] | None = None  # without the encoder

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("widths is empty; an autoencoder needs at least one residual block")
        odd = next((w for w in self.widths if w % self.groups), None)
        if odd is not None:
            raise ValueError(f"width {odd} is not a multiple of groups={self.groups}; change either")
        if self.side is not None and self.side % 2 ** len(self.widths):
            raise ValueError(f"side {self.side} cannot be halved {len(self.widths)} times; use fewer widths")
        if self.side == 2 ** len(self.widths) and self.widths[-1] == self.groups:
            raise ValueError(
                f"groups={self.groups}: the last block's groups have one value each, which becomes 0; use fewer"
            )
        if self.side is not None and self.channels is not None and self.z > self.channels * self.side**2:
            raise ValueError(f"z={self.z} is more than an image's {self.channels * self.side**2} values; lower it")

    def build(self) -> nn.Module:
        side, channels, classes = self.shape
        return CvaeNet(side, channels, classes, self.widths, self.z, self.groups, self.only is None)

    def example(self) -> tuple[Tensor | None, ...]:
        """Noise, a time step and a label; with the noise of z, an image is encoded too."""
        x, *rest = super().example()
        return (x, *rest) if self.only else (x, *rest, x)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


def decoder_of(model: Model) -> Model:
    """An autoencoder without its encoder."""
    return Model(with_values(model.arch, "model", only="decoder"), model.part("decoder"), Buffers({}))


class CvaeNet(nn.Module):
    """Called like a U-Net, it decodes; with `noise`, it encodes the images and decodes a draw of z."""

    def __init__(
        self,
        side: int,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        z: int,
        groups: int,
        whole: bool,
    ) -> None:
        super().__init__()
        self.z = z
        self.encoder = _encoder(side, channels, widths, z, groups) if whole else None
        self.decoder = Decoder(side, channels, classes, widths, z, groups)

    def forward(self, x: Tensor, t: Tensor | None = None, labels: Tensor | None = None, noise: Tensor | None = None) -> Any:
        """Logits of the images that are decoded from the first values of x. Time steps are ignored.

        With `noise`: logits of the reconstruction of x, and mean and log variance of z.
        """
        if noise is None:
            return self.decoder(self.first(x), labels)
        if self.encoder is None:
            raise TypeError("only='decoder' has no encoder, so it cannot be trained on images")
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * self.first(noise)
        return self.decoder(z, labels), mean, log_variance

    def first(self, values: Tensor) -> Tensor:
        """As many values of each row as z has."""
        return values.flatten(1)[:, : self.z]


def _encoder(side: int, channels: int, widths: tuple[int, ...], z: int, groups: int) -> nn.Module:
    """A stem, blocks that halve the side, and the mean and the log variance of z."""
    first = widths[0]
    stem = [nn.Conv2d(channels, first, 3, padding=1, bias=False), nn.GroupNorm(groups, first), nn.ReLU()]
    blocks = [BasicBlock(a, b, 2, "group", groups) for a, b in zip((first, *widths), widths)]
    last = widths[-1] * (side // 2 ** len(widths)) ** 2
    return nn.Sequential(*stem, *blocks, nn.Flatten(), nn.Linear(last, 2 * z))


class Decoder(nn.Module):
    """z and a one-hot label to a small map, blocks that double the side, and the logits of the pixels."""

    def __init__(self, side: int, channels: int, classes: int, widths: tuple[int, ...], z: int, groups: int) -> None:
        super().__init__()
        self.classes, self.side = classes, side // 2 ** len(widths)
        rising = widths[::-1]
        self.first = nn.Linear(z + classes, rising[0] * self.side**2)
        layers: list[nn.Module] = []
        for a, b in zip(rising, (*rising[1:], rising[-1])):
            layers += [nn.Upsample(scale_factor=2), BasicBlock(a, b, 1, "group", groups)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(rising[-1], channels, 3, padding=1))

    def forward(self, z: Tensor, labels: Tensor | None) -> Tensor:
        y = z.new_zeros(len(z), self.classes)
        if labels is not None:  # by comparison: torch's one_hot looks at the labels' values, which stops a GPU
            y = (labels[:, None] == torch.arange(self.classes, device=z.device)).to(z.dtype)
        return self.layers(self.first(torch.cat([z, y], 1)).unflatten(1, (-1, self.side, self.side)))
