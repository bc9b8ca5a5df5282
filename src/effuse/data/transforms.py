"""Transforms of stored images. They apply once to both splits, so that FID references match."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, TypedDict

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from effuse.core.data import Dataset, Split
from effuse.core.errors import DataError
from effuse.core.spec import Spec, spec

CHUNK = 4096  # images transformed at a time: bounds the memory of float copies
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow's conversion to grey

Side = Annotated[int, Field(ge=1)]


@spec
class Transform(Spec, ABC):
    """A change of stored images, N x C x H x W of integers."""

    @abstractmethod
    def apply(self, images: Tensor, peak: int) -> Tensor:
        """The changed images, of the same integer type; `peak` is the integer that means white."""


@spec
class Resize(Transform):
    """Scale to side x side, bilinear and antialiased; this distorts images that are not square, so `crop` first."""

    side: Side

    def apply(self, images: Tensor, peak: int) -> Tensor:
        if images.shape[-2:] == (self.side, self.side):
            return images
        scaled = F.interpolate(images.float(), size=(self.side, self.side), mode="bilinear", antialias=True)
        return scaled.round().clamp(0, peak).to(images.dtype)


@spec
class Crop(Transform):
    """Cut the central side x side, or the largest central square when no side is given."""

    side: Side | None = None

    def apply(self, images: Tensor, peak: int) -> Tensor:
        height, width = images.shape[-2:]
        side = self.side or min(height, width)
        if side > min(height, width):
            raise DataError(f"{self}: the image is only {height}x{width}; crop less or pad first")
        top, left = (height - side) // 2, (width - side) // 2
        return images[..., top : top + side, left : left + side]


@spec
class Pad(Transform):
    """Add a black frame, up to side x side or by an amount at every edge."""

    side: Side | None = None
    amount: Side | None = None

    def __post_init__(self) -> None:
        if (self.side is None) == (self.amount is None):
            raise ValueError("pad takes either side or amount")

    def apply(self, images: Tensor, peak: int) -> Tensor:
        if self.amount is not None:
            return F.pad(images, [self.amount] * 4)
        height, width = images.shape[-2:]
        assert self.side is not None
        down, across = self.side - height, self.side - width
        if min(down, across) < 0:
            raise DataError(f"{self}: the image is already {height}x{width}; pad to a larger side or crop first")
        return F.pad(images, [across // 2, across - across // 2, down // 2, down - down // 2])


@spec
class Channels(Transform):
    """Grey to colour by repetition, colour to grey by luma."""

    n: Annotated[int, Field(ge=1)]

    def apply(self, images: Tensor, peak: int) -> Tensor:
        have = images.shape[1]
        if have == self.n:
            return images
        if have == 1:
            return images.expand(-1, self.n, -1, -1)
        if (have, self.n) == (3, 1):
            weights = torch.tensor(LUMA, device=images.device).view(1, 3, 1, 1)
            return (images * weights).sum(1, keepdim=True).round().clamp(0, peak).to(images.dtype)
        raise DataError(f"{self}: cannot convert {have} channels to {self.n}; only grey to any number and RGB to grey work")


@spec
class Flip(Transform):
    """Mirror half of the images of every training batch; stored images do not change."""

    def apply(self, images: Tensor, peak: int) -> Tensor:
        return images


@spec
class Shift(Transform):
    """Move every image of a training batch at random, over black, by up to `pad` pixels; stored images do not change."""

    pad: Side = 4

    def apply(self, images: Tensor, peak: int) -> Tensor:
        if self.pad >= images.shape[-1]:
            raise DataError(f"{self}: the image is only {images.shape[-1]} wide, so nothing of it may be left; shift less")
        return images


def transform(images: Tensor, transforms: Sequence[Transform], peak: int) -> Tensor:
    """Apply transforms in order, by chunks; images without pixels only change their shape."""

    def apply(part: Tensor) -> Tensor:
        return functools.reduce(lambda changed, step: step.apply(changed, peak), transforms, part)

    if images.is_meta:
        one = apply(torch.zeros(images.shape[1:], dtype=images.dtype)[None])
        return torch.empty((len(images), *one.shape[1:]), dtype=images.dtype, device="meta")
    if len(images) <= CHUNK or not transforms:
        return apply(images).contiguous()
    return torch.cat([apply(part) for part in images.split(CHUNK)])


class Moves(TypedDict):
    """How the images of a training batch are changed at random."""

    flip: bool
    shift: int


def moves(transforms: Sequence[Transform], split: Split) -> Moves:
    """What the transforms say of a split's batches, under the names of `Dataset`."""
    chosen = transforms if split == "train" else ()
    shift = max((step.pad for step in chosen if isinstance(step, Shift)), default=0)
    return {"flip": any(isinstance(step, Flip) for step in chosen), "shift": shift}


def prepared(
    images: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    *,
    split: Split,
    transforms: Sequence[Transform],
    peak: int = 255,
    groups: Tensor | None = None,
) -> Dataset:
    """A data set of stored images, with transforms applied."""
    return Dataset(
        images=transform(images, transforms, peak),
        labels=labels,
        classes=tuple(classes),
        peak=peak,
        groups=groups,
        **moves(transforms, split),
    )
