"""Tensors as rows of channels, one for each position: the layout of the kernels."""

import torch
from torch import Tensor


def rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor as rows of channels, one for each position, and the stride of the rows; copied only if necessary."""
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


def empty_rows(x: Tensor) -> Tensor:
    """An empty tensor of that shape with channels last."""
    return torch.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype, device=x.device).movedim(-1, 1)
