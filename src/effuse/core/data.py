"""The data of a client: labelled images as integers, the partition that assigned them, and their source."""

import dataclasses
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from effuse.core.errors import DataError, shown
from effuse.core.spec import Spec, spec

Split = Literal["train", "test"]
BLACK = -1.0
COLUMNS = ("images", "labels", "groups", "domains")  # of a data set: one entry for each image


class Shape(NamedTuple):
    """The properties of a data set that determine a network's inputs and outputs."""

    side: int
    channels: int
    classes: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Labelled square images, N x C x H x W, as the unsigned integers in which they were stored."""

    images: Tensor  # uint8, or int32 for 16-bit sources; on the meta device when only labels are known
    labels: Tensor  # int64
    classes: tuple[str, ...]
    peak: int = 255  # the integer that stands for white
    groups: Tensor | None = None  # int64, one per image: a patient, a writer
    domains: Tensor | None = None  # int64, one per image: the collection that it comes from
    flip: bool = False  # training images are mirrored at random
    shift: int = 0  # training images are moved at random, by up to so many pixels along each axis
    private: bool = False  # a budget protects these images: what is computed from them leaves a client with noise only

    def __post_init__(self) -> None:
        n, _, height, width = self.images.shape
        if height != width:
            raise DataError(f"images of {height}x{width} are not square; add crop or resize to the data's transforms")
        for name in self.classes:
            if not name.isprintable():
                raise DataError(f"the class '{shown(name)}' has characters that cannot be shown; rename it")
        if self.labels.shape != (n,):
            raise DataError(f"{n} images but {tuple(self.labels.shape)} labels; each image needs one label")
        if n and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise DataError(f"labels run from {low} to {high} but there are {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> Shape:
        return Shape(side=self.images.shape[-1], channels=self.images.shape[1], classes=len(self.classes))

    def to(self, device: torch.device) -> "Dataset":
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def rows(self, chosen: Tensor) -> "Dataset":
        """A data set of these rows only: all columns, in the given order."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        # each on its own device: a rehearsal has real labels beside images without values
        taken: dict[str, Any] = {k: None if v is None else v[chosen.to(v.device)] for k, v in columns.items()}
        return dataclasses.replace(self, **taken)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of images and labels."""
        h = hashlib.sha256()
        for tensor in (self.images, self.labels):
            h.update(f"{tensor.dtype} {tuple(tensor.shape)} {self.peak}\n".encode())
            if not tensor.is_meta:
                h.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return h.hexdigest()

    def floats(self, images: Tensor) -> Tensor:
        """Stored integers as floats in [-1, 1]."""
        return images.float() * (2.0 / self.peak) - 1.0

    def chances(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The random numbers by which `n` training images are mirrored and moved, on the generator's device."""
        drawn: dict[str, Tensor] = {}
        if self.flip:
            drawn["mirrored"] = torch.rand(n, device=generator.device, generator=generator) < 0.5
        if self.shift:
            drawn["corner"] = torch.randint(2 * self.shift + 1, (n, 2), device=generator.device, generator=generator)
        return drawn

    def changed(self, x: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Images in [-1, 1], mirrored and moved by what `chances` drew; what a move uncovers is black."""
        if "mirrored" in drawn:
            x = torch.where(drawn["mirrored"][:, None, None, None], x.flip(-1), x)
        if "corner" in drawn:  # of the image within its black frame
            framed = F.pad(x, [self.shift] * 4, value=BLACK)
            down, right = (drawn["corner"][:, i, None] + torch.arange(x.shape[-1], device=x.device) for i in (0, 1))
            tall = framed.gather(2, down[:, None, :, None].expand(-1, x.shape[1], -1, framed.shape[3]))
            x = tall.gather(3, right[:, None, None, :].expand(-1, x.shape[1], x.shape[2], -1))
        return x

    def histogram(self, rows: Tensor | None = None) -> list[int]:
        """The number of images of each class."""
        labels = self.labels if rows is None else self.labels[rows.to(self.labels.device)]
        return torch.bincount(labels.cpu(), minlength=len(self.classes)).tolist()


@dataclasses.dataclass(frozen=True)
class Shard:
    """The rows of a data set that one client owns. Nothing is copied."""

    dataset: Dataset
    rows: Tensor  # int64 row numbers, on the CPU
    # added by the client: an entry for each of its rows
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def whole(cls, dataset: Dataset) -> "Shard":
        return cls(dataset, torch.arange(len(dataset)))

    def with_columns(self, **columns: Tensor) -> "Shard":
        """The same images with further values for each, in this shard's order, such as cached features or soft labels.

        A loss finds them in `batch.columns`. They do not enter the data's digest and change neither the order nor any draw.
        """
        for name, column in columns.items():
            if len(column) != len(self):
                raise DataError(f"column '{name}' has {len(column)} entries for {len(self)} images; give each image one")
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def histogram(self) -> list[int]:
        return self.dataset.histogram(self.rows)

    @property
    def labels(self) -> Tensor:
        """The labels of the shard's images, on the CPU."""
        return self.dataset.labels[self.rows.to(self.dataset.labels.device)].cpu()

    def gathered(self) -> Dataset:
        """A data set of these rows only."""
        return self.dataset.rows(self.rows)


@spec
class Source(Spec, ABC):
    """A place where labelled images come from."""

    @abstractmethod
    def load(self, split: Split) -> Dataset:
        """Read one split, transforms applied."""


@spec
class Partition(Spec, ABC):
    """A rule that divides the images of a data set among clients."""

    seed: int | None = None  # None: derived from the run's seed
    legacy: bool = False  # draw from numpy's legacy generator, as the published splits did
    by_group: bool = False  # each group (such as a patient) belongs to one client

    @abstractmethod
    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        """Row numbers for each client, disjoint, none empty."""
