import pytest
import torch

from effuse.core.recording import orderly


def test_what_can_only_be_added_in_any_order_is_recorded_all_the_same():
    asked = []

    def make(message):
        asked.append(torch.are_deterministic_algorithms_enabled())
        if asked[-1]:
            raise RuntimeError(message)
        return "made"

    assert orderly(lambda: make("bilinear does not have a deterministic implementation")) == "made"
    assert asked == [True, False]
    with pytest.raises(RuntimeError, match="out of memory"):
        orderly(lambda: make("out of memory"))
    assert orderly(torch.are_deterministic_algorithms_enabled) is True
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
