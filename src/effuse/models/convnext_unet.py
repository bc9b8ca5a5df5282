"""The ConvNeXt U-Net of FedDiffuse: 2,996,315 parameters for 28x28 grey images."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.core.task import Give
from effuse.models.cut import Cut, narrowed
from effuse.models.saved import write_plain

HEADS, HEAD_WIDTH = 4, 32
INNER = HEADS * HEAD_WIDTH


@spec
class ConvnextUnet(Arch):
    """A U-Net of ConvNeXt blocks with linear attention; its base width is the image side unless `dim` says otherwise."""

    featured: ClassVar[bool] = True
    uncut: ClassVar[tuple[str, ...]] = ("tail.1", "qkv")  # the forward pass has a fixed number of heads
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("stem", "time", "label", "downs"),
        "bottleneck": ("middle",),
        "decoder": ("ups", "tail"),
    }

    dim: PositiveInt | None = None
    multipliers: tuple[int, ...] = (1, 2, 4)
    conditional: bool = False  # one class embedding more than there are classes: the last is the null label
    cut: Cut = ""  # the widths of pruned layers

    def __post_init__(self) -> None:
        if not self.multipliers:
            raise ValueError("multipliers is empty; a U-Net needs at least one resolution")
        halvings = len(self.multipliers) - 1
        if self.side is not None and self.side % 2**halvings:
            raise ValueError(f"side {self.side} cannot be halved {halvings} times; use fewer multipliers or resize")
        dim = self.dim or self.side
        if dim is not None and (dim < 4 or dim % 2):
            raise ValueError(f"dim is {dim}; sines and cosines need an even number from 4 on")

    def build(self) -> nn.Module:
        side, channels, classes = self.shape
        net = ConvNeXtUNet(self.dim or side, self.multipliers, channels, classes if self.conditional else None)
        return narrowed(net, self.cut)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


class ConvNeXtUNet(nn.Module):
    """Called as `net(x, t, labels)`."""

    def __init__(self, dim: int, multipliers: tuple[int, ...], channels: int, classes: int | None) -> None:
        super().__init__()
        stem = dim // 3 * 2
        widths = [stem, *(dim * m for m in multipliers)]
        levels = list(itertools.pairwise(widths))
        self.stem = nn.Conv2d(channels, stem, 7, padding=3)
        self.time = nn.Sequential(Sinusoids(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 4 * dim))
        self.label = None if classes is None else nn.Embedding(classes + 1, 4 * dim)
        self.downs = nn.ModuleList(
            Level(w_in, w_out, 4 * dim, nn.Conv2d(w_out, w_out, 4, 2, 1) if i < len(levels) - 1 else None)
            for i, (w_in, w_out) in enumerate(levels)
        )
        self.middle = Middle(widths[-1], 4 * dim)
        # half of a decoder level's input channels come from its skip connection
        self.ups = nn.ModuleList(
            Level(2 * w_out, w_in, 4 * dim, nn.ConvTranspose2d(w_in, w_in, 4, 2, 1)) for w_in, w_out in reversed(levels[1:])
        )
        self.tail = nn.Sequential(Block(widths[1], widths[1], None), nn.Conv2d(widths[1], channels, 1))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, give: Give = "output") -> Any:
        embedding = self.time(t)
        if self.label is not None:
            null = self.label.num_embeddings - 1
            labels = torch.full_like(t, null, dtype=torch.int64) if labels is None else torch.where(labels < 0, null, labels)
            embedding = embedding + self.label(labels)
        embedding = self.times(embedding, give)
        x = self.stem(x)
        skips: list[Tensor] = []
        for down in self.downs:
            x, skip = down(x, embedding)
            skips.append(skip)
        x = self.middle(x, embedding)
        features = x.mean(dim=(2, 3)) if give != "output" else None
        if give == "features":
            return features
        for up in self.ups:
            x, _ = up(torch.cat([x, skips.pop()], dim=1), embedding)
        x = self.tail(x)
        return (x, features) if give == "both" else x

    def times(self, embedding: Tensor, give: Give) -> Any:
        """The blocks' time input: the embedding, which each block projects itself."""
        return embedding


class Level(nn.Module):
    """Two blocks and linear attention at one resolution, then a change of resolution."""

    def __init__(self, width_in: int, width_out: int, embedded: int, resample: nn.Module | None) -> None:
        super().__init__()
        self.first = Block(width_in, width_out, embedded)
        self.second = Block(width_out, width_out, embedded)
        self.attention = LinearAttention(width_out)
        self.resample = resample

    def forward(self, x: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the next resolution, and that of the skip connection."""
        x = self.attention(self.second(self.first(x, embedding), embedding))
        return (x if self.resample is None else self.resample(x)), x


class Middle(nn.Module):
    """Two blocks around full attention at the lowest resolution."""

    def __init__(self, width: int, embedded: int) -> None:
        super().__init__()
        self.first = Block(width, width, embedded)
        self.attention = FullAttention(width)
        self.second = Block(width, width, embedded)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.second(self.attention(self.first(x, embedding)), embedding)


class Block(nn.Module):
    """A ConvNeXt block: depthwise 7x7, plus the time embedding, then two 3x3 convolutions through twice the width."""

    def __init__(self, width_in: int, width_out: int, embedded: int | None) -> None:
        super().__init__()
        self.time = None if embedded is None else nn.Linear(embedded, width_in)
        self.depthwise = nn.Conv2d(width_in, width_in, 7, padding=3, groups=width_in)
        self.mix = nn.Sequential(
            nn.GroupNorm(1, width_in),
            nn.Conv2d(width_in, 2 * width_out, 3, padding=1),
            nn.GELU(),
            nn.GroupNorm(1, 2 * width_out),
            nn.Conv2d(2 * width_out, width_out, 3, padding=1),
        )
        self.residual = nn.Conv2d(width_in, width_out, 1) if width_in != width_out else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        h = self.depthwise(x)
        if self.time is not None and embedding is not None:
            h = h + self.time(F.gelu(embedding))[:, :, None, None]
        return self.mix(h) + self.residual(x)


class LinearAttention(nn.Module):
    """Shen et al., 2021: separate softmaxes over features and over positions, at a cost linear in the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.qkv = nn.Conv2d(width, 3 * INNER, 1, bias=False)
        self.out = nn.Sequential(nn.Conv2d(INNER, width, 1), nn.GroupNorm(1, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _heads(self.qkv(self.norm(x)))  # each B x heads x head width x positions
        context = k.softmax(dim=-1) @ v.transpose(-1, -2)
        h = context.transpose(-1, -2) @ (q.softmax(dim=-2) * HEAD_WIDTH**-0.5)
        return x + self.out(h.reshape(x.shape[0], INNER, *x.shape[2:]))


class FullAttention(nn.Module):
    """Scaled dot-product attention between all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.qkv = nn.Conv2d(width, 3 * INNER, 1, bias=False)
        self.out = nn.Conv2d(INNER, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(-1, -2) for part in _heads(self.qkv(self.norm(x))))
        h = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return x + self.out(h.reshape(x.shape[0], INNER, *x.shape[2:]))


class Sinusoids(nn.Module):
    """Time steps as sines and cosines of geometric frequencies from 1 to 1/10000."""

    frequencies: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        # a constant of the network, neither trained nor sent
        frequencies = torch.exp(torch.arange(half) * (-math.log(10_000) / (half - 1)))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)


def _heads(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.reshape(qkv.shape[0], 3, HEADS, HEAD_WIDTH, -1).unbind(1)
