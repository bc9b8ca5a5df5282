"""Sources without files of their own: embedded digits, labels without images, subsets and unions of sources."""

import dataclasses
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import DataError
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.data.files import label_tensor, pixel_tensor
from effuse.data.holdout import held_out
from effuse.data.transforms import Transform, moves, prepared, transform

Count = Annotated[int, Field(ge=1)]


@spec
class Digits(Source):
    """scikit-learn's handwritten digits, 8x8 grey, installed with it; every fifth image of each class is for testing."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        from sklearn.datasets import load_digits

        stored = load_digits()
        chosen = held_out(stored.target, 0.2) == (split == "test")
        pixels = np.rint(stored.images[chosen] * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
        images, peak = pixel_tensor(pixels, "digits")
        labels = label_tensor(stored.target[chosen], len(images), 10, "digits")
        return prepared(images, labels, tuple("0123456789"), split=split, transforms=self.transforms, peak=peak)


@spec
class Elsewhere(Source):
    """Images that only the sites of a federation have; the server knows their shape and the names of their classes."""

    side: Count
    channels: Count
    classes: tuple[str, ...]

    def load(self, split: Split) -> Dataset:
        images = torch.empty((0, self.channels, self.side, self.side), dtype=torch.uint8)
        return Dataset(images, torch.empty(0, dtype=torch.int64), self.classes)


@spec
class Labels(Source):
    """Labels without images, sorted by class, for a dry run: images have a shape but no pixels."""

    sizes: tuple[Count, ...]  # training images of each class
    test: tuple[Count, ...] = ()  # test images of each class; by default a sixth of `sizes`, as in MNIST
    side: Count = 28
    channels: Count = 1
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("sizes is empty; give the number of images of each class")
        if self.test and len(self.test) != len(self.sizes):
            raise ValueError(f"test has {len(self.test)} classes, sizes has {len(self.sizes)}; give both the same")

    def load(self, split: Split) -> Dataset:
        sizes = self.sizes if split == "train" else self.test or tuple(max(1, n // 6) for n in self.sizes)
        labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        images = torch.empty((len(labels), self.channels, self.side, self.side), dtype=torch.uint8, device="meta")
        names = [str(c) for c in range(len(sizes))]
        return prepared(images, labels, names, split=split, transforms=self.transforms)


@spec
class Some(Source):
    """A fixed random subset of another source's training images, and all of its test images."""

    source: Source
    n: Count
    seed: Annotated[int, Field(ge=0)] = 0

    def load(self, split: Split) -> Dataset:
        whole = self.source.load(split)
        if split == "test":
            return whole
        if self.n > len(whole):
            raise DataError(f"some: n={self.n}, but {self.source} has {len(whole)} training images; lower n")
        chosen = Stream(("some", self.seed)).numpy().permutation(len(whole))[: self.n]
        rows = torch.from_numpy(chosen).sort().values
        columns = {k: getattr(whole, k) for k in ("images", "labels", "groups", "domains")}
        subset: dict[str, Any] = {k: None if v is None else v[rows] for k, v in columns.items()}
        return dataclasses.replace(whole, **subset)


@spec
class Validation(Source):
    """A source whose test images are a fixed part of its training images, to choose settings without looking at the test."""

    source: Source
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def load(self, split: Split) -> Dataset:
        whole = self.source.load("train")
        groups = None if whole.groups is None else whole.groups.cpu().numpy()
        test = torch.from_numpy(held_out(whole.labels.cpu().numpy(), self.share, groups))
        kept = whole.rows((test if split == "test" else ~test).nonzero().flatten())
        return kept if split == "train" else dataclasses.replace(kept, flip=False, shift=0)


@spec
class Renumbered(Source):
    """A site's own images with the class numbers of a federation; the site need not have images of every class."""

    of: Source
    classes: tuple[str, ...]

    def load(self, split: Split) -> Dataset:
        return relabelled(self.of.load(split), self.classes)


def relabelled(data: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images with the federation's class numbers."""
    unknown = [name for name in data.classes if name not in classes]
    if unknown:
        raise DataError(f"the federation has no class '{unknown[0]}'; its classes: {', '.join(classes)}")
    numbers = torch.tensor([classes.index(name) for name in data.classes])
    return dataclasses.replace(data, labels=numbers[data.labels], classes=classes)


@spec
class Union(Source):
    """Several sources of the same classes and, after transforms, the same shape; each source is a domain."""

    sources: tuple[Source, ...]
    transforms: tuple[Transform, ...] = ()  # applied after those of each source

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty; give at least one source")

    def load(self, split: Split) -> Dataset:
        parts = [source.load(split) for source in self.sources]
        images = [transform(part.images, self.transforms, part.peak) for part in parts]
        for source, part, pixels in zip(self.sources, parts, images):
            self._check_same(source, (part, pixels), (parts[0], images[0]))
        added = moves(self.transforms, split)
        return Dataset(
            images=torch.cat(images),
            labels=torch.cat([part.labels for part in parts]),
            classes=parts[0].classes,
            peak=parts[0].peak,
            groups=_joined_groups(parts),
            domains=torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)]),
            flip=added["flip"] or parts[0].flip,
            shift=max(added["shift"], parts[0].shift),
        )

    def _check_same(self, source: Source, this: tuple[Dataset, Tensor], first: tuple[Dataset, Tensor]) -> None:
        part, pixels = this
        other, other_pixels = first
        differences = (
            ("classes", part.classes, other.classes, "name the same classes"),
            ("images of", tuple(pixels.shape[1:]), tuple(other_pixels.shape[1:]), "add resize and channels"),
            ("white at", part.peak, other.peak, "store all with the same bit depth"),
            ("flip", part.flip, other.flip, "put flip() in the union's own transforms"),
            ("shift", part.shift, other.shift, "put shift() in the union's own transforms"),
            ("pixels missing", pixels.is_meta, other_pixels.is_meta, "join labels() with labels() only"),
        )
        for what, value, expected, remedy in differences:
            if value != expected:
                raise DataError(f"union: {source} has {what} {value}, {self.sources[0]} {expected}; {remedy}")


def _joined_groups(parts: list[Dataset]) -> Tensor | None:
    """Groups of all sources, numbered apart; in a source without groups each image is a group."""
    if all(part.groups is None for part in parts):
        return None
    joined, start = [], 0
    for part in parts:
        groups = torch.arange(len(part)) if part.groups is None else part.groups
        joined.append(groups + start)
        start = int(joined[-1].max()) + 1
    return torch.cat(joined)
