"""Convolutions as a GPU wants them: channels last forwards and backwards, widths in multiples of eight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.fast.ops.bias import plus
from effuse.fast.ops.kernels import ALIGNED
from effuse.fast.ops.norm import normed


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


def doubled(x: Tensor) -> Tensor:
    """Every position four times, side by side; its gradient is a sum of four, which a compiler's own would add in any order."""
    B, C, H, W = x.shape
    return x.movedim(1, -1)[:, :, None, :, None].expand(B, H, 2, W, 2, C).reshape(B, 2 * H, 2 * W, C).movedim(-1, 1)


class AlignedConv2d(nn.Conv2d):
    """The same convolution, on zero-padded channels where its widths are not multiples of eight."""

    ours = False  # whether a kernel of ours adds the bias

    def forward(self, x: Tensor) -> Tensor:
        return _biased(self, self.unbiased(x))

    def unbiased(self, x: Tensor) -> Tensor:
        """Without its bias, for whoever can add that at no cost."""
        # a compiler keeps the layouts it has seen: without this, normalisations hand contiguous tensors to the convolution's
        # backward pass, which then copies each of them
        x, weight = _padded(self, x, self.weight, outputs=0)
        y = F.conv2d(channels_last(x), weight, None, self.stride, self.padding, self.dilation, self.groups)
        return channels_last(y)[:, : self.out_channels]


class AlignedConvTranspose2d(nn.ConvTranspose2d):
    """The same for transposed convolutions."""

    ours = False

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x, weight = _padded(self, x, self.weight, outputs=1)
        y = F.conv_transpose2d(
            channels_last(x), weight, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )
        return _biased(self, channels_last(y)[:, : self.out_channels])


class ConvNorm(nn.Sequential):
    """A convolution whose bias its normalisation adds."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(self[0].unbiased(x), self[1], self[0].bias)


def _padded(conv: Any, x: Tensor, weight: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    missing = [-conv.out_channels % ALIGNED, -conv.in_channels % ALIGNED]
    if conv.groups > 1 or not any(missing):
        return x, weight
    first, second = missing if outputs == 0 else reversed(missing)
    x = F.pad(x, (0, 0, 0, 0, 0, missing[1])) if missing[1] else x  # which would copy it for nothing, too
    return x, F.pad(weight, (0, 0, 0, 0, 0, second, 0, first))


def _biased(conv: Any, y: Tensor) -> Tensor:
    if conv.bias is None:
        return y
    return plus(y, conv.bias) if conv.ours else y + conv.bias.to(y.dtype)[:, None, None]


def joined(conv: AlignedConv2d, h: Tensor, shortcut: AlignedConv2d | None, x: Tensor) -> Tensor:
    """conv(h) + shortcut(x), or + x where there is none; the biases, which both have, are added at once."""
    h, bias = conv.unbiased(h), conv.bias
    if shortcut is not None:
        x, bias = shortcut.unbiased(x), bias + shortcut.bias
    return plus(h, bias, x)
