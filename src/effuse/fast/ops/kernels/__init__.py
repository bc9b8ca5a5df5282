"""Triton kernels. The modules here need triton, and are imported only where it is installed."""

import functools
import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch
from torch import Tensor

ALIGNED = 8  # bf16 numbers in a tensor core's load


def kernels_for(x: Tensor, name: str) -> Any:
    """A module of kernels for a tensor, or None where plain torch is to be used."""
    return importlib.import_module(f"effuse.fast.ops.kernels.{name}") if x.is_cuda or _interpreted() else None


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@functools.cache
def available(device: torch.device) -> bool:
    """Whether our kernels run on the device. Each is tried, since Triton needs a C compiler and a writable cache."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from effuse.fast.ops.attention import linear_attention, linear_attention_backward
    from effuse.fast.ops.bias import channel_sums, plus_kernel
    from effuse.fast.ops.norm import norm, norm_backward

    try:
        x, ones = torch.zeros(1, 96, 4, 4, dtype=torch.bfloat16, device=device), torch.ones(96, device=device)
        y, stats = norm(x, None, ones, ones, None, 2, 1e-6, False, True, 0.0, 0)
        norm_backward(x, y, None, ones, ones, None, stats, False, True, 0.0, 0)
        channel_sums(plus_kernel(x, ones, x))
        out, *saved = linear_attention(x, 1)
        linear_attention_backward(x, out, *saved)
        torch.cuda.synchronize(device)
    except Exception as error:
        warnings.warn(f"our GPU kernels do not run here, so torch's own do, which are slower: {error}", stacklevel=2)
        return False
    return True
