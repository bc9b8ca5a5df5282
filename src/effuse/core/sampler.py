"""Samplers: how images are drawn from a trained model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from effuse.core.spec import Spec, spec
from effuse.core.task import Task

Predict = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x_t, t, labels) -> the network's output


@spec
class Sampler(Spec, ABC):
    """A method to sample images. All random numbers of a batch come from one generator, in diffusers' order."""

    batch: PositiveInt = 500  # images per batch; it changes the result, since each batch has its own generator

    @abstractmethod
    def draw(
        self,
        net: Predict,
        task: Task,
        shape: torch.Size,
        labels: Tensor | None,
        generator: torch.Generator,
        tick: Callable[[], None],
    ) -> Tensor:
        """Images in [-1, 1]; `tick` is called after every network evaluation."""

    def calls(self, task: Task) -> int:
        """The number of network evaluations that an image takes."""
        return 1

    @property
    def passes(self) -> int:
        """The number of inputs that the network computes in one evaluation of one image."""
        return 1

    def ready(self, task: Task, conditional: bool) -> None:
        """Raise early what `draw` would raise later. `conditional`: the model takes labels."""
        self.scheduler(task)

    @abstractmethod
    def scheduler(self, task: Task) -> Any:
        """The diffusers scheduler of this sampler, which is saved with the model."""
