"""Biases: one kernel adds them with a shortcut, another sums their gradients; plain torch elsewhere."""

from typing import Any

import torch
from torch import Tensor

from effuse.fast.ops.kernels import kernels_for
from effuse.fast.ops.rows import empty_rows, rows


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return x.float() if shift is None else x.float() + shift.float()[..., *[None] * (x.ndim - 2)]


@torch.library.custom_op("effuse::plus", mutates_args=())
def plus_kernel(x: Tensor, bias: Tensor, more: Tensor | None) -> Tensor:
    """x + bias + more, rounded once."""
    for other, wanted in ((bias, x.shape[1:2]), (more, x.shape)):
        if other is not None and other.shape != wanted:  # a kernel would read out of bounds
            raise ValueError(f"what is added has shape {tuple(other.shape)} where {tuple(x.shape)} needs {tuple(wanted)}")
    y = empty_rows(x)
    kernels = kernels_for(x, "bias")
    if kernels is None:
        return y.copy_(_sum(x, bias, more))
    (x, row), (more, mrow) = rows(x), (None, 0) if more is None else rows(more)
    with torch.cuda.device_of(x):
        kernels.forward(x, more, bias.contiguous(), y, row, mrow)
    return y


def _sum(x: Tensor, bias: Tensor, more: Tensor | None) -> Tensor:
    return shifted(x if more is None else x.float() + more.float(), bias)


@torch.library.custom_op("effuse::channel_sums", mutates_args=())
def channel_sums(x: Tensor) -> Tensor:
    """The sum of every channel, over images and positions."""
    kernels = kernels_for(x, "bias")
    if kernels is None:
        return x.float().sum((0, *range(2, x.ndim)))
    sums = x.new_empty(x.shape[1], dtype=torch.float32)
    x, row = rows(x)
    with torch.cuda.device_of(x):
        kernels.gradient(x, sums, row)
    return sums


@plus_kernel.register_fake
def _(x: Tensor, bias: Tensor, more: Any) -> Tensor:
    return empty_rows(x)


@channel_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


def _keep_types(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, more = inputs
    ctx.of_bias, ctx.more = bias.dtype, more is not None


def _spread(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    bias = channel_sums(dy).to(ctx.of_bias) if ctx.needs_input_grad[1] else None
    return dy, bias, dy if ctx.more else None


plus_kernel.register_autograd(_spread, setup_context=_keep_types)


def plus(x: Tensor, bias: Tensor, more: Tensor | None = None) -> Tensor:
    """x + bias (a number for every channel) + more, in one kernel; when compiling, the compiler makes its own."""
    return _sum(x, bias, more).to(x.dtype) if torch.compiler.is_compiling() else plus_kernel(x, bias, more)
