"""Two views of every image, and the contrastive loss between them: Chen et al., 2020 (SimCLR), Eq. 1."""

import contextlib
import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.core.model import Net
from effuse.core.spec import Spec, spec
from effuse.core.task import Batch, Task

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NUMBERS = 11  # random numbers of a view
JITTERED = 0.8  # the share of views whose colours change
RATIO = math.log(4 / 3)  # a crop's width over its height is between 3/4 and 4/3
LUMA = (0.299, 0.587, 0.114)  # brightness of red, green and blue


@spec
class Views(Task):
    """Two views of each image, which a network learns to tell from those of other images. Labels are not used."""

    area: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2  # the smallest share of an image that a crop shows
    flip: bool = True  # mirror half of the views
    jitter: Share = 0.5  # brightness, contrast and saturation change by up to 0.8 of this, hue by 0.2 of it in turns
    grey: Share = 0.2  # the share of views of colour images that lose their colours
    T: PositiveFloat = 0.5  # temperature of the task's own loss

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Uniform numbers for both views of each image; `seen` turns them into crops and colours."""
        return {"views": torch.rand((n, 2, NUMBERS), generator=generator, device=generator.device)}

    def seen(self, batch: Batch) -> Tensor:
        """The first views of all images, then the second ones."""
        with torch.no_grad(), in_fp32(batch.x):
            return torch.cat([self.view(batch.x, batch.drawn["views"][:, i]) for i in (0, 1)])

    def view(self, x: Tensor, u: Tensor) -> Tensor:
        """One view of each image: cropped and resized, mirrored, its colours changed. `u` are its uniform numbers."""
        x = (self.cropped(x, u) + 1.0) / 2.0
        changed = u[:, 5] < JITTERED
        x = torch.where(changed[:, None, None, None], self.coloured(x, u), x)
        if x.shape[1] == 3:
            lost = u[:, 6] < self.grey
            x = torch.where(lost[:, None, None, None], brightness(x).expand_as(x), x)
        return x * 2.0 - 1.0

    def cropped(self, x: Tensor, u: Tensor) -> Tensor:
        """A random part of each image, resized to the whole image's size, and mirrored if drawn.

        It is a product with two matrices of bilinear weights, which is the same on every device and can be recorded.
        """
        share = self.area + (1.0 - self.area) * u[:, 0]
        stretch = torch.exp(RATIO * (u[:, 1] - 0.5))  # the square root of width over height
        height, width = (torch.clamp(share.sqrt() * s, max=1.0) for s in (1.0 / stretch, stretch))
        mirrored = (u[:, 4] < 0.5) & self.flip
        rows = bilinear(u[:, 2] * (1.0 - height), height, x.shape[-1])
        columns = bilinear(u[:, 3] * (1.0 - width), width, x.shape[-1])
        columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
        return rows[:, None] @ x @ columns[:, None].transpose(2, 3)

    def coloured(self, x: Tensor, u: Tensor) -> Tensor:
        """Values in [0, 1] with other brightness and contrast, and of colour images with other saturation and hue."""
        by = (1.0 + 0.8 * self.jitter * (2.0 * u[:, 7:10] - 1.0))[:, :, None, None, None]
        x = (x * by[:, 0]).clamp(0.0, 1.0)
        colour = x.shape[1] == 3
        level = (brightness(x) if colour else x.mean(1, keepdim=True)).mean((2, 3), keepdim=True)
        x = (level + (x - level) * by[:, 1]).clamp(0.0, 1.0)
        if not colour:
            return x
        own = brightness(x)
        x = (own + (x - own) * by[:, 2]).clamp(0.0, 1.0)
        return turned(x, 0.2 * self.jitter * (2.0 * u[:, 10] - 1.0)).clamp(0.0, 1.0)

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean(told_apart(net(self.seen(batch)), batch.weight, self.T))


def in_fp32(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The context without autocast on the tensor's device; shapes have none."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def bilinear(start: Tensor, length: Tensor, side: int) -> Tensor:
    """For each image the weights, new pixel by old pixel, of a part from `start` on; both are shares of the side."""
    pixels = torch.arange(side, device=start.device)
    places = (start[:, None] + length[:, None] * (pixels + 0.5) / side) * side - 0.5
    return (1.0 - (places.clamp(0, side - 1)[:, :, None] - pixels).abs()).clamp(min=0.0)


def brightness(x: Tensor) -> Tensor:
    """The brightness of each pixel of colour images."""
    r, g, b = x.split(1, dim=1)
    return LUMA[0] * r + LUMA[1] * g + LUMA[2] * b


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Colours turned about the axis of greys: a third of a turn makes red green. The mean of the channels stays."""
    angle = (2.0 * math.pi * turns)[:, None, None, None]
    r, g, b = x.split(1, dim=1)
    mean, across = x.mean(1, keepdim=True), torch.cat([b - g, r - b, g - r], dim=1) / math.sqrt(3.0)
    return mean + (x - mean) * angle.cos() + across * angle.sin()


def told_apart(z: Tensor, weight: Tensor | None, T: float | Tensor) -> Tensor:
    """SimCLR's Eq. 1 for each image, the mean of its two views: its other view against all other views of the batch.

    `z` are the vectors of all first views, then of all second ones. Padding is no negative of anyone.
    """
    with in_fp32(z):  # bf16 would round a cosine by 1/256, a tenth of T 0.04
        z = F.normalize(z.float(), dim=1)
        n = len(z) // 2
        own = torch.arange(2 * n, device=z.device)
        other = (own + n) % (2 * n)
        s = (z @ z.T / T).masked_fill(own[:, None] == own, -math.inf)
        if weight is not None:
            padding = (weight == 0).repeat(2) & (own != other[:, None])  # with its other view the loss of padding is finite
            s = s.masked_fill(padding, -math.inf)
        return F.cross_entropy(s, other, reduction="none").view(2, n).mean(0)


def require_views(algorithm: Spec, task: Task) -> None:
    """Refuse a task without views for an algorithm that compares them."""
    if not isinstance(task, Views):
        raise RecipeError(f"task: {algorithm.name} compares two views of each image; set task=views(), not {task.name}()")
