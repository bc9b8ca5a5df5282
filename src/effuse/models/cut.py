"""Cut networks: an architecture lists its pruned layers' widths as text, and is built from the uncut network."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from pydantic import Field
from torch import nn

from effuse.core.errors import ModelError

# 'conv_in:3>96 conv_norm_out:96>96': the input and output channels of every layer that pruning made narrower
Cut: TypeAlias = Annotated[str, Field(pattern=r"^([\w.]+:[1-9]\d*>[1-9]\d*( [\w.]+:[1-9]\d*>[1-9]\d*)*)?$")]
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@runtime_checkable
class Cuttable(Protocol):
    """An architecture that can be pruned: its key `cut` lists the widths of pruned layers."""

    @property
    def cut(self) -> Cut: ...


class Width(NamedTuple):
    """The channels of one layer."""

    into: int
    out: int


def width_of(layer: nn.Module) -> Width | None:
    """A layer's channels; None for a module without channels of its own."""
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            return Width(layer.in_channels, layer.out_channels)
        case nn.Linear():
            return Width(layer.in_features, layer.out_features)
        case nn.GroupNorm():
            return Width(layer.num_channels, layer.num_channels)
        case nn.Embedding():
            return Width(layer.num_embeddings, layer.embedding_dim)
    return None


def widths_of(net: nn.Module) -> dict[str, Width]:
    """The channels of every layer, by its name."""
    found = {name: width_of(module) for name, module in net.named_modules()}
    return {name: width for name, width in found.items() if width is not None}


def cut_text(widths: Mapping[str, Width], uncut: Mapping[str, Width]) -> Cut:
    """The layers whose widths are not those of the uncut network."""
    return " ".join(f"{name}:{w.into}>{w.out}" for name, w in widths.items() if w != uncut[name])


def narrowed(net: nn.Module, cut: Cut) -> nn.Module:
    """An uncut network with the named layers replaced by narrower ones, with fresh values."""
    for entry in cut.split():
        name, _, channels = entry.partition(":")
        width = Width(*map(int, channels.split(">")))
        parent, _, own = name.rpartition(".")
        try:
            layer = net.get_submodule(name)
        except AttributeError:
            raise ModelError(f"cut: '{entry}' names a layer that the network does not have") from None
        full = width_of(layer)
        if full is None or width.into > full.into or width.out > full.out:
            raise ModelError(f"cut: '{entry}' must be a layer, and no wider than in the uncut network")
        setattr(net.get_submodule(parent), own, _narrow(layer, width, entry))
    module: Any
    for module in net.modules():  # diffusers' resampling layers check their input against an attribute
        conv = getattr(module, "conv", None)
        if isinstance(getattr(module, "channels", None), int) and isinstance(conv, nn.Conv2d):
            module.channels = conv.in_channels
    return net


def _narrow(layer: nn.Module, width: Width, entry: str) -> nn.Module:
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            groups = width.out if depthwise(layer) else layer.groups
            kind: Any = type(layer)  # the stubs' tuples of the attributes are longer than those of the arguments
            return kind(
                *width,
                layer.kernel_size,
                stride=layer.stride,
                padding=layer.padding,
                dilation=layer.dilation,
                groups=groups,
                bias=layer.bias is not None,
                padding_mode=layer.padding_mode,
            )
        case nn.Linear():
            return nn.Linear(*width, bias=layer.bias is not None)
        case nn.GroupNorm():
            if width.out % layer.num_groups:
                raise ModelError(f"cut: '{entry}' is not a multiple of its {layer.num_groups} groups")
            return nn.GroupNorm(layer.num_groups, width.out, eps=layer.eps, affine=layer.affine)
        case nn.Embedding():
            return nn.Embedding(*width)
    raise ModelError(f"cut: '{entry}' is a {type(layer).__name__}, which cannot be cut")


def depthwise(layer: nn.Module) -> bool:
    """Whether every channel is convolved separately."""
    return isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1
