import pytest
import torch

from effuse.core.errors import TrainingError
from effuse.core.rng import SETTINGS
from effuse.fast.graph.recording import deterministic

BILINEAR = "upsample_bilinear2d_backward does not have a deterministic implementation, but you set it. You can turn it off"


class Making:
    """Refuses to be made in order, as torch would."""

    def __init__(self, message: str) -> None:
        self.message, self.asked = message, []

    def __call__(self) -> str:
        self.asked.append(torch.are_deterministic_algorithms_enabled())
        if self.asked[-1]:
            raise RuntimeError(self.message)
        return "made"


def test_what_can_only_be_added_in_any_order_is_told_and_recorded_all_the_same():
    make = Making(BILINEAR)
    with pytest.warns(
        UserWarning, match="two runs of this network may differ in the last bits: upsample_bilinear2d_backward"
    ):
        assert deterministic(make, always=False) == "made"
    assert make.asked == [True, False]


def test_a_reproducible_run_is_refused_then():
    make = Making(BILINEAR)
    with pytest.raises(
        TrainingError, match="reproducible=True is impossible for this network on a GPU: upsample_bilinear2d"
    ):
        deterministic(make, always=True)
    assert make.asked == [True]


def test_other_errors_are_not_taken_for_that():
    make = Making("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        deterministic(make, always=False)
    assert make.asked == [True] and not SETTINGS.locked()


def test_settings_are_left_as_they_were_and_held_meanwhile():
    """A mode that only warns stays one that only warns; whoever asks in another thread has to wait."""
    torch.set_deterministic_debug_mode("warn")
    try:
        seen = deterministic(
            lambda: (
                torch.get_deterministic_debug_mode(),
                SETTINGS.locked(),
                torch.utils.deterministic.fill_uninitialized_memory,
            ),
            always=True,
        )
        assert seen == (2, True, False)
        assert torch.get_deterministic_debug_mode() == 1 and torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode("default")
    assert not SETTINGS.locked()
