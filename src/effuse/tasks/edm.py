"""EDM: Karras et al., 2022, "Elucidating the Design Space of Diffusion-Based Generative Models", section 5 and Table 1."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from effuse.core.spec import spec
from effuse.core.task import Batch, Prediction, in_fp32
from effuse.tasks.denoise import NULL, Denoise
from effuse.tasks.views import bilinear

PARAMETERS = 6  # of an image's transformations


class Coefficients(NamedTuple):
    """Table 1's preconditioning at noise levels: D(x) = c_skip x + c_out F(c_in x; c_noise)."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


@spec
class Edm(Prediction):
    """Denoise y + n of any noise level sigma, by a network F whose input, output and target have unit variance."""

    sigma_data: PositiveFloat = 0.5  # sigma_data, the images' standard deviation (Table 1)
    P_mean: float = -1.2  # P_mean: ln sigma ~ N(P_mean, P_std^2) (Table 1)
    P_std: PositiveFloat = 1.2  # P_std
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # share of labels replaced by the null label, for guidance
    # p of section 5: each transformation is made with this probability, and told to the network
    augment: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0

    @property
    def conditions(self) -> bool:
        return self.augment > 0

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Noise levels, noise and dropped labels, drawn in this order, then the numbers of transformations."""
        device = generator.device
        normal = torch.randn((n, *[1] * len(image)), generator=generator, device=device)
        noise = torch.randn((n, *image), generator=generator, device=device)
        dropped = torch.rand(n, generator=generator, device=device) < self.drop
        drawn = {"sigma": (self.P_mean + self.P_std * normal).exp(), "noise": noise, "dropped": dropped}
        if self.augment:
            drawn["augment"] = self.transformation(n, generator)
        return drawn

    def at(self, sigma: Tensor) -> Coefficients:
        """Table 1's coefficients."""
        total = sigma.square() + self.sigma_data**2
        return Coefficients(
            c_skip=self.sigma_data**2 / total,
            c_out=sigma * self.sigma_data / total.sqrt(),
            c_in=1.0 / total.sqrt(),
            c_noise=sigma.log() / 4.0,
        )

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """c_in (y + n), c_noise and the labels; with augmentation, also the transformations' parameters."""
        c = self.at(batch.drawn["sigma"])
        told = (batch.drawn["augment"],) if self.augment else ()
        return c.c_in * self.noisy(batch), c.c_noise.flatten(), self.labels(batch), *told

    def noisy(self, batch: Batch) -> Tensor:
        """y + n, where n ~ N(0, sigma^2 I)."""
        return self.clean(batch) + batch.drawn["sigma"] * batch.drawn["noise"]

    def labels(self, batch: Batch) -> Tensor:
        """The labels with the dropped ones replaced by the null label."""
        return torch.where(batch.drawn["dropped"], NULL, batch.labels)

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """Eq. 8 for each image, the mean over its pixels: the weight lambda c_out^2 is one at every sigma (Table 1)."""
        c = self.at(batch.drawn["sigma"])
        target = (self.clean(batch) - c.c_skip * self.noisy(batch)) / c.c_out
        return F.mse_loss(output.float(), target, reduction="none").flatten(1).mean(1)

    def transformation(self, n: int, generator: torch.Generator) -> Tensor:
        """Parameters of section 5's transformations, zero where none is made.

        They are: mirrored, cosine - 1 and sine of quarter turns, log2 of the scale, and the move along both axes.
        """
        u = torch.rand((n, 6), generator=generator, device=generator.device)
        z = torch.randn((n, 3), generator=generator, device=generator.device)
        quarter = torch.floor(4.0 * u[:, 1]) * (torch.pi / 2)
        mirrored = (u[:, 0] < 0.5).float()
        drawn = torch.stack(
            [mirrored, quarter.cos() - 1.0, quarter.sin(), 0.2 * z[:, 0], 0.125 * z[:, 1], 0.125 * z[:, 2]], 1
        )
        made = (u[:, 2:] < self.augment).float()[:, [0, 1, 1, 2, 3, 3]]  # one chance for each transformation
        return drawn * made

    def clean(self, batch: Batch) -> Tensor:
        """y: the images, transformed where their parameters are not zero."""
        return transformed(batch.x, batch.drawn["augment"]) if self.augment else batch.x


DENOISERS = (Denoise, Edm)  # tasks whose networks draw images


def transformed(x: Tensor, parameters: Tensor) -> Tensor:
    """Images mirrored, turned, scaled and moved; what a move uncovers repeats the border."""
    mirrored, cosine, sine, scale, down, right = parameters.unbind(1)
    x = torch.where(_each(mirrored > 0.5), x.flip(-1), x)
    for quarters, turned in ((1, sine > 0.5), (2, cosine < -1.5), (3, sine < -0.5)):
        x = torch.where(_each(turned), torch.rot90(x, quarters, (2, 3)), x)
    length = torch.exp2(-scale)  # the share of the old side that is seen
    rows, columns = (bilinear((1.0 - length) / 2 - move, length, x.shape[-1]) for move in (down, right))
    with in_fp32(x):  # bf16 would round a pixel by 1/256
        return rows[:, None] @ x @ columns[:, None].transpose(2, 3)


def _each(chosen: Tensor) -> Tensor:
    return chosen[:, None, None, None]
