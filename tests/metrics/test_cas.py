"""The classification accuracy score: a classifier that has seen samples only."""

from collections.abc import Callable

import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.metric import Outlook, Subject
from effuse.core.solvers import AdamW
from effuse.metrics.cas import Cas

QUICK = AdamW(lr=3e-3, batch=64, epochs=6)


def test_good_samples_train_a_good_classifier_and_wrong_labels_a_bad_one(
    subject_of: Callable[..., Subject], digits: tuple[Dataset, Dataset]
) -> None:
    """Real training digits as samples: above 0.9 of the test digits. The same with every label shifted by one: below 0.1."""
    train, _ = digits
    pixels = train.floats(train.images)[:1000]
    for labels, low, high in ((train.labels[:1000], 0.9, 1.0), ((train.labels[:1000] + 1) % 10, 0.0, 0.1)):
        found = Cas(n=1000, solver=QUICK).measure(subject_of(pixels, labels))["cas"]
        assert low <= found.value <= high
        assert found.protocol["trained_on"] == 1000 and found.protocol["images"] == 359
    again = Cas(n=1000, solver=QUICK).measure(subject_of(pixels, labels))["cas"]
    assert again.value == found.value


def test_samples_without_labels_are_refused(subject_of: Callable[..., Subject]) -> None:
    with pytest.raises(RecipeError, match="cas: the samples have no labels"):
        Cas(n=4).measure(subject_of(torch.zeros(4, 1, 8, 8), None))
    with pytest.raises(RecipeError, match="use a class-conditional model"):
        Cas().ready(Outlook(classifies=False, conditional=False, classes=10, real={"train": 1, "test": 1}))
