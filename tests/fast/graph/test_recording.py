"""Recordings that repeat to the bit."""

import contextlib
import gc

import pytest
import torch

from effuse.core.errors import TrainingError
from effuse.fast.graph.recording import WARM_UP, deterministic, record

BILINEAR = "upsample_bilinear2d_backward does not have a deterministic implementation, but you set it. You can turn it off"


class Recording:
    """Refuses deterministic mode, as torch would."""

    def __init__(self, message: str) -> None:
        self.message, self.modes = message, []

    def __call__(self) -> str:
        self.modes.append(torch.are_deterministic_algorithms_enabled())
        if self.modes[-1]:
            raise RuntimeError(self.message)
        return "made"


def test_a_network_without_deterministic_operations_is_recorded_with_a_warning():
    make = Recording(BILINEAR)
    with pytest.warns(
        UserWarning, match="two runs of this network may differ in the last bits: upsample_bilinear2d_backward"
    ):
        assert deterministic(make, always=False) == "made"
    assert make.modes == [True, False]


def test_a_reproducible_run_without_deterministic_operations_is_refused():
    make = Recording(BILINEAR)
    with pytest.raises(
        TrainingError, match="reproducible=True is impossible for this network on a GPU: upsample_bilinear2d"
    ):
        deterministic(make, always=True)
    assert make.modes == [True]


def test_other_errors_are_raised():
    make = Recording("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        deterministic(make, always=False)
    assert make.modes == [True] and not torch.are_deterministic_algorithms_enabled()


def test_settings_are_restored():
    """A mode that only warns is."""
    torch.set_deterministic_debug_mode("warn")
    try:
        seen = deterministic(
            lambda: (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory),
            always=True,
        )
        assert seen == (2, False)
        assert torch.get_deterministic_debug_mode() == 1 and torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_step_is_recorded(monkeypatch, fails):
    """An old recording that is freed in the middle of a new one would spoil it. Old cycles go before it begins."""
    seen, gone = [], []

    class Old:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.append(self)

    @contextlib.contextmanager
    def graph(*arguments, **options):
        seen.append("begins")
        assert len(gone) == 1, "the old recording is collected before"
        yield

    def step() -> None:
        seen.append(gc.isenabled())
        if fails and len(seen) > WARM_UP:
            raise RuntimeError("out of memory")

    for name, stand_in in (("graph", graph), ("CUDAGraph", object), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    Old()
    with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
        record(step, None, trying=True)
    assert seen == [True] * WARM_UP + ["begins", False] and gc.isenabled()
