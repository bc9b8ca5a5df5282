"""Stable Diffusion as a guide: a copy at every site, classes in words, noise on its latent images."""

from typing import Any

import torch
from torch import Tensor

from effuse.algorithms.shared.guide_math import pooled
from effuse.algorithms.shared.guides import Own
from effuse.core.data import Shard
from effuse.core.errors import TrainingError
from effuse.core.model import Net
from effuse.core.prelude import Client, Given, RecipeError, spec
from effuse.core.task import Batch, Task
from effuse.models.stable_diffusion import Sd
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import ScaledLinear


@spec
class LatentNoise(Task):
    """Noise for latent images. Nothing is trained for it."""

    channels: int
    side: int

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (n, self.channels, self.side, self.side)
        return {"noise": torch.randn(shape, generator=generator, device=generator.device)}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        raise TrainingError("latent_noise: a guide is frozen and has no loss")


def spoken(net: Net, batch: Batch, given: Given) -> Tensor:
    """The pooled stages of Stable Diffusion, of each image with noise on its latent image."""
    t = torch.zeros_like(batch.labels) + given["t"]
    more: dict[str, Any] = {"condition": batch.columns["condition"]} if "condition" in batch.columns else {}
    more |= {"prompts": given["prompts"], "noise": batch.drawn["noise"], "a": given["a"], "s": given["s"]}
    return pooled(net(batch.x, t, batch.columns["labels"], give="stages", **more), given)


@spec
class StableDiffusion(Own, name="stable_diffusion"):
    """Stable Diffusion 1.x or 2.x, `sd(folder)`: every site has its own copy, and no weight is sent.

    A class is asked for by its prompt, and the null label by the empty one. Stage 0 is the U-Net's middle.
    """

    network: Sd
    task: Denoise = Denoise(schedule=ScaledLinear())
    prompt: str = "a photo of a {}"  # with the name of the class
    prompts: tuple[str, ...] = ()  # one for each class in its place
    # without labels: of noisy images, the positive of clean ones, and its negatives; without these a batch's other images
    visual: str = "a photo of a visual object"
    similar: str = "a photo of a similar object"
    others: tuple[str, ...] = ()

    @property
    def channels(self) -> tuple[int, ...]:
        known = self.network.stage_channels
        if max(self.stages) >= len(known):
            raise RecipeError(
                f"algorithm.guide: there is no stage {max(self.stages)}; {self.network.name} has 0 to {len(known) - 1}"
            )
        return tuple(known[k] for k in self.stages)

    def ready(self, width: int, classes: int, t: int) -> None:
        super().ready(width, classes, t)
        if self.prompts and len(self.prompts) != classes:
            raise RecipeError(f"algorithm.guide.prompts: {len(self.prompts)} for {classes} classes; give each class one")

    def asked(self, classes: tuple[str, ...]) -> list[str]:
        """The prompts of all classes, those without labels, and the empty one."""
        named = self.prompts or [self.prompt.replace("{}", name) for name in classes]
        return [*named, self.visual, self.similar, *self.others, ""]

    def unlabelled(self, classes: int) -> tuple[int, tuple[int, ...]]:
        """The places of these prompts, which follow those of the classes."""
        return classes, tuple(range(classes + 1, classes + 2 + len(self.others)))

    def applied(self, client: Client, net: Net, data: Shard, given: dict[str, Any]) -> Tensor:
        module: Any = net.module
        given["prompts"] = module.embedded(self.asked(data.dataset.classes))
        channels, side = self.network.latent_shape
        return client.apply(net, spoken, data, task=LatentNoise(channels=channels, side=side), given=given)
