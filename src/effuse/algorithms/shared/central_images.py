"""Noisy means of each class: told as they are, or trained on before private training begins (DP-FETA: Li et al., 2025)."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from effuse.core.data import Dataset, Shard
from effuse.core.errors import WireError
from effuse.core.message import of_images
from effuse.core.model import Net
from effuse.core.prelude import Client, Solver, message, spec
from effuse.core.spec import Spec
from effuse.core.task import Task

BLOCK = 1000  # images summed at a time
FRESH = "fresh"  # the stream of the noise that is added to the means


@message(name="class_means.reply")
class Means:
    """A client's mean image of each class, and how many images it has of each."""

    means: Tensor
    counts: Annotated[Tensor, of_images]

    def __post_init__(self) -> None:
        if not self.counts.is_meta and bool((self.counts < 0).any()):
            raise WireError("class means: counts are not negative")


def class_means(client: Client, noise: float | None) -> tuple[Tensor, Tensor]:
    """A client's mean image of each class in [-1, 1], and the number of its units in each class, released once together.

    Sums and counts are released with Gaussian noise of `noise` times their sensitivity. An image in [-1, 1] has a norm of at
    most the root of its number of values; its count is scaled to the same.
    """
    data, weights = client.data.gathered(), client.unit_weights
    classes, size = len(data.classes), data.images[0].numel()
    total = torch.zeros(classes, size + 1, device=data.images.device)
    for images, labels, w in zip(data.images.split(BLOCK), data.labels.split(BLOCK), weights.split(BLOCK)):
        counted = torch.full((len(images), 1), math.sqrt(size), device=total.device)
        rows = torch.cat([data.floats(images).flatten(1), counted], dim=1) * w.to(total.device)[:, None]
        member = F.one_hot(labels.to(total.device), classes).to(rows.dtype)
        total += member.T @ rows  # adding rows by index has no fixed order on a GPU
    told = client.noised(total, sensitivity=math.sqrt(2 * size), noise=noise, what="class means")
    counts = (told[:, -1] / math.sqrt(size)).clamp(min=0.0)
    means = (told[:, :-1] / counts.clamp(min=1.0)[:, None]).clamp(-1.0, 1.0)
    return means.view(classes, *data.images.shape[1:]), counts


@spec
class CentralImages(Spec, name="central_images"):
    """Train a generator on noisy class means first. What has been released with noise may be used without limit."""

    noise: NonNegativeFloat | None = 5.0  # z: noise on the sums over their sensitivity; None: as much as the budget asks
    solver: Solver  # of the training on the means
    copies: PositiveInt = 32  # of each mean, each with fresh noise
    fresh: NonNegativeFloat = 0.3  # the standard deviation of that noise, for images in [-1, 1]

    def train(self, net: Net, client: Client, task: Task) -> None:
        """Train a client's network on its means; of classes that it has next to no image of, nothing is learnt."""
        means, counts = class_means(client, self.noise)
        present = (counts >= 1.0).nonzero().flatten() if not counts.is_meta else torch.arange(len(counts))
        labels = present.cpu().repeat_interleave(self.copies)
        if not len(labels):
            return
        generator = client.stream(FRESH).torch(means.device) if not means.is_meta else None
        images = copied(means, labels, self.fresh, generator)
        data = Dataset(images, labels.to(images.device) if not images.is_meta else labels, client.data.dataset.classes)
        client.fit(net, self.solver, Shard.whole(data), task=task)


def copied(means: Tensor, labels: Tensor, fresh: float, generator: torch.Generator | None) -> Tensor:
    """A copy of its class's mean for each label, with fresh noise, as 8-bit images."""
    chosen = means[labels.to(means.device)]
    if chosen.is_meta:
        return chosen.to(torch.uint8)
    noisy = chosen + fresh * torch.randn(chosen.shape, generator=generator, device=chosen.device)
    return ((noisy + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
