"""Convolutions as tensor cores want them: channels last forwards and backwards, widths in multiples of eight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNED = 8  # bf16 numbers that a tensor core loads at a time


class _ChannelsLast(torch.autograd.Function):
    """Lays out a tensor, and on the way back its gradient, with channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous(memory_format=torch.channels_last)


def channels_last(x: Tensor) -> Tensor:
    return _ChannelsLast.apply(x)


class AlignedConv2d(nn.Conv2d):
    """The same convolution, on zero-padded channels where its widths are not multiples of eight."""

    def forward(self, x: Tensor) -> Tensor:
        # a compiler keeps the layouts it has seen: without this, normalisations hand contiguous tensors to the convolution's
        # backward pass, which then copies each of them
        x, weight = _padded(self, x, self.weight, outputs=0)
        return _finished(
            self, F.conv2d(channels_last(x), weight, None, self.stride, self.padding, self.dilation, self.groups)
        )


class AlignedConvTranspose2d(nn.ConvTranspose2d):
    """The same for transposed convolutions."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x, weight = _padded(self, x, self.weight, outputs=1)
        y = F.conv_transpose2d(
            channels_last(x), weight, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )
        return _finished(self, y)


def _padded(conv: Any, x: Tensor, weight: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    missing = [-conv.out_channels % ALIGNED, -conv.in_channels % ALIGNED]
    if conv.groups > 1 or not any(missing):
        return x, weight
    first, second = missing if outputs == 0 else reversed(missing)
    return F.pad(x, (0, 0, 0, 0, 0, missing[1])), F.pad(weight, (0, 0, 0, 0, 0, second, 0, first))


def _finished(conv: Any, y: Tensor) -> Tensor:
    y = channels_last(y)[:, : conv.out_channels]
    return y if conv.bias is None else y + conv.bias.to(y.dtype)[:, None, None]


def for_tensor_cores(net: nn.Module) -> nn.Module:
    """The network with its convolutions replaced, in place; names, parameters and mathematics stay."""
    for module in net.modules():
        if type(module) is nn.Conv2d and module.padding_mode == "zeros":
            module.__class__ = AlignedConv2d
        elif type(module) is nn.ConvTranspose2d:
            module.__class__ = AlignedConvTranspose2d
    return net.to(memory_format=torch.channels_last)
