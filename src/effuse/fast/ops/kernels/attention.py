"""Linear attention and its gradients. Every head has a D x D context, which all its positions share.

A program handles one head of one image, in two passes over its positions. The first sums the context; its softmax over
positions is rescaled as larger keys appear. The second applies the context. Queries, keys, values and their gradients are
read or written once, and no sum crosses programs. `fast/ops/attention.py` holds the same mathematics in plain torch.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 64, 4  # positions at a time, and warps: three programs fit a multiprocessor


@triton.jit
def _rows(ptr, row, inside, columns, ROW: tl.constexpr, missing: tl.constexpr):
    return tl.load(ptr + row[:, None] * ROW + columns[None, :], mask=inside, other=missing)


@triton.jit
def _weights(q, scale):
    # softmax over features, unscaled and scaled
    e = tl.exp(q - tl.max(q, 1)[:, None])
    s = e / tl.sum(e, 1)[:, None]
    return s, s * scale


@triton.jit
def _head(HEADS: tl.constexpr, D: tl.constexpr):
    # a program's image, its index among the heads of all images, its features, and their columns in an image's row
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    return image, image * HEADS + head, d, head * D + d


@triton.jit
def attention_forward(
    x_ptr,
    out_ptr,
    context_ptr,
    norm_ptr,
    P,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BP: tl.constexpr,
):
    INNER: tl.constexpr = HEADS * D
    image, at, d, column = _head(HEADS, D)
    x_ptr += image * P * ROW
    out_ptr += image * P * INNER
    most = tl.full([D], float("-inf"), tl.float32)
    total = tl.zeros([D], tl.float32)
    context = tl.zeros([D, D], tl.float32)
    for start in range(0, P, BP):
        row = start + tl.arange(0, BP)
        inside = (row < P)[:, None]
        k = _rows(x_ptr, row, inside, INNER + column, ROW, float("-inf")).to(tl.float32)
        v = _rows(x_ptr, row, inside, 2 * INNER + column, ROW, 0.0)
        larger = tl.maximum(most, tl.max(k, 0))
        e = tl.exp(k - larger[None, :])
        before = tl.exp(most - larger)
        total = total * before + tl.sum(e, 0)
        context = context * before[:, None] + tl.dot(tl.trans(e).to(v.dtype), v, input_precision="ieee")
        most = larger
    context /= total[:, None]
    tl.store(context_ptr + at * D * D + d[:, None] * D + d[None, :], context)
    tl.store(norm_ptr + at * 2 * D + d, most)
    tl.store(norm_ptr + at * 2 * D + D + d, total)
    for start in range(0, P, BP):
        row = start + tl.arange(0, BP)
        inside = (row < P)[:, None]
        q = _rows(x_ptr, row, inside, column, ROW, 0.0)
        _, s = _weights(q.to(tl.float32), scale)
        out = tl.dot(s.to(q.dtype), context.to(q.dtype), input_precision="ieee")
        tl.store(out_ptr + row[:, None] * INNER + column[None, :], out.to(q.dtype), mask=inside)


@triton.jit
def attention_backward(
    x_ptr,
    dout_ptr,
    context_ptr,
    norm_ptr,
    dx_ptr,
    P,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    DROW: tl.constexpr,
    BP: tl.constexpr,
):
    INNER: tl.constexpr = HEADS * D
    image, at, d, column = _head(HEADS, D)
    x_ptr += image * P * ROW
    dout_ptr += image * P * DROW
    dx_ptr += image * P * (3 * INNER)
    context = tl.load(context_ptr + at * D * D + d[:, None] * D + d[None, :])
    most = tl.load(norm_ptr + at * 2 * D + d)
    total = tl.load(norm_ptr + at * 2 * D + D + d)
    slope = tl.zeros([D, D], tl.float32)  # of the context
    for start in range(0, P, BP):
        row = start + tl.arange(0, BP)
        inside = (row < P)[:, None]
        q = _rows(x_ptr, row, inside, column, ROW, 0.0)
        dout = _rows(dout_ptr, row, inside, column, DROW, 0.0)
        s, scaled = _weights(q.to(tl.float32), scale)
        slope += tl.dot(tl.trans(scaled).to(q.dtype), dout, input_precision="ieee")
        g = tl.dot(dout, tl.trans(context).to(q.dtype), input_precision="ieee") * scale
        dq = s * (g - tl.sum(s * g, 1)[:, None])
        tl.store(dx_ptr + row[:, None] * (3 * INNER) + column[None, :], dq.to(q.dtype), mask=inside)
    small = slope.to(x_ptr.dtype.element_ty)
    # the softmax's gradient subtracts the sum over positions of weight times slope, which follows from the context
    level = tl.sum(context * small.to(tl.float32), 1)
    for start in range(0, P, BP):
        row = start + tl.arange(0, BP)
        inside = (row < P)[:, None]
        k = _rows(x_ptr, row, inside, INNER + column, ROW, float("-inf")).to(tl.float32)
        v = _rows(x_ptr, row, inside, 2 * INNER + column, ROW, 0.0)
        weight = tl.exp(k - most[None, :]) / total[None, :]
        dv = tl.dot(weight.to(v.dtype), small, input_precision="ieee")
        dk = weight * (tl.dot(v, tl.trans(small), input_precision="ieee") - level[None, :])
        place = dx_ptr + row[:, None] * (3 * INNER) + column[None, :]
        tl.store(place + INNER, dk.to(v.dtype), mask=inside)
        tl.store(place + 2 * INNER, dv.to(v.dtype), mask=inside)


def _shared_out(qkv: Tensor, norm: Tensor) -> tuple[tuple[int, int], dict[str, int], float]:
    """The grid (a program for every head of every image), its sizes, and the scale of queries."""
    images, heads, D = norm.shape[0], norm.shape[1], norm.shape[2] // 2
    tile = max(16, min(TILE, triton.next_power_of_2(qkv[0, 0].numel())))
    return (heads, images), {"HEADS": heads, "D": D, "BP": tile, "num_warps": WARPS}, D**-0.5


def forward(qkv: Tensor, out: Tensor, context: Tensor, norm: Tensor, row: int) -> None:
    """Fill the output, every head's context, and the largest key and the sum of its softmax."""
    programs, sizes, scale = _shared_out(qkv, norm)
    attention_forward[programs](qkv, out, context, norm, qkv[0, 0].numel(), scale, ROW=row, **sizes)


def gradients(qkv: Tensor, dout: Tensor, context: Tensor, norm: Tensor, dqkv: Tensor, row: int, drow: int) -> None:
    """Fill the gradients of queries, keys and values."""
    programs, sizes, scale = _shared_out(qkv, norm)
    attention_backward[programs](qkv, dout, context, norm, dqkv, qkv[0, 0].numel(), scale, ROW=row, DROW=drow, **sizes)
