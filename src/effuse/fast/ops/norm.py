"""Normalisations with what stands around them: as one kernel each way on a GPU (`kernels/`), in plain torch elsewhere.

They are custom operators, so torch.compile takes them as they are and CUDA graphs record their launches. They want channels
last, and make it so where it is not.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.fast.ops.dropout import KeyedDropout, dropped
from effuse.fast.ops.kernels import ALIGNED, kernels_for


def rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor as rows of channels, one for each position, and how far apart rows are; copied only where it must be."""
    places, row = x.shape[2:], x.stride(-1)
    wanted = row
    for size, stride in zip([*places[::-1], x.shape[0]], [*x.stride()[:1:-1], x.stride(0)]):
        if size > 1 and stride != wanted:
            break
        wanted *= size
    else:
        if x.stride(1) == 1 and row >= x.shape[1]:
            return x, row
    return empty_rows(x).copy_(x), x.shape[1]


def _in_rows(shift: Tensor | None) -> Tensor | None:
    return shift if shift is None or shift.stride(-1) == 1 else shift.contiguous()


def empty_rows(x: Tensor) -> Tensor:
    """Room for a tensor of that shape with channels last."""
    return torch.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype, device=x.device).movedim(-1, 1)


@torch.library.custom_op("effuse::norm", mutates_args=())
def norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None, groups: int, eps: float,
    before: bool, after: bool, rate: float, layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """drop(silu(group_norm(gelu(x + shift)))) and each group's mean and 1 / deviation; gelu is `before`, silu `after`.

    A shift has a number for every channel, or for every image and channel; rows of the latter may be far apart.
    """
    y, stats = empty_rows(x), x.new_empty((x.shape[0], 2, groups), dtype=torch.float32)
    kernels = kernels_for(x, "norm")
    if kernels is not None:
        (x, row), shift = rows(x), _in_rows(shift)
        with torch.cuda.device_of(x):
            kernels.forward(x, shift, weight, bias, seed, y, stats, row, groups, eps, before, after, rate, layer)
        return y, stats
    u = _shifted(x, shift)
    u = F.gelu(u) if before else u
    var, mean = torch.var_mean(u.reshape(len(u), groups, -1), -1, correction=0)
    stats[:, 0], stats[:, 1] = mean, (var + eps).rsqrt()
    z = _scaled(_hat(u, stats), weight, bias)
    z = F.silu(z) if after else z
    y.copy_(dropped(z, seed, layer, rate) if rate and seed is not None else z)
    return y, stats


@torch.library.custom_op("effuse::norm_backward", mutates_args=())
def norm_backward(
    x: Tensor, dy: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None, stats: Tensor,
    before: bool, after: bool, rate: float, layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and for each image those of weight, bias and shift, side by side."""
    dx, sums = empty_rows(x), x.new_empty((len(x), 3, x.shape[1]), dtype=torch.float32)
    groups = stats.shape[2]
    kernels = kernels_for(x, "norm")
    if kernels is not None:
        (x, row), (dy, drow), shift = rows(x), rows(dy), _in_rows(shift)
        with torch.cuda.device_of(x):
            kernels.gradients(
                x, dy, shift, weight, bias, seed, stats, dx, sums, row, drow, groups, before, after, rate, layer
            )
        return dx, sums
    v = _shifted(x, shift)
    hat = _hat(F.gelu(v) if before else v, stats)
    g = dy.float()
    if rate and seed is not None:
        g = dropped(g, seed, layer, rate)
    if after:
        z = _scaled(hat, weight, bias)
        s = z.sigmoid()
        g = g * s * (1 + z * (1 - s))
    places = tuple(range(2, x.ndim))
    sums[:, 0], sums[:, 1] = (g * hat).sum(places), g.sum(places)
    g = _scaled(g, weight, None)
    n = x[0].numel() // groups
    along, level = ((t.reshape(len(x), groups, -1).sum(-1, keepdim=True) / n) for t in (g * hat, g))
    d = (g.reshape(len(x), groups, -1) - level - hat.reshape(len(x), groups, -1) * along) * stats[:, 1, :, None]
    d = d.reshape(x.shape)
    if before:
        d = d * (0.5 * (1 + torch.erf(v * 0.5**0.5)) + v * (0.5 / torch.pi) ** 0.5 * torch.exp(-0.5 * v * v))
    sums[:, 2] = d.sum(places)
    return dx.copy_(d), sums


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return x.float() if shift is None else x.float() + shift.float()[..., *[None] * (x.ndim - 2)]


def _hat(u: Tensor, stats: Tensor) -> Tensor:
    return ((u.reshape(len(u), stats.shape[2], -1) - stats[:, 0, :, None]) * stats[:, 1, :, None]).reshape(u.shape)


def _scaled(u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (u.ndim - 2))
    return u * weight.view(shape) if bias is None else u * weight.view(shape) + bias.view(shape)


@norm.register_fake
def _(x: Tensor, shift: Any, weight: Any, bias: Any, seed: Any, groups: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(x), x.new_empty((x.shape[0], 2, groups), dtype=torch.float32)


@norm_backward.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(x), x.new_empty((len(x), 3, x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, shift, weight, bias, seed, _, _, *ctx.options = inputs
    ctx.save_for_backward(x, shift, weight, bias, seed, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # of the statistics: zeros, to no use


def _back(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 11
    x, shift, weight, bias, seed, stats = ctx.saved_tensors
    dx, sums = norm_backward(x, dy, shift, weight, bias, seed, stats, *ctx.options)
    common = shift is not None and shift.ndim == 1  # to all images: its gradient is summed over them, as weight's and bias's are
    over = channel_sums(sums[:, : 2 + common].flatten(1).t()[None]).unflatten(0, (-1, x.shape[1]))
    shifted = None if shift is None else (over[2] if common else sums[:, 2]).to(shift.dtype)
    return dx, shifted, over[0], over[1], None, None, None, None, None, None, None


norm.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("effuse::plus", mutates_args=())
def plus_kernel(x: Tensor, bias: Tensor, more: Tensor | None) -> Tensor:
    """x + bias + more, rounded once."""
    for other, wanted in ((bias, x.shape[1:2]), (more, x.shape)):
        if other is not None and other.shape != wanted:  # a kernel would read beside it
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
    return _shifted(x if more is None else x.float() + more.float(), bias)


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
    """x + bias, a number for every channel, and what there is more: one kernel, unless a compiler makes one of its own."""
    return _sum(x, bias, more).to(x.dtype) if torch.compiler.is_compiling() else plus_kernel(x, bias, more)


def normed(
    x: Tensor,
    by: nn.GroupNorm,
    shift: Tensor | None = None,
    before: bool = False,
    after: bool = False,
    drop: nn.Module | None = None,
) -> Tensor:
    """A normalisation with what stands around it: gelu before, SiLU and dropout after."""
    rate, layer, seed = 0.0, 0, None
    if isinstance(drop, KeyedDropout) and drop.training:
        rate, layer, seed = drop.p, drop.layer, drop.seed
    return norm(x, shift, by.weight, by.bias, seed, by.num_groups, by.eps, before, after, rate, layer)[0]


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


class FusedGroupNorm(nn.GroupNorm):
    """The same normalisation in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self)


class FusedGroupNormSiLU(nn.GroupNorm):
    """The same with the SiLU that follows it."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self, after=True)
