"""What a network is trained for: which randomness a batch needs and what the loss is."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from effuse.core.model import Net
from effuse.core.spec import Spec, spec

# what a loss or a direction is handed: numbers (as 0-d tensors), tensors, Params, and a Model as a frozen `Net` that can be called;
# where the solver keeps a moving average of the weights, it is there as "average"
Given: TypeAlias = Mapping[str, Any]
# what is minimised, and perhaps a value beside it that is only averaged and reported
Loss: TypeAlias = Callable[[Net, "Batch", Given], Tensor | tuple[Tensor, Tensor]]
Direction: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Given], Mapping[str, Tensor]]
Feature: TypeAlias = Callable[[Net, "Batch", Given], Tensor]  # a value for each image of a batch, without a gradient
Give: TypeAlias = Literal["output", "features", "both"]  # what a featured network (see Arch) is asked for


@dataclasses.dataclass
class Batch:
    """One step's input with all its randomness drawn already, so that the step itself is a pure function."""

    x: Tensor  # clean images in [-1, 1]
    labels: Tensor
    task: "Task"
    drawn: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what the task drew: t, noise, dropped labels
    weight: Tensor | None = None  # 1 for an image, 0 for padding; None when nothing is padded
    columns: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what the client laid beside its images

    def mean(self, per_image: Tensor) -> Tensor:
        """The mean over the images that are not padding."""
        if self.weight is None:
            return per_image.mean()
        return (per_image * self.weight).sum() / self.weight.sum()


@spec
class Task(Spec, ABC):
    """A training objective."""

    @abstractmethod
    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The randomness of a batch of `n` images, from one generator on the batch's device."""

    @abstractmethod
    def loss(self, net: Net, batch: Batch) -> Tensor:
        """The mean loss of a batch; pure, so that it can be compiled and captured."""


@spec
class Prediction(Task, ABC):
    """A task that is one prediction: what the network is shown, and how far its output is off."""

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the network is called with."""

    @abstractmethod
    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of each image."""

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean(self.error(net(*self.inputs(batch)), batch))
