"""Makes CUDA graphs whose replays repeat to the bit."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from effuse.core.errors import TrainingError
from effuse.core.rng import DEFAULT_GENERATOR

T = TypeVar("T")
# cuDNN caches its choice of algorithms per thread, and different choices give different bits. So one thread makes all
# recordings of a process, backward passes included, and a second one those that must not choose algorithms by trial.
RECORDERS = {trying: ThreadPoolExecutor(1, "recording") for trying in (True, False)}
WARM_UP = 3  # steps before a recording, in which libraries choose algorithms and allocate workspaces


def record(step: Callable[[], None], stream: torch.cuda.Stream, trying: bool) -> torch.cuda.CUDAGraph:
    """Warm up, then record. With `trying`, cuDNN benchmarks its algorithms in the warm-up."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, trying
    try:
        with torch.autograd.set_multithreading_enabled(False):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.synchronize()
            # other threads may run clients: check only this thread's calls, and let no thread seed the generator meanwhile
            with DEFAULT_GENERATOR, _no_collection():
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    step()
    finally:
        torch.backends.cudnn.benchmark = before
    return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and none within: freeing an old recording in the thread that records spoils the new one."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def deterministic(make: Callable[[], T], always: bool) -> T:
    """Make a recording from deterministic operations; unless `always`, warn and use others where torch lacks them.

    It changes torch's settings: the thread that waits for the recording holds SETTINGS.
    """
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
    """Torch's deterministic mode: without it, attention's gradient and compiled scatters do not repeat to the bit."""
    fills: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    fills.fill_uninitialized_memory = False  # filling every new tensor is useless here
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        fills.fill_uninitialized_memory = before[1]
