"""Fused group normalisation: y = drop(silu(norm(gelu(x + shift)))), where all but the norm is optional.

A program handles whole groups of one image, as rows of positions by columns of channels. No sum crosses programs, so
results repeat to the bit. A program keeps a small plane in registers, and reads a larger one again, from the cache.
`fast/ops/norm.py` holds the same mathematics in plain torch.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.fast.ops.dropout import salt, threshold
from effuse.fast.ops.kernels.elements import gelu, gelu_slope, kept, keys, sigmoid
from effuse.fast.ops.kernels.tiling import tiling


@triton.jit
def _grouped(v, lane, D: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr):
    # every channel gets the sum of its group
    if CHUNK == D:
        return tl.sum(v, 0) + tl.zeros([BC], tl.float32)
    else:
        same = (lane[:, None] // D) == (lane[None, :] // D)
        return tl.sum(tl.where(same, v[:, None], 0.0), 0)


@triton.jit
def _columns(
    shift_ptr, image, C: tl.constexpr, SROW: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr, SHIFT: tl.constexpr
):
    # the channels of a program, the mask of those that exist, and their shifts
    lane = tl.arange(0, BC)
    c = tl.program_id(0) * CHUNK + lane
    on = (lane < CHUNK) & (c < C)
    shift = tl.zeros([BC], tl.float32)
    if SHIFT:
        shift = tl.load(shift_ptr + image * SROW + c, mask=on, other=0.0).to(tl.float32)
    return lane, c, on, shift


@triton.jit
def _read(x_ptr, row, inside, c, shift, ROW: tl.constexpr, BEFORE: tl.constexpr):
    # without gelu it is cheaper to add the shift later, with other constants of a channel
    x = tl.load(x_ptr + row[:, None] * ROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if BEFORE:
        x = x + shift[None, :]
    return x


@triton.jit
def _write(
    u,
    y_ptr,
    row,
    inside,
    c,
    a,
    b,
    first,
    second,
    threshold,
    scale,
    base,
    C: tl.constexpr,
    AFTER: tl.constexpr,
    DROP: tl.constexpr,
):
    at = row[:, None] * C + c[None, :]
    y = u * a[None, :] + b[None, :]
    if AFTER:
        y *= sigmoid(y)
    if DROP:
        y = tl.where(kept(base + at, first, second, threshold), y * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["salt", "threshold"])
def norm_forward(
    x_ptr,
    shift_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    stats_ptr,
    P,
    salt,
    threshold,
    scale,
    eps,
    C: tl.constexpr,
    ROW: tl.constexpr,
    SROW: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    WHOLE: tl.constexpr,
    SHIFT: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    DROP: tl.constexpr,
):
    image = tl.program_id(1)
    lane, c, on, shift = _columns(shift_ptr, image, C, SROW, CHUNK, BC, SHIFT)
    first, second = 0, 0
    if DROP:
        first, second = keys(seed_ptr, salt)
    x_ptr += image.to(tl.int64) * P * ROW
    y_ptr += image.to(tl.int64) * P * C
    base = image * P * C
    p = tl.arange(0, BP)
    if WHOLE:
        inside = (p < P)[:, None] & on[None, :]
        u = _read(x_ptr, p, inside, c, shift, ROW, BEFORE)
        if BEFORE:
            u = gelu(u)
        own = tl.sum(tl.where(inside, u, 0.0), 0) / P
        off = tl.where(inside, u - own[None, :], 0.0)
        spread = tl.sum(off * off, 0)
    else:
        # sums of differences from the first position's value stay accurate when the mean is far from zero
        pivot = tl.load(x_ptr + c, mask=on, other=0.0).to(tl.float32)
        if BEFORE:
            pivot = gelu(pivot + shift)
        s = tl.zeros([BP, BC], tl.float32)
        q = tl.zeros([BP, BC], tl.float32)
        for start in range(0, P, BP):
            row = start + p
            inside = (row < P)[:, None] & on[None, :]
            u = _read(x_ptr, row, inside, c, shift, ROW, BEFORE)
            if BEFORE:
                u = gelu(u)
            off = tl.where(inside, u - pivot[None, :], 0.0)
            s += off
            q += off * off
        total = tl.sum(s, 0)
        own = pivot + total / P
        spread = tl.sum(q, 0) - total * total / P
    if not BEFORE:
        own += shift
    own = tl.where(on, own, 0.0)
    mean = _grouped(own, lane, D, CHUNK, BC) / D
    apart = tl.where(on, own - mean, 0.0)
    var = _grouped(spread + P * apart * apart, lane, D, CHUNK, BC) / (P * D)
    rstd = 1.0 / tl.sqrt(tl.maximum(var, 0.0) + eps)
    G: tl.constexpr = C // D
    first_of_group = on & (lane % D == 0)
    tl.store(stats_ptr + 2 * image * G + c // D, mean, mask=first_of_group)
    tl.store(stats_ptr + (2 * image + 1) * G + c // D, rstd, mask=first_of_group)
    a = rstd * tl.load(weight_ptr + c, mask=on, other=0.0)
    b = tl.load(bias_ptr + c, mask=on, other=0.0) - mean * a
    if not BEFORE:
        b += shift * a
    if WHOLE:
        _write(u, y_ptr, p, inside, c, a, b, first, second, threshold, scale, base, C, AFTER, DROP)
    else:
        for start in range(0, P, BP):
            row = start + p
            inside = (row < P)[:, None] & on[None, :]
            u = _read(x_ptr, row, inside, c, shift, ROW, BEFORE)
            if BEFORE:
                u = gelu(u)
            _write(u, y_ptr, row, inside, c, a, b, first, second, threshold, scale, base, C, AFTER, DROP)


@triton.jit
def _slope(
    u,
    dy_ptr,
    row,
    inside,
    c,
    a,
    b,
    first,
    second,
    threshold,
    scale,
    base,
    C: tl.constexpr,
    DROW: tl.constexpr,
    AFTER: tl.constexpr,
    DROP: tl.constexpr,
):
    # the gradient of a u + b
    g = tl.load(dy_ptr + row[:, None] * DROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if DROP:
        g = tl.where(kept(base + row[:, None] * C + c[None, :], first, second, threshold), g * scale, 0.0)
    if AFTER:
        z = u * a[None, :] + b[None, :]
        s = sigmoid(z)
        g = g * s * (1.0 + z * (1.0 - s))
    return g


@triton.jit(do_not_specialize=["salt", "threshold"])
def norm_backward(
    x_ptr,
    dy_ptr,
    shift_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    stats_ptr,
    dx_ptr,
    sums_ptr,
    P,
    salt,
    threshold,
    scale,
    C: tl.constexpr,
    ROW: tl.constexpr,
    DROW: tl.constexpr,
    SROW: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    WHOLE: tl.constexpr,
    SHIFT: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    DROP: tl.constexpr,
):
    image = tl.program_id(1)
    lane, c, on, shift = _columns(shift_ptr, image, C, SROW, CHUNK, BC, SHIFT)
    weight = tl.load(weight_ptr + c, mask=on, other=0.0)
    G: tl.constexpr = C // D
    mean = tl.load(stats_ptr + 2 * image * G + c // D, mask=on, other=0.0)
    rstd = tl.load(stats_ptr + (2 * image + 1) * G + c // D, mask=on, other=0.0)
    if not BEFORE:
        mean -= shift  # of x as it was read
    a = rstd * weight
    b = tl.load(bias_ptr + c, mask=on, other=0.0) - mean * a
    k = -mean * rstd  # normalised: u rstd + k
    first, second = 0, 0
    if DROP:
        first, second = keys(seed_ptr, salt)
    x_ptr += image.to(tl.int64) * P * ROW
    dy_ptr += image.to(tl.int64) * P * DROW
    dx_ptr += image.to(tl.int64) * P * C
    base = image * P * C
    p = tl.arange(0, BP)
    if WHOLE:
        inside = (p < P)[:, None] & on[None, :]
        v = _read(x_ptr, p, inside, c, shift, ROW, BEFORE)
        u = v
        if BEFORE:
            u = gelu(v)
        g = _slope(u, dy_ptr, p, inside, c, a, b, first, second, threshold, scale, base, C, DROW, AFTER, DROP)
        dw = tl.sum(g * (u * rstd[None, :] + k[None, :]), 0)
        db = tl.sum(g, 0)
    else:
        sw = tl.zeros([BP, BC], tl.float32)
        sb = tl.zeros([BP, BC], tl.float32)
        for start in range(0, P, BP):
            row = start + p
            inside = (row < P)[:, None] & on[None, :]
            u = _read(x_ptr, row, inside, c, shift, ROW, BEFORE)
            if BEFORE:
                u = gelu(u)
            g = _slope(u, dy_ptr, row, inside, c, a, b, first, second, threshold, scale, base, C, DROW, AFTER, DROP)
            sw += g * (u * rstd[None, :] + k[None, :])
            sb += g
        dw = tl.sum(sw, 0)
        db = tl.sum(sb, 0)
    sums_ptr += image * 3 * C
    tl.store(sums_ptr + c, dw, mask=on)
    tl.store(sums_ptr + C + c, db, mask=on)
    # dx = rstd (weight g - level - along (u rstd + k)) = a g + e u + f
    along = _grouped(weight * dw, lane, D, CHUNK, BC) / (P * D)
    level = _grouped(weight * db, lane, D, CHUNK, BC) / (P * D)
    e = -rstd * rstd * along
    f = -rstd * (level + k * along)
    if WHOLE:
        d = g * a[None, :] + u * e[None, :] + f[None, :]
        if BEFORE:
            d *= gelu_slope(v)
        tl.store(dx_ptr + p[:, None] * C + c[None, :], d.to(dx_ptr.dtype.element_ty), mask=inside)
        if SHIFT:
            tl.store(sums_ptr + 2 * C + c, tl.sum(tl.where(inside, d, 0.0), 0), mask=on)
    else:
        sd = tl.zeros([BP, BC], tl.float32)
        for start in range(0, P, BP):
            row = start + p
            inside = (row < P)[:, None] & on[None, :]
            v = _read(x_ptr, row, inside, c, shift, ROW, BEFORE)
            u = v
            if BEFORE:
                u = gelu(v)
            g = _slope(u, dy_ptr, row, inside, c, a, b, first, second, threshold, scale, base, C, DROW, AFTER, DROP)
            d = g * a[None, :] + u * e[None, :] + f[None, :]
            if BEFORE:
                d *= gelu_slope(v)
            tl.store(dx_ptr + row[:, None] * C + c[None, :], d.to(dx_ptr.dtype.element_ty), mask=inside)
            if SHIFT:
                sd += tl.where(inside, d, 0.0)
        if SHIFT:
            tl.store(sums_ptr + 2 * C + c, tl.sum(sd, 0), mask=on)


def _apart(shift: Tensor | None) -> int:
    """The stride between the shifts of two images: zero where all images share them."""
    return 0 if shift is None or shift.ndim == 1 else shift.stride(0)


def forward(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    y: Tensor,
    stats: Tensor,
    row: int,
    groups: int,
    eps: float,
    before: bool,
    after: bool,
    rate: float,
    layer: int,
) -> None:
    """Fill y and the statistics of every group."""
    images, C = x.shape[:2]
    P = x[0, 0].numel()
    t = tiling(C, P, groups, tensors=1)
    norm_forward[(triton.cdiv(C, t["CHUNK"]), images)](
        x,
        x if shift is None else shift,
        weight,
        bias,
        x if seed is None else seed,
        y,
        stats,
        P,
        salt(layer),
        threshold(rate),
        1 / (1 - rate),
        eps,
        C=C,
        ROW=row,
        SROW=_apart(shift),
        SHIFT=shift is not None,
        BEFORE=before,
        AFTER=after,
        DROP=rate > 0,
        **t,
    )


def gradients(
    x: Tensor,
    dy: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    stats: Tensor,
    dx: Tensor,
    sums: Tensor,
    row: int,
    drow: int,
    groups: int,
    before: bool,
    after: bool,
    rate: float,
    layer: int,
) -> None:
    """Fill dx, and for each image the sums that are the gradients of weight, bias and shift."""
    images, C = x.shape[:2]
    P = x[0, 0].numel()
    t = tiling(C, P, groups, tensors=2)
    norm_backward[(triton.cdiv(C, t["CHUNK"]), images)](
        x,
        dy,
        x if shift is None else shift,
        weight,
        bias,
        x if seed is None else seed,
        stats,
        dx,
        sums,
        P,
        salt(layer),
        threshold(rate),
        1 / (1 - rate),
        C=C,
        ROW=row,
        DROW=drow,
        SROW=_apart(shift),
        SHIFT=shift is not None,
        BEFORE=before,
        AFTER=after,
        DROP=rate > 0,
        **t,
    )
