"""Operations whose gradients are taken for each unit of a batch at once: `vmap` has no rule for them, or a slow one."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from effuse.core.errors import RecipeError

Pair: TypeAlias = int | tuple[int, ...]

# devices on which a convolution with many groups is slow; on a CPU it is faster than unfolding
UNFOLDED = {"cuda"}


class PerUnit(TorchFunctionMode):
    """Within it, attention and convolutions are those of this module."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OPERATIONS.get(function, function)(*args, **(kwargs or {}))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **rest: Any,
) -> Tensor:
    """What `scaled_dot_product_attention` computes, without a mask and without dropout, as two products and a softmax.

    Torch's fused attention has no rule for `vmap` and would run unit by unit.
    """
    if attn_mask is not None or dropout_p or is_causal or any(rest.values()):
        raise RecipeError("a private fit has attention without mask and dropout only; change the network")
    weights = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return weights.float().softmax(-1).to(value.dtype) @ value


class Convolution(torch.autograd.Function):
    """A convolution whose weight gradient is a matrix product for each unit.

    The rule of `vmap` is one convolution with a group for each unit.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, *ctx.window = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        before = conv2d_input(x.shape, weight, error, *ctx.window) if ctx.needs_input_grad[0] else None
        return before, _weight_gradient(x, error, weight, *ctx.window), _bias_gradient(ctx, error), None, None, None


class TransposedConvolution(torch.autograd.Function):
    """The same for a transposed convolution, where the image that is unfolded is the output's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, extra: Pair, dilation: Pair
    ) -> Tensor:
        return F.conv_transpose2d(x, weight, bias, stride, padding, extra, 1, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, stride, padding, _, dilation = inputs
        ctx.window, ctx.biased = (stride, padding, dilation), bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        before = F.conv2d(error, weight, None, *ctx.window) if ctx.needs_input_grad[0] else None
        return before, _weight_gradient(error, x, weight, *ctx.window), _bias_gradient(ctx, error), None, None, None, None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    if not _unfolds(x, groups) or isinstance(padding, str):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return Convolution.apply(*_cast(x, weight, bias), stride, padding, dilation)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> Tensor:
    if not _unfolds(x, groups):
        return F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return TransposedConvolution.apply(*_cast(x, weight, bias), stride, padding, output_padding, dilation)


OPERATIONS: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attention,
    F.conv2d: convolution,
    F.conv_transpose2d: transposed_convolution,
}


def _unfolds(x: Tensor, groups: int) -> bool:
    """A depthwise convolution has a group for each channel as it is."""
    return groups == 1 and x.device.type in UNFOLDED


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The inputs in the type that autocast would give them: it does not look into functions with a gradient of their own."""
    place = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(place):
        return list(tensors)
    return [None if t is None else t.to(torch.get_autocast_dtype(place)) for t in tensors]


def _weight_gradient(
    image: Tensor, positions: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The gradient of a unit's weight: what was at each position, times the part of the image below the window there."""
    columns = F.unfold(image, weight.shape[2:], dilation, padding, stride)
    return torch.einsum("kop,kcp->oc", positions.flatten(2), columns).view(weight.shape)


def _bias_gradient(ctx: Any, error: Tensor) -> Tensor | None:
    return error.sum((0, 2, 3)) if ctx.biased else None
