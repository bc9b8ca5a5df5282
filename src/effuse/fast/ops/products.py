"""Matrix products for tensor cores: several as one, with sides in multiples of eight."""

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
    """Each layer's output for x, plus `more`, by one product instead of several small ones.

    With `parts`, such as heads, a layer's features consist of that many equal parts, each zero-padded; `more` is unused.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers]
    weight, bias = torch.cat(weights), torch.cat(biases)
    if parts is not None:
        weight, bias = (aligned(t, 0, parts * len(layers)) for t in (weight, bias))
        return linear(aligned(x, -1), aligned(weight, -1), bias).chunk(len(layers), -1)
    y = F.linear(aligned(x, -1), aligned(weight, -1), bias)
    if more:  # not with the bias, which autocast rounds once, and `bf16.py` before it
        y = y + torch.cat(list(more))
    return y.split([len(weight) for weight in weights], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear, with our kernel for the gradient of the bias."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return _SummedBias.apply(F.linear(x, weight, bias.detach()), bias)


class _SummedBias(torch.autograd.Function):
    """Passes rows through, and sums their gradient for the bias that was added to them."""

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
    """Zero-pad each of the equal parts of an axis to a multiple of eight."""
    axis %= x.ndim
    missing = -(x.shape[axis] // parts) % ALIGNED
    if not missing:
        return x
    split = x.unflatten(axis, (parts, -1))
    return F.pad(split, [0, 0] * (x.ndim - axis - 1) + [0, missing]).flatten(axis, axis + 1)
