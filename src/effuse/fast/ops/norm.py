"""Normalisations fused with the operations around them: one kernel for each pass on a GPU, plain torch elsewhere.

They are custom operators: torch.compile does not look inside, and CUDA graphs record their launches. They convert their
input to channels last where necessary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.fast.ops.bias import channel_sums, shifted
from effuse.fast.ops.dropout import KeyedDropout, dropped
from effuse.fast.ops.kernels import kernels_for
from effuse.fast.ops.rows import empty_rows, rows


def _in_rows(shift: Tensor | None) -> Tensor | None:
    return shift if shift is None or shift.stride(-1) == 1 else shift.contiguous()


@torch.library.custom_op("effuse::norm", mutates_args=())
def norm(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    groups: int,
    eps: float,
    before: bool,
    after: bool,
    rate: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """drop(silu(group_norm(gelu(x + shift)))), and each group's mean and 1 / deviation.

    `before` applies the GELU and `after` the SiLU. A shift has a number for every channel, or for every image and channel.
    """
    y, stats = empty_rows(x), x.new_empty((x.shape[0], 2, groups), dtype=torch.float32)
    kernels = kernels_for(x, "norm")
    if kernels is not None:
        (x, row), shift = rows(x), _in_rows(shift)
        with torch.cuda.device_of(x):
            kernels.forward(x, shift, weight, bias, seed, y, stats, row, groups, eps, before, after, rate, layer)
        return y, stats
    u = shifted(x, shift)
    u = F.gelu(u) if before else u
    var, mean = torch.var_mean(u.reshape(len(u), groups, -1), -1, correction=0)
    stats[:, 0], stats[:, 1] = mean, (var + eps).rsqrt()
    z = _scaled(_hat(u, stats), weight, bias)
    z = F.silu(z) if after else z
    y.copy_(dropped(z, seed, layer, rate) if rate and seed is not None else z)
    return y, stats


@torch.library.custom_op("effuse::norm_backward", mutates_args=())
def norm_backward(
    x: Tensor,
    dy: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    stats: Tensor,
    before: bool,
    after: bool,
    rate: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and for each image those of weight, bias and shift, stacked."""
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
    v = shifted(x, shift)
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
    ctx.set_materialize_grads(False)  # the statistics have no gradient: do not make zeros


def _back(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 11
    x, shift, weight, bias, seed, stats = ctx.saved_tensors
    dx, sums = norm_backward(x, dy, shift, weight, bias, seed, stats, *ctx.options)
    # a shift common to all images has a gradient summed over them, like weight and bias
    common = shift is not None and shift.ndim == 1
    over = channel_sums(sums[:, : 2 + common].flatten(1).t()[None]).unflatten(0, (-1, x.shape[1]))
    shifted = None if shift is None else (over[2] if common else sums[:, 2]).to(shift.dtype)
    return dx, shifted, over[0], over[1], None, None, None, None, None, None, None


norm.register_autograd(_back, setup_context=_keep)


def normed(
    x: Tensor,
    by: nn.GroupNorm,
    shift: Tensor | None = None,
    before: bool = False,
    after: bool = False,
    drop: nn.Module | None = None,
) -> Tensor:
    """A normalisation with the operations around it: shift and GELU before, SiLU and dropout after."""
    rate, layer, seed = 0.0, 0, None
    if isinstance(drop, KeyedDropout) and drop.training:
        rate, layer, seed = drop.p, drop.layer, drop.seed
    return norm(x, shift, by.weight, by.bias, seed, by.num_groups, by.eps, before, after, rate, layer)[0]


class FusedGroupNorm(nn.GroupNorm):
    """The same normalisation in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self)


class FusedGroupNormSiLU(nn.GroupNorm):
    """The same with the SiLU that follows it."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self, after=True)
