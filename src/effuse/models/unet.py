"""The DDPM U-Net (Ho et al., 2020) as diffusers' UNet2DModel, so that other software can open a trained model."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from effuse.core.build import make
from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.core.task import Give
from effuse.models.cut import Cut, narrowed
from effuse.models.saved import write_config, write_plain

# fields that are keys of UNet2DModel's own configuration
SHARED = ("dropout", "downsample_padding", "flip_sin_to_cos", "freq_shift", "norm_eps", "resnet_time_scale_shift")
# keys of that configuration with the only value that is supported
FIXED: Mapping[str, Any] = {
    "act_fn": "silu",
    "attn_norm_num_groups": None,
    "center_input_sample": False,
    "class_embed_type": None,
    "downsample_type": "conv",
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2D",
    "num_train_timesteps": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "upsample_type": "conv",
}


CUT_NOTE = "pruned: diffusers' UNet2DModel cannot hold layers of such widths; open this folder with effuse.load"


@spec
class Unet(Arch):
    """A U-Net of residual blocks, one width per resolution, with attention where an image side is listed."""

    featured: ClassVar[bool] = True
    staged: ClassVar[bool] = True
    uncut: ClassVar[tuple[str, ...]] = ("conv_out",)
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("conv_in", "time_embedding", "class_embedding", "down_blocks"),
        "bottleneck": ("mid_block",),
        "decoder": ("up_blocks", "conv_norm_out", "conv_out"),
    }

    widths: tuple[int, ...] = (128, 256, 256, 256)
    layers: int = 2  # residual blocks per resolution
    attention: tuple[int, ...] = (16,)  # image sides at which a residual block is followed by attention
    middle_attention: bool = True
    heads: int | None = None  # channels per attention head; None: one head
    groups: int = 32  # of every GroupNorm
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    conditional: bool = False  # one class embedding more than there are classes: the last is the null label
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    # the values of the original paper, where diffusers' defaults differ
    downsample_padding: int = 0
    flip_sin_to_cos: bool = False
    freq_shift: int = 1
    norm_eps: float = 1e-6
    cut: Cut = ""  # the widths of pruned layers

    def __post_init__(self) -> None:
        if not self.widths or self.layers < 1:
            raise ValueError(f"a U-Net needs widths and layers, not widths={list(self.widths)} and layers={self.layers}")
        odd = [w for w in self.widths if w % self.groups]
        if odd:
            raise ValueError(f"width {odd[0]} is not a multiple of groups={self.groups}; change either")
        step = 2 ** (len(self.widths) - 1)
        if self.side is not None and self.side % step:
            raise ValueError(f"side {self.side} cannot be halved {len(self.widths) - 1} times; use fewer widths or resize")

    def resolved(self, shape: Shape) -> Arch:
        """For data of that shape. A preset becomes the `unet` with the same values."""
        filled = super().resolved(shape)
        return make(Unet, {f.name: getattr(filled, f.name) for f in dataclasses.fields(Unet)}, "model")

    def build(self) -> nn.Module:
        return narrowed(network_class()(**self.diffusers_config()), self.cut)

    def diffusers_config(self) -> dict[str, Any]:
        """The arguments of UNet2DModel."""
        side, channels, classes = self.shape
        attends = [side // 2**level in self.attention for level in range(len(self.widths))]
        return {
            **FIXED,
            **{key: getattr(self, key) for key in SHARED},
            "sample_size": side,
            "in_channels": channels,
            "out_channels": channels,
            "block_out_channels": self.widths,
            "layers_per_block": self.layers,
            "down_block_types": tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
            "up_block_types": tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
            "add_attention": self.middle_attention,
            "attention_head_dim": self.heads,
            "norm_num_groups": self.groups,
            "num_class_embeds": classes + 1 if self.conditional else None,
        }

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        """Write a pipeline folder of diffusers, or its two subfolders where no pipeline draws right.

        There is none for conditional networks. The pipelines do not scale the network's input, as EDM's schedulers ask for.
        """
        if self.cut:
            return write_plain(self, net, folder, scheduler, note=CUT_NOTE)
        from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, UNet2DModel

        with torch.device("meta"):
            plain: Any = UNet2DModel(**self.diffusers_config())
        plain.load_state_dict({k: v.detach() for k, v in net.state_dict().items()}, assign=True)
        if self.conditional or hasattr(scheduler, "precondition_inputs"):
            plain.save_pretrained(folder / "unet", safe_serialization=True)
            scheduler.save_pretrained(folder / "scheduler")
        else:
            pipeline: Any = DDIMPipeline if isinstance(scheduler, DDIMScheduler) else DDPMPipeline
            pipeline(unet=plain, scheduler=scheduler).save_pretrained(folder, safe_serialization=True)
        write_config(self, folder)


@spec
class CifarUnet(Unet):
    """The network of the DDPM paper for 32x32 images: 35,746,307 parameters."""

    dropout: float = 0.1


@spec
class MnistUnet(Unet):
    """FedDDPM's network for 28x28 images: three resolutions with one residual block each."""

    widths: tuple[int, ...] = (128, 128, 256)
    layers: int = 1


@spec
class DigitsUnet(Unet):
    """A class-conditional network for 8x8 digits that two CPU cores train in two minutes."""

    widths: tuple[int, ...] = (32, 64)
    layers: int = 1
    attention: tuple[int, ...] = ()
    middle_attention: bool = False  # it would take a fifth of the time; at 4x4, convolutions already connect all positions
    groups: int = 8
    conditional: bool = True


def from_diffusers(config: Mapping[str, Any], classes: int, where: str) -> Unet:
    """The `unet` of a UNet2DModel's configuration; an unsupported key is refused by name."""
    from diffusers import UNet2DModel

    # a key that the saved configuration omits has diffusers' default
    smallest: Any = UNet2DModel(block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    given = dict(smallest.config)
    given |= {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if not k.startswith("_")}
    side, embeds = given["sample_size"], given["num_class_embeds"]
    if not isinstance(side, int):
        raise ModelError(f"{where}: sample_size is {side}; only square images of a fixed side are supported")
    if embeds not in (None, classes + 1):
        raise ModelError(
            f"{where}: it has {embeds} class embeddings where {classes} classes and the null label need {classes + 1}; "
            "start from an unconditional model or from one of effuse's own"
        )
    arch = Unet(
        side=side,
        channels=given["in_channels"],
        classes=classes,
        widths=given["block_out_channels"],
        layers=given["layers_per_block"],
        attention=tuple(side // 2**i for i, kind in enumerate(given["down_block_types"]) if kind == "AttnDownBlock2D"),
        middle_attention=given["add_attention"],
        heads=given["attention_head_dim"],
        groups=given["norm_num_groups"],
        conditional=embeds is not None,
        **{key: given[key] for key in SHARED},
    )
    for key, value in arch.diffusers_config().items():
        if given[key] != value:
            raise ModelError(f"{where}: {key} is {given[key]!r}, but effuse's unet has {value!r} there")
    return arch


class DDPMUNet(nn.Module):
    """UNet2DModel called as `net(x, t, labels)`.

    The forward pass is that of diffusers for the supported configurations, written out so that a loss can use features.
    """

    # diffusers' modules
    time_proj: nn.Module
    time_embedding: nn.Module
    class_embedding: nn.Embedding | None
    conv_in: nn.Module
    down_blocks: nn.ModuleList
    mid_block: nn.Module
    up_blocks: nn.ModuleList
    conv_norm_out: nn.Module
    conv_act: nn.Module
    conv_out: nn.Module
    dtype: torch.dtype

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        labels: Tensor | None = None,
        condition: Tensor | None = None,
        give: Give = "output",
    ) -> Any:
        embedding = self.time_embedding(self.time_proj(t.expand(len(x))).to(self.dtype))
        if self.class_embedding is not None:
            null = self.class_embedding.num_embeddings - 1
            # a time step may be a float
            labels = torch.full_like(t, null, dtype=torch.int64) if labels is None else torch.where(labels < 0, null, labels)
            embedding = embedding + self.class_embedding(labels)
        if condition is not None:  # added as a class is; a narrower one to the first values
            embedding = embedding + F.pad(condition, (0, embedding.shape[1] - condition.shape[1]))
        embedding = self.times(embedding, give)
        x = self.conv_in(x)
        skips: tuple[Tensor, ...] = (x,)
        for down in self.down_blocks:
            x, passed = down(hidden_states=x, temb=embedding)
            skips += passed
        x = self.mid_block(x, embedding)
        features = x.mean(dim=(2, 3)) if give != "output" else None
        if give == "features":
            return features
        stages = [x] if give == "stages" else []
        up: Any
        for up in self.up_blocks:
            x = up(x, skips[-len(up.resnets) :], embedding)
            skips = skips[: -len(up.resnets)]
            if give == "stages":
                stages.append(x)
        if give == "stages":
            return tuple(stages)
        x = self.conv_out(self.conv_act(self.conv_norm_out(x)))
        return (x, features) if give == "both" else x

    @property
    def condition_width(self) -> int:
        """The width of a `condition`."""
        width: Any = self.time_embedding.linear_2
        return int(width.out_features)

    def times(self, embedding: Tensor, give: Give) -> Any:
        """The blocks' time input: the embedding, which each block projects itself."""
        return embedding


@functools.cache
def network_class() -> type[nn.Module]:
    """The network's class, made on first use because importing diffusers takes seconds."""
    from diffusers import UNet2DModel

    class Network(DDPMUNet, UNet2DModel):
        """DDPMUNet's forward pass over diffusers' modules."""

    return Network
