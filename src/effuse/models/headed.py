"""A linear head on a frozen network: the pooled stages of a denoiser, or an encoder's features, as those of a classifier."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from effuse.core.build import with_values
from effuse.core.errors import ModelError
from effuse.core.model import Arch, Model
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.models.local import here
from effuse.models.resnet import ClassifierNet
from effuse.models.saved import write_plain
from effuse.tasks.denoise import NULL


@spec
class OnFrozen(Arch):
    """A linear classifier on a frozen network."""

    featured: ClassVar[bool] = True

    network: Arch

    def initial(self, stream: Stream) -> Model:
        """The saved network with a random head. Its architecture names no folder of this machine."""
        arch = with_values(self, "model", network=here(self.network))
        return dataclasses.replace(super().initial(stream), arch=arch)

    def constant(self, name: str) -> bool:
        """What the network itself keeps in its folder."""
        part, _, inner = name.partition(".")
        return part == "network" and self.network.constant(inner)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class Headed(OnFrozen):
    """A linear classifier on the stages of a denoiser, which sees the clean image under the null label."""

    network: Arch
    stages: tuple[NonNegativeInt, ...] = (2, 3, 4)  # 0 is the middle, 1 the first stage of the decoder
    pool: Literal["mean", "l2"] = "mean"  # over positions; l2: the root mean square
    t: NonNegativeInt = 0  # the time step that the network is told

    def __post_init__(self) -> None:
        if not self.stages or len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages={list(self.stages)} must name at least one stage, each once")

    def build(self) -> nn.Module:
        return HeadedNet(self.network.build(), channels_of(here(self.network), self.stages), self)


@spec
class Embedded(OnFrozen):
    """A linear classifier on the features of an encoder, such as vision(folder) or unclip(folder)."""

    def build(self) -> nn.Module:
        if not self.network.featured or self.network.parts:  # a denoiser has parts, and features at a time step only
            raise ModelError(f"{self.network.name} gives no features of an image; use vision(folder) or unclip(folder)")
        arch = here(self.network)
        x, *_ = arch.example()
        width = arch.hollow_net()(x, give="features").shape[1]
        return EmbeddedNet(self.network.build(), width, self.shape.classes)


class EmbeddedNet(ClassifierNet):
    """An encoder's features, and a linear head."""

    def __init__(self, network: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.network, self.projection, self.head = network, nn.Identity(), nn.Linear(width, classes)

    def encoded(self, x: Tensor) -> Tensor:
        found: Tensor = self.network(x, give="features")
        return found.float()


class HeadedNet(ClassifierNet):
    """The network's pooled stages, and a linear head."""

    def __init__(self, network: nn.Module, channels: tuple[int, ...], arch: Headed) -> None:
        super().__init__()
        self.network, self.stages, self.pool, self.t = network, arch.stages, arch.pool, arch.t
        self.projection, self.head = nn.Identity(), nn.Linear(sum(channels), arch.shape.classes)

    def encoded(self, x: Tensor) -> Tensor:
        t = torch.full((len(x),), self.t, dtype=torch.int64, device=x.device)
        maps = self.network(x, t, torch.full_like(t, NULL), give="stages")
        chosen = [maps[k].float().flatten(2) for k in self.stages]
        return torch.cat([m.mean(2) if self.pool == "mean" else m.square().mean(2).sqrt() for m in chosen], dim=1)


def channels_of(arch: Arch, stages: tuple[int, ...]) -> tuple[int, ...]:
    """The channels of a denoiser's stages."""
    if not arch.staged:
        raise ModelError(f"{arch.name} shows no stages; use a unet(...)")
    maps = arch.hollow_net()(*arch.example(), give="stages")
    if max(stages) >= len(maps):
        raise ModelError(f"there is no stage {max(stages)}; {arch.name} has 0 to {len(maps) - 1}, set stages")
    return tuple(maps[k].shape[1] for k in stages)
