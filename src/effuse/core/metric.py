"""Metrics of a model, and the protocol that every number carries."""

import dataclasses
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from effuse.core.data import Dataset
from effuse.core.errors import TrainingError
from effuse.core.grid import grid_array, save_grid
from effuse.core.message import message
from effuse.core.spec import Spec, spec

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from effuse.core.machine import Machine

Protocol: TypeAlias = dict[str, str | int | float | bool | None]


@message(name="images")
class Images:
    """Generated images in [-1, 1], N x C x H x W, with the labels that were requested."""

    pixels: Tensor  # float32
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def bytes(self) -> Tensor:
        """The pixels rounded to uint8, as they are stored."""
        if not self.pixels.isfinite().all():  # they would become black
            raise TrainingError(
                "the generated images have non-finite values: the model has diverged; lower its learning rate"
            )
        return ((self.pixels + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def first(self, n: int) -> "Images":
        return Images(self.pixels[:n], None if self.labels is None else self.labels[:n])

    def grid(self) -> "Picture":
        """All images in one PIL picture, with one row per class if there are labels."""
        from PIL import Image

        return Image.fromarray(grid_array(self))

    def save(self, path: Path | str) -> None:
        """Write the grid to a file."""
        save_grid(self, Path(path))

    def pil(self) -> "list[Picture]":
        """Every image as a PIL picture."""
        from PIL import Image

        pixels = self.bytes().permute(0, 2, 3, 1).numpy()
        return [Image.fromarray(own[:, :, 0] if own.shape[-1] == 1 else own) for own in pixels]

    def _repr_png_(self) -> Any:
        blob = io.BytesIO()
        self.grid().save(blob, "png")
        return blob.getvalue()

    def rows(self, chosen: Tensor) -> "Images":
        return Images(self.pixels[chosen], None if self.labels is None else self.labels[chosen])


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A number, the protocol that makes it comparable, and a warning if it needs one."""

    value: float
    protocol: Protocol
    warning: str | None = None
    std: float | None = None  # over clients with personal models; `value` is then their mean
    clients: list[float] | None = None  # the value of each of these clients


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a metric may use: real data, and samples or predictions of the model under test."""

    train: Dataset
    test: Dataset
    data: str  # the data source in the grammar, transforms included: part of every protocol and cache key
    device: torch.device
    samples: Callable[[int], Images]  # the first n samples of the evaluation's own stream; drawn once and shared
    predict: Callable[[Tensor], Tensor] | None = None  # classifier logits for images in [-1, 1]
    features: Callable[[Tensor], Tensor] | None = None  # what the classifier's head gets for them
    machine: "Machine | None" = None  # the run's, for metrics that train
    cache: Path | None = None  # the folder of reference features and encoders
    # networks and reference features in memory, shared between the models of one evaluation
    memo: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    encoded: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # features of the samples

    def real(self, split: str) -> Dataset:
        return self.train if split == "train" else self.test


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What is known of a metric's subject before anything is computed."""

    classifies: bool  # the model under test gives class scores
    conditional: bool  # samples carry the labels that were requested
    classes: int
    real: Mapping[str, int]  # real images in each split
    metrics: tuple["Metric", ...] = ()  # all that are measured
    featured: bool = False  # the model under test gives features of images


@spec
class Metric(Spec, ABC):
    """A measure of a model. Its numbers are keyed by name."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the numbers that `measure` returns."""
        return (self.name,)

    real: ClassVar[bool] = True  # whether it needs images of the data set, or a classifier trained on them

    @property
    def samples(self) -> int:
        """The number of generated images that it needs."""
        return getattr(self, "n", 0)

    def of_samples(self, n: int) -> Self:
        """The same metric of that many generated images."""
        changes: dict[str, Any] = {"n": n}  # every metric that measures samples has this field
        return dataclasses.replace(self, **changes)

    @property
    def predicts(self) -> bool:
        """Whether class scores of the test images, in their order, are all that it needs of a model."""
        return False

    def ready(self, outlook: Outlook) -> None:
        """Raise early what `measure` would raise later: for a missing file, or a model without labels."""

    @abstractmethod
    def measure(self, subject: Subject) -> dict[str, Measurement]:
        """The numbers, each with its protocol."""
