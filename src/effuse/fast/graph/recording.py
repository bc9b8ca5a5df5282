"""How a piece of GPU work becomes a recording that repeats to the bit."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from effuse.core.errors import TrainingError
from effuse.core.rng import DEFAULT_GENERATOR, SETTINGS

T = TypeVar("T")
# All recordings of a process are made in one thread, backward passes included: cuDNN remembers its choice of algorithms by thread,
# and two machines that chose differently would give different bits. Whoever may not choose by trial has a thread where nobody did.
RECORDERS = {trying: ThreadPoolExecutor(1, "recording") for trying in (True, False)}
WARM_UP = 3  # steps before a recording: libraries choose algorithms and allocate workspaces in them


def record(step: Callable[[], None], stream: torch.cuda.Stream, trying: bool) -> torch.cuda.CUDAGraph:
    """Warm up, in which cuDNN may be `trying` its algorithms on the shapes at hand; then record."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, trying
    try:
        with torch.autograd.set_multithreading_enabled(False):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.synchronize()
            # other slots may be at work in their threads: only this thread's calls are checked, and nobody seeds meanwhile
            with DEFAULT_GENERATOR, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
    finally:
        torch.backends.cudnn.benchmark = before
    return graph


def deterministic(make: Callable[[], T], always: bool) -> T:
    """What is made of operations that add up in a fixed order, or, unless `always`, in any where torch knows no such way."""
    with SETTINGS:
        try:
            with _in_order(True):
                return make()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            unordered = str(error).split(". ")[0]
        if always:
            raise TrainingError(f"reproducible=True is impossible for this network on a GPU: {unordered}")
        warnings.warn(f"two runs of this network may differ in the last bits: {unordered}", stacklevel=2)
        with _in_order(False):
            return make()


@contextlib.contextmanager
def _in_order(wanted: bool) -> Iterator[None]:
    """By default neither attention's gradient repeats to the bit, nor what a compiler scatters."""
    fills = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    fills.fill_uninitialized_memory = False  # every new tensor would be filled, to no use here
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        fills.fill_uninitialized_memory = before[1]
