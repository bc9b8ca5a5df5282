"""Convolutions for a GPU: channels last in both passes, widths in multiples of eight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.fast.ops.bias import plus
from effuse.fast.ops.kernels import ALIGNED
from effuse.fast.ops.norm import normed


class _ChannelsLast(torch.autograd.Function):
    """Stores a tensor, and its gradient, with channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous(memory_format=torch.channels_last)


def channels_last(x: Tensor) -> Tensor:
    return _ChannelsLast.apply(x)


def doubled(x: Tensor) -> Tensor:
    """Nearest-neighbour upsampling by two. Its gradient adds four values in a fixed order; a compiler's own would not."""
    B, C, H, W = x.shape
    return x.movedim(1, -1)[:, :, None, :, None].expand(B, H, 2, W, 2, C).reshape(B, 2 * H, 2 * W, C).movedim(-1, 1)


class AlignedConv2d(nn.Conv2d):
    """The same convolution, with channels zero-padded to multiples of eight."""

    fused_bias = False  # whether our kernel adds the bias

    def forward(self, x: Tensor) -> Tensor:
        return _biased(self, self.unbiased(x))

    def unbiased(self, x: Tensor) -> Tensor:
        """Without its bias, for a caller that adds it at no cost."""
        # without this, a compiler gives contiguous tensors to the convolution's backward pass, which then copies them
        x, weight = _padded(self, x, self.weight, outputs=0)
        y = F.conv2d(channels_last(x), weight, None, self.stride, self.padding, self.dilation, self.groups)
        return channels_last(y)[:, : self.out_channels]


class AlignedConvTranspose2d(nn.ConvTranspose2d):
    """The same for transposed convolutions."""

    fused_bias = False
    padding: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x, weight = _padded(self, x, self.weight, outputs=1)
        y = F.conv_transpose2d(
            channels_last(x), weight, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )
        return _biased(self, channels_last(y)[:, : self.out_channels])


class ConvNorm(nn.Sequential):
    """A convolution and a normalisation, which adds the convolution's bias."""

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = self[0]
        norm: Any = self[1]
        return normed(conv.unbiased(x), norm, conv.bias)


def _padded(conv: Any, x: Tensor, weight: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    missing = [-conv.out_channels % ALIGNED, -conv.in_channels % ALIGNED]
    if conv.groups > 1 or not any(missing):
        return x, weight
    first, second = missing if outputs == 0 else reversed(missing)
    x = F.pad(x, (0, 0, 0, 0, 0, missing[1])) if missing[1] else x  # padding by zero would copy
    return x, F.pad(weight, (0, 0, 0, 0, 0, second, 0, first))


def _biased(conv: Any, y: Tensor) -> Tensor:
    if conv.bias is None:
        return y
    return plus(y, conv.bias) if conv.fused_bias else y + conv.bias.to(y.dtype)[:, None, None]


def joined(conv: Any, h: Tensor, shortcut: Any, x: Tensor) -> Tensor:
    """conv(h) + shortcut(x), or conv(h) + x, of AlignedConv2d with biases; both biases are added at once."""
    h, bias = conv.unbiased(h), conv.bias
    if shortcut is not None:
        x, bias = shortcut.unbiased(x), bias + shortcut.bias
    return plus(h, bias, x)
