"""The objective of a variational autoencoder (Kingma and Welling, 2014), with the distances of FedCVAE."""

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from effuse.core.model import Net
from effuse.core.spec import spec
from effuse.core.task import Batch, Task


@spec
class Reconstruct(Task):
    """Encode an image as a normal distribution of z, and decode a draw from it; images count as values from 0 to 1."""

    beta: NonNegativeFloat = 1.0  # weight of the KL divergence from the standard normal distribution

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Noise of an image's size, since a task does not know the length of z: an autoencoder takes the first values."""
        return {"noise": torch.randn((n, *image), generator=generator, device=generator.device)}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        logits, mean, log_variance = net(batch.x, None, batch.labels, noise=batch.drawn["noise"])
        return batch.mean(distance(logits, batch.x) + self.beta * divergence(mean, log_variance))


def distance(logits: Tensor, x: Tensor) -> Tensor:
    """The reconstruction error of each image, summed over its pixels.

    Grey images: binary cross-entropy. Colour images: the squared error after a sigmoid.
    """
    logits, wanted = logits.float(), (x + 1.0) / 2.0
    if x.shape[1] == 1:
        error = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    else:
        error = (logits.sigmoid() - wanted).square()
    return error.flatten(1).sum(1)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL of N(mean, variance) from N(0, 1), summed over z: -1/2 sum(1 + log variance - mean^2 - variance)."""
    mean, log_variance = mean.float(), log_variance.float()
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


def images_of(logits: Tensor) -> Tensor:
    """The images that a decoder means, in [-1, 1]."""
    return 2.0 * logits.float().sigmoid() - 1.0
