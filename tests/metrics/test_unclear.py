"""Broken images: samples of which a classifier is less sure than of real ones."""

import math
from collections.abc import Callable

import pytest
import torch

from effuse.core.metric import Subject
from effuse.metrics.encoders import Pixels
from effuse.metrics.unclear import Unclear, certainty

SubjectOf = Callable[..., Subject]


def test_certainty_is_the_log_odds_of_the_best_class() -> None:
    """Logits ln 6, ln 2, ln 1: odds of 6 to 3. Logits 100, 0, 0: probability 1 in fp32, log-odds 100 - ln 2."""
    found = certainty(torch.tensor([[math.log(6), math.log(2), 0.0], [0.0, 100.0, 0.0]]))
    assert found.tolist() == pytest.approx([math.log(2), 100 - math.log(2)], abs=1e-6)


def test_real_images_have_the_share_that_defines_it(subject_of: SubjectOf) -> None:
    """5 % of 359 test digits lie below their own 5 % quantile: 18 of them."""
    found = Unclear(n=359, share=0.05).measure(subject_of())["unclear"]
    assert found.value == 18 / 359
    assert found.protocol["real_share"] == 0.05
    assert found.warning is None


def test_broken_images_are_found(subject_of: SubjectOf) -> None:
    """Half of the samples are means of two real digits. A third of the means look like no class; the rest look like one."""
    subject = subject_of()
    real = subject.samples(300).pixels
    mixed = torch.cat([(real[:100] + real[101:201]) / 2, real[200:]])
    found = Unclear(n=200).measure(subject_of(mixed))["unclear"].value
    assert found > 0.1
    assert found > 10 * Unclear(n=100).measure(subject_of(real[200:]))["unclear"].value


def test_an_encoder_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="unclear needs class scores"):
        Unclear(encoder=Pixels())
