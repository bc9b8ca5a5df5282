"""Networks for a GPU: modules are replaced by faster ones with the same names, parameters and mathematics."""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from effuse.fast.adapt import convnext
from effuse.fast.ops.conv import AlignedConv2d, AlignedConvTranspose2d, ConvNorm
from effuse.fast.ops.dropout import key_dropout
from effuse.fast.ops.norm import FusedGroupNorm
from effuse.models.convnext_unet import ConvNeXtUNet
from effuse.models.unet import DDPMUNet


def for_tensor_cores(net: nn.Module, kernels: Collection[str] = ()) -> nn.Module:
    """Replace the network's modules in place, and return it.

    Dropout is keyed by a seed (see `dropout.py`). `kernels` may name "norm" and "attention"; other names are ignored here.
    """
    key_dropout(net)
    for module in net.modules():
        if type(module) is nn.Conv2d and module.padding_mode == "zeros":
            module.__class__ = AlignedConv2d
        elif type(module) is nn.ConvTranspose2d:
            module.__class__ = AlignedConvTranspose2d
        if isinstance(module, (AlignedConv2d, AlignedConvTranspose2d)):
            module.fused_bias = "norm" in kernels
    for module in net.modules():
        if isinstance(module, ConvNeXtUNet):
            convnext.adapt(module, kernels)
        elif isinstance(module, DDPMUNet):
            from effuse.fast.adapt import unet  # needs diffusers, which such a network has already imported

            unet.adapt(module, kernels)
    if "norm" in kernels:
        for module in net.modules():
            if type(module) is nn.Sequential and [type(m) for m in module] == [AlignedConv2d, nn.GroupNorm]:
                module.__class__ = ConvNorm
        for module in net.modules():
            if type(module) is nn.GroupNorm and module.affine:
                module.__class__ = FusedGroupNorm
    return channels_last(net)


def channels_last(net: nn.Module) -> nn.Module:
    """The network with its weights' channels last in memory."""
    return cast(Any, net).to(memory_format=torch.channels_last)  # the stubs of `to` omit memory_format
