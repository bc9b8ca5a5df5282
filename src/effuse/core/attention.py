"""Linear attention as one kernel each way on a GPU (`kernels/`), in plain torch elsewhere."""

from typing import Any

import torch
from torch import Tensor

from effuse.core.fused import empty_rows, kernels_for, rows


@torch.library.custom_op("effuse::linear_attention", mutates_args=())
def linear_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries weigh, by a softmax over features, a context: the values that keys weigh by a softmax over positions.

    `qkv` is B x (3 heads features) x places; beside the output, of every head its context and what made its softmax.
    """
    out, context, norm = _room(qkv, heads)
    kernels = kernels_for(qkv, "attention")
    if kernels is not None:
        qkv, row = rows(qkv)
        with torch.cuda.device_of(qkv):
            kernels.forward(qkv, out, context, norm, row, _scale(context))
        return out, context, norm
    q, k, v = _heads(qkv, heads)
    norm[:, :, 0] = k.amax(-1)
    norm[:, :, 1] = (k - norm[:, :, 0, :, None]).exp().sum(-1)
    context.copy_(_weights(k, norm) @ v.mT)
    out.copy_((context.mT @ q.softmax(-2) * _scale(context)).reshape(out.shape))
    return out, context, norm


@torch.library.custom_op("effuse::linear_attention_backward", mutates_args=())
def linear_attention_backward(qkv: Tensor, dout: Tensor, context: Tensor, norm: Tensor) -> Tensor:
    """The gradient of `qkv`."""
    dqkv, heads, scale = empty_rows(qkv), context.shape[1], _scale(context)
    kernels = kernels_for(qkv, "attention")
    if kernels is not None:
        (qkv, row), (dout, drow) = rows(qkv), rows(dout)
        with torch.cuda.device_of(qkv):
            kernels.gradients(qkv, dout, context, norm, dqkv, row, drow, scale)
        return dqkv
    q, k, v = _heads(qkv, heads)
    g = dout.reshape(q.shape).float()
    s, weight = q.softmax(-2), _weights(k, norm)
    slope = scale * s @ g.mT
    up = scale * context @ g
    dq = s * (up - (s * up).sum(-2, keepdim=True))
    dk = weight * (slope @ v - (context * slope).sum(-1, keepdim=True))
    dv = slope.mT @ weight
    return dqkv.copy_(torch.stack([dq, dk, dv], 1).reshape(qkv.shape))


def _room(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, C = qkv.shape[:2]
    D = C // (3 * heads)
    fp32 = {"dtype": torch.float32, "device": qkv.device}
    return empty_rows(qkv[:, : C // 3]), torch.empty((B, heads, D, D), **fp32), torch.empty((B, heads, 2, D), **fp32)


def _scale(context: Tensor) -> float:
    return context.shape[-1] ** -0.5


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.float().reshape(len(qkv), 3, heads, qkv.shape[1] // (3 * heads), -1).unbind(1)


def _weights(k: Tensor, norm: Tensor) -> Tensor:
    return (k - norm[:, :, 0, :, None]).exp() / norm[:, :, 1, :, None]


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
