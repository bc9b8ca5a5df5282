"""Matrix products as tensor cores want them: several side by side, and sides in multiples of eight."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.fast.ops.bias import channel_sums
from effuse.fast.ops.kernels import ALIGNED


def side_by_side(
    layers: Sequence[nn.Linear], x: Tensor, more: Sequence[Tensor] = (), parts: int | None = None
) -> tuple[Tensor, ...]:
    """What each of the layers makes of x, plus what there is `more`, by one product instead of several small ones.

    Where a layer's features are so many `parts`, such as heads, they come with zeros that align each part, and nothing is `more`.
    """
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    weight, bias = torch.cat(weights), torch.cat(biases)
    if parts is not None:
        weight, bias = (aligned(t, 0, parts * len(layers)) for t in (weight, bias))
        return linear(aligned(x, -1), aligned(weight, -1), bias).chunk(len(layers), -1)
    y = F.linear(aligned(x, -1), aligned(weight, -1), bias)
    if more:  # and not with the bias, which is rounded once where autocast does it and twice where `halves.py` has
        y = y + torch.cat(list(more))
    return y.split([len(weight) for weight in weights], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear, the gradient of whose bias our kernel sums."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return _SummedBias.apply(F.linear(x, weight, bias.detach()), bias)


class _SummedBias(torch.autograd.Function):
    """Rows of features as they are, to which a bias was added."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.of_bias = bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return dy, None
        sums = channel_sums(dy.flatten(0, -2).t()[None])
        return dy, sums.to(dy.dtype).to(ctx.of_bias)  # rounded, as autocast has it


def aligned(x: Tensor, axis: int, parts: int = 1) -> Tensor:
    """The tensor with zeros after each of so many equal parts of an axis, so that each is a multiple of eight long."""
    axis %= x.ndim
    missing = -(x.shape[axis] // parts) % ALIGNED
    if not missing:
        return x
    split = x.unflatten(axis, (parts, -1))
    return F.pad(split, [0, 0] * (x.ndim - axis - 1) + [0, missing]).flatten(axis, axis + 1)
