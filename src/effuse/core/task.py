"""Training objectives: the random numbers that a batch needs, and the loss."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from effuse.core.model import Net
from effuse.core.spec import Spec, spec

# values passed to a loss or a direction: numbers (as 0-d tensors), tensors, Params, and models (as frozen `Net`s);
# "average" is the moving average of the weights, where the solver keeps one
Given: TypeAlias = Mapping[str, Any]
# the loss to minimise, and optionally a second value that is only averaged and reported
Loss: TypeAlias = Callable[[Net, "Batch", Given], Tensor | tuple[Tensor, Tensor]]
Direction: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Given], Mapping[str, Tensor]]
Feature: TypeAlias = Callable[[Net, "Batch", Given], Tensor]  # a value for each image of a batch, without gradients
# what a network with `Arch.featured` returns; "stages" of one with `Arch.staged`, "levels" of one with `Arch.levelled`,
# "projection" of `projected(...)`
Give: TypeAlias = Literal["output", "features", "both", "stages", "levels", "projection"]


def in_fp32(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """The context in which similarities are computed: bf16 rounds a cosine by 1/256, which is 0.07 at temperature 0.06."""
    return contextlib.nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


@dataclasses.dataclass
class Batch:
    """The input of one step. Its random numbers are drawn beforehand, so that the step is a pure function."""

    x: Tensor  # clean images in [-1, 1]
    labels: Tensor
    task: "Task"
    drawn: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what the task drew: t, noise, dropped labels
    weight: Tensor | None = None  # 1 for an image, 0 for padding; None when nothing is padded
    columns: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # the shard's columns

    def mean(self, per_image: Tensor) -> Tensor:
        """The mean over the images that are not padding."""
        if self.weight is None:
            return per_image.mean()
        return (per_image * self.weight).sum() / self.weight.sum()


@spec
class Task(Spec, ABC):
    """A training objective."""

    @property
    def conditions(self) -> bool:
        """Whether it gives its network a `condition`, which needs `Arch.staged`."""
        return False

    @abstractmethod
    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The random numbers of a batch of `n` images, from one generator on the batch's device."""

    @abstractmethod
    def loss(self, net: Net, batch: Batch) -> Tensor:
        """The mean loss of a batch. It is a pure function, so that it can be compiled and captured."""


@spec
class Prediction(Task, ABC):
    """A task with one prediction: the network's inputs, and the error of its output."""

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The network's inputs."""

    @abstractmethod
    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of each image."""

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean(self.error(net(*self.inputs(batch)), batch))
