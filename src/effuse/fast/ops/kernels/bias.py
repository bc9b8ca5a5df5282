"""The addition of a bias and a shortcut in one kernel; the bias's gradient, a sum over all positions, in two.

Torch's sum over the rows of a channels-last tensor takes several times as long as reading it: a seventh of a recorded,
uncompiled step. Sums have a fixed order here, so results repeat to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.fast.ops.kernels.tiling import SUMMERS, Columns, columns

BLOCK = 4096  # elements of a program: sixteen per thread
WARPS = 8


@triton.jit
def plus_forward(
    x_ptr,
    more_ptr,
    bias_ptr,
    y_ptr,
    n,
    C: tl.constexpr,
    XROW: tl.constexpr,
    MROW: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    inside = begin + lane < n
    row = begin // C
    at = (begin - row * C).to(tl.int32) + lane  # from the row's first channel on
    u = tl.load(bias_ptr + at % C, mask=inside, other=0.0).to(tl.float32)
    if XROW == C:
        u += tl.load(x_ptr + begin + lane, mask=inside, other=0.0).to(tl.float32)
    else:
        u += tl.load(x_ptr + row * XROW + (at // C * XROW + at % C), mask=inside, other=0.0).to(tl.float32)
    if MORE:
        if MROW == C:
            u += tl.load(more_ptr + begin + lane, mask=inside, other=0.0).to(tl.float32)
        else:
            u += tl.load(more_ptr + row * MROW + (at // C * MROW + at % C), mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + begin + lane, u.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    x_ptr, sums_ptr, rows, C: tl.constexpr, ROW: tl.constexpr, each: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    # a program sums `each` rows of its columns
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    begin = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros([BR, BC], tl.float32)
    for done in range(0, each, BR):
        row = begin + done + tl.arange(0, BR)
        inside = (row < rows)[:, None] & (c < C)[None, :]
        total += tl.load(x_ptr + row[:, None] * ROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)


def forward(x: Tensor, more: Tensor | None, bias: Tensor, y: Tensor, row: int, mrow: int) -> None:
    """y = x + more + bias; rows of x and more may have gaps."""
    n, C = y.numel(), y.shape[1]
    plus_forward[(triton.cdiv(n, BLOCK),)](
        x,
        x if more is None else more,
        bias,
        y,
        n,
        C=C,
        XROW=row,
        MROW=mrow,
        MORE=more is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def gradient(dy: Tensor, out: Tensor, row: int) -> None:
    """The sum of each channel, over images and positions."""
    C = dy.shape[1]
    n = dy.numel() // C
    if n > SUMMERS:
        tile = columns(C, n)
        partial = dy.new_empty((tile.programs, C), dtype=torch.float32)
        _launch(dy, partial, n, row, tile)
        dy, n, row = partial, tile.programs, C
    _launch(dy, out, n, row, columns(C, n, last=True))


def _launch(x: Tensor, sums: Tensor, rows: int, row: int, tile: Columns) -> None:
    C = sums.shape[-1]
    grid = (tile.programs, triton.cdiv(C, tile.BC))
    column_sums[grid](x, sums, rows, C=C, ROW=row, each=tile.each, BR=tile.BR, BC=tile.BC, num_warps=WARPS)
