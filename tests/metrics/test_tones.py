"""Tones: histograms of brightness, generated against real."""

from collections.abc import Callable

import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.metric import Subject
from effuse.metrics import tones
from effuse.metrics.tones import Tones

SubjectOf = Callable[..., Subject]


def as_floats(*values: int) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1, 1, 1) / 127.5 - 1


def test_by_hand(subject_of: SubjectOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real: three black pixels, one white. Generated: 0, 7, 8 and 255; 0 and 7 fall into the black bin, 8 into the next.

    Black is 3/4 and 2/4, the next bin 0 and 1/4, white 1/4 in both: (1/4 + 1/4) / 2 = 1/4.
    """
    monkeypatch.setattr(tones, "AT_ONCE", 3)  # the real images in two parts, of three and of one
    real = Dataset(torch.tensor([0, 0, 0, 255], dtype=torch.uint8).reshape(4, 1, 1, 1), torch.zeros(4).long(), ("a",))
    found = Tones(n=4).measure(subject_of(as_floats(0, 7, 8, 255), train=real))["tones"]
    assert found.value == pytest.approx(0.25, abs=1e-12)
    assert found.protocol == {"bins": 32, "generated": 4, "reference": 4, "split": "train", "data": "digits()"}


def test_channels_are_averaged(subject_of: SubjectOf) -> None:
    """Red is right everywhere, green nowhere, blue in two of four pixels: (0 + 1 + 1/2) / 3."""
    real = Dataset(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1).long(), ("a",))
    made = torch.full((1, 3, 2, 2), -1.0)
    made[0, 1], made[0, 2, 0] = 1.0, 1.0
    assert Tones(n=1).measure(subject_of(made, train=real))["tones"].value == pytest.approx(0.5, abs=1e-12)


def test_a_haze_is_seen(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """Real images give 0. With background pixels raised from 0 to 16 of 255, the distance is the share of these pixels."""
    train, test = digits
    assert Tones(n=359, split="test").measure(subject_of())["tones"].value == 0.0
    hazy = test.images.clamp(min=16)
    lifted = (test.images < 16).double().mean().item()
    assert Tones(n=359, split="test").measure(subject_of(test.floats(hazy)))["tones"].value == pytest.approx(lifted)
