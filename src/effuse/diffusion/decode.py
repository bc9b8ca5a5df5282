"""The sampler of variational autoencoders: one draw of z, and one pass of the decoder."""

import math
from collections.abc import Callable

import torch
from pydantic import PositiveFloat
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.core.sampler import Predict, Sampler
from effuse.core.spec import spec
from effuse.core.task import Task
from effuse.tasks.reconstruct import Reconstruct, images_of


@spec
class Decode(Sampler):
    """Decodes z from a truncated normal distribution, with the labels that are wanted."""

    truncate: PositiveFloat = 3.0  # the largest absolute value of z

    @torch.no_grad()
    def draw(
        self,
        net: Predict,
        task: Task,
        shape: torch.Size,
        labels: Tensor | None,
        generator: torch.Generator,
        tick: Callable[[], None],
    ) -> Tensor:
        z = self.noise(shape, generator)  # of an image's size; the decoder takes the first values
        logits = net(z, torch.zeros(len(z), dtype=torch.int64, device=z.device), labels)
        tick()
        return images_of(logits)

    def noise(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values of a standard normal distribution within the limits, by its inverse distribution function."""
        outside = 0.5 * math.erfc(self.truncate / math.sqrt(2))  # the probability of each tail
        u = torch.rand(shape, generator=generator, device=generator.device)
        return torch.special.ndtri(outside + (1 - 2 * outside) * u).clamp(-self.truncate, self.truncate)

    def ready(self, task: Task, conditional: bool) -> None:
        self.scheduler(task)

    def scheduler(self, task: Task) -> None:
        """A decoder has no time steps, and so no scheduler."""
        if not isinstance(task, Reconstruct):
            raise RecipeError(
                f"sampler: decode() draws from an autoencoder, and {task.name}() trains none; use reconstruct()"
            )
