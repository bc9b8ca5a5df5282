"""Linear attention as one kernel each way on a GPU (`kernels/`), in plain torch elsewhere."""

from typing import Any

import torch
from torch import Tensor

from effuse.fast.ops.kernels import kernels_for
from effuse.fast.ops.rows import empty_rows, rows


@torch.library.custom_op("effuse::linear_attention", mutates_args=())
def linear_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The context is the values weighted by a softmax of keys over positions; queries, by a softmax over features, read it.

    `qkv` is B x (3 heads features) x positions. Besides the output, it returns every head's context and softmax statistics,
    flattened: a compiler would store tensors of four dimensions with channels last.
    """
    out, context, norm = _room(qkv, heads)
    kernels = _kernels(qkv, norm)
    if kernels is not None:
        qkv, row = rows(qkv)
        with torch.cuda.device_of(qkv):
            kernels.forward(qkv, out, context, norm, row)
        return out, context, norm
    q, k, v = _heads(qkv, heads)
    most = k.amax(-1)
    norm.copy_(torch.cat([most, (k - most[..., None]).exp().sum(-1)], -1))
    square = _weights(k, norm) @ v.mT
    context.copy_(square.flatten(2))
    out.copy_((square.mT @ q.softmax(-2) * q.shape[2] ** -0.5).reshape(out.shape))
    return out, context, norm


@torch.library.custom_op("effuse::linear_attention_backward", mutates_args=())
def linear_attention_backward(qkv: Tensor, dout: Tensor, context: Tensor, norm: Tensor) -> Tensor:
    """The gradient of `qkv`."""
    dqkv, context, norm = empty_rows(qkv), context.contiguous(), norm.contiguous()
    kernels = _kernels(qkv, norm)
    if kernels is not None:
        (qkv, row), (dout, drow) = rows(qkv), rows(dout)
        with torch.cuda.device_of(qkv):
            kernels.gradients(qkv, dout, context, norm, dqkv, row, drow)
        return dqkv
    q, k, v = _heads(qkv, context.shape[1])
    square, scale = context.unflatten(2, (q.shape[2], -1)), q.shape[2] ** -0.5
    g = dout.reshape(q.shape).float()
    s, weight = q.softmax(-2), _weights(k, norm)
    slope = scale * s @ g.mT
    up = scale * square @ g
    dq = s * (up - (s * up).sum(-2, keepdim=True))
    dk = weight * (slope @ v - (square * slope).sum(-1, keepdim=True))
    dv = slope.mT @ weight
    return dqkv.copy_(torch.stack([dq, dk, dv], 1).reshape(qkv.shape))


def _kernels(qkv: Tensor, norm: Tensor) -> Any:
    """The kernels, for heads whose features need no padding for a tensor core."""
    D = norm.shape[2] // 2
    return kernels_for(qkv, "attention") if D >= 16 and D & (D - 1) == 0 else None


def _room(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, C = qkv.shape[:2]
    D = C // (3 * heads)
    context, norm = (torch.empty((B, heads, n * D), dtype=torch.float32, device=qkv.device) for n in (D, 2))
    return empty_rows(qkv[:, : C // 3]), context, norm


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.float().reshape(len(qkv), 3, heads, qkv.shape[1] // (3 * heads), -1).unbind(1)


def _weights(k: Tensor, norm: Tensor) -> Tensor:
    most, total = norm[..., None].chunk(2, 2)
    return (k - most).exp() / total


@linear_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return _room(qkv, heads)


@linear_attention_backward.register_fake
def _(qkv: Tensor, *rest: Any) -> Tensor:
    return empty_rows(qkv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _back(ctx: Any, dout: Tensor, *rest: Any) -> tuple[Any, ...]:
    qkv, context, norm = ctx.saved_tensors
    return linear_attention_backward(qkv, dout, context, norm), None


linear_attention.register_autograd(_back, setup_context=_keep)
