"""Convolutions of each channel with a small filter of its own, channels last.

Every tap is a shifted read of the same tile, which the first-level cache answers. The filters' gradient is summed for each
image apart and then over images, always in the same order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 64  # channels of a program
ROWS, GRADIENT_ROWS = 64, 32  # positions that it looks at a turn


@triton.jit
def conv(
    x_ptr, taps_ptr, y_ptr, H, W,
    C: tl.constexpr, ROW: tl.constexpr, K: tl.constexpr, FLIPPED: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    on = c < C
    h, w = p // W, p % W
    x_ptr += image * H * W * ROW
    total = tl.zeros([BP, BC], tl.float32)
    for i in range(K):
        for j in tl.static_range(K):
            y, x = h + i - K // 2, w + j - K // 2
            inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
            tap = i * K + j
            if FLIPPED:
                tap = K * K - 1 - tap
            weight = tl.load(taps_ptr + tap * C + c, mask=on, other=0.0)
            value = tl.load(x_ptr + (y * W + x)[:, None] * ROW + c[None, :], mask=inside[:, None] & on[None, :], other=0.0)
            total += value.to(tl.float32) * weight[None, :]
    at = y_ptr + image * H * W * C + p[:, None] * C + c[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(p < H * W)[:, None] & on[None, :])


@triton.jit
def filter_gradient(
    x_ptr, dy_ptr, sums_ptr, H, W,
    C: tl.constexpr, ROW: tl.constexpr, DROW: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    # one row of the filter; its taps are a dimension of the tile
    i = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    j = tl.arange(0, TAPS)
    on = c < C
    x_ptr += image * H * W * ROW
    dy_ptr += image * H * W * DROW
    total = tl.zeros([TAPS, BP, BC], tl.float32)
    for start in range(0, H * W, BP):
        p = start + tl.arange(0, BP)
        y = p // W + i - K // 2
        x = (p % W)[None, :] + j[:, None] - K // 2
        inside = ((p < H * W) & (y >= 0) & (y < H))[None, :] & (x >= 0) & (x < W) & (j < K)[:, None]
        g = tl.load(dy_ptr + p[:, None] * DROW + c[None, :], mask=(p < H * W)[:, None] & on[None, :], other=0.0)
        at = (y * W)[None, :] + x
        value = tl.load(
            x_ptr + at[:, :, None] * ROW + c[None, None, :], mask=inside[:, :, None] & on[None, None, :], other=0.0
        )
        total += value.to(tl.float32) * g.to(tl.float32)[None, :, :]
    to = sums_ptr + image * (K * K * C) + (i * K + j)[:, None] * C + c[None, :]
    tl.store(to, tl.sum(total, 1), mask=(j < K)[:, None] & on[None, :])


def forward(x: Tensor, taps: Tensor, y: Tensor, row: int, flipped: bool) -> None:
    """Fill y."""
    images, C, H, W = x.shape
    BC = min(WIDTH, triton.next_power_of_2(C))
    BP = min(ROWS, triton.next_power_of_2(H * W))
    conv[(triton.cdiv(C, BC), triton.cdiv(H * W, BP), images)](
        x, taps, y, H, W, C=C, ROW=row, K=math.isqrt(len(taps)), FLIPPED=flipped, BC=BC, BP=BP,
        num_warps=max(1, BP * BC // 512),
    )  # fmt: skip


def taps_gradient(x: Tensor, dy: Tensor, side: int, row: int, drow: int) -> Tensor:
    """The filters' gradient."""
    images, C, H, W = x.shape
    BC = min(WIDTH // 2, triton.next_power_of_2(C))
    BP = min(GRADIENT_ROWS, triton.next_power_of_2(H * W))
    sums = torch.empty((images, side * side, C), dtype=torch.float32, device=x.device)
    taps = triton.next_power_of_2(side)
    filter_gradient[(triton.cdiv(C, BC), side, images)](
        x, dy, sums, H, W, C=C, ROW=row, DROW=drow, K=side, TAPS=taps, BC=BC, BP=BP, num_warps=max(1, taps * BP * BC // 1024)
    )
    return sums.sum(0)
