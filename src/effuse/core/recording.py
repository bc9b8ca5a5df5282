"""How a piece of GPU work becomes a recording that repeats to the bit."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from effuse.core.rng import DEFAULT_GENERATOR

T = TypeVar("T")
# one recording at a time in a process, all of them in one thread: cuDNN's choice of algorithms is remembered by thread, and
# two machines that chose differently would give different bits
RECORDING = ThreadPoolExecutor(1, "recording")
WARM_UP = 3  # steps before a recording: libraries choose algorithms and allocate workspaces in them


def record(step: Callable[[], None], stream: torch.cuda.Stream, trying: bool) -> torch.cuda.CUDAGraph:
    """Warm up, in which cuDNN may be `trying` its algorithms on the shapes at hand; then record."""
    torch.cuda.synchronize()
    graph, cudnn = torch.cuda.CUDAGraph(), torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    # what it once chose by trial it takes ever after for the same convolution under the same settings; TF32, which our steps do not
    # use, is the one that keeps apart who tries and who must agree with other processes
    cudnn.benchmark, cudnn.allow_tf32 = trying, trying
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.synchronize()
        # other slots may be at work in their threads: only this thread's calls are checked, and nobody seeds meanwhile
        with DEFAULT_GENERATOR, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before
    return graph


def orderly(make: Callable[[], T]) -> T:
    """What is made of operations that add up in a fixed order, or, where torch has no such way to do one of them, in any."""
    try:
        with _in_order(True):
            return make()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        with _in_order(False):
            return make()


@contextlib.contextmanager
def _in_order(wanted: bool) -> Iterator[None]:
    """By default neither attention's gradient repeats to the bit, nor what a compiler scatters."""
    fills = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    fills.fill_uninitialized_memory = False  # every new tensor would be filled, to no use here
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]
