"""Metrics that use labels: accuracy, conditional accuracy, diversity, the mix of classes."""

from collections.abc import Callable

import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.metric import Outlook, Subject
from effuse.metrics.accuracy import Accuracy, ConditionalAccuracy
from effuse.metrics.classifier import Classifier
from effuse.metrics.diversity import Diversity
from effuse.metrics.encoders import Network, Pixels
from effuse.metrics.mix import ClassMix

SubjectOf = Callable[..., Subject]


def test_accuracy_of_a_predictor(subject_of: SubjectOf) -> None:
    """A predictor that always says 3 is right on the threes."""
    always = torch.nn.functional.one_hot(torch.tensor(3), 10).float()
    subject = subject_of(predict=lambda x: always.expand(len(x), 10))
    measured = Accuracy().measure(subject)["accuracy"]
    assert measured.value == subject.test.histogram()[3] / 359
    assert measured.protocol == {"split": "test", "images": 359, "data": "digits()"}
    with pytest.raises(RecipeError, match="this model does not classify"):
        Accuracy().measure(subject_of())


def test_conditional_accuracy_counts_the_requested_labels(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """Real digits with their own labels are right; with half the labels shifted by one, half are."""
    _, test = digits
    pixels, shift = test.floats(test.images)[:200], (torch.arange(200) < 100).long()
    right = ConditionalAccuracy(n=200).measure(subject_of(pixels, test.labels[:200]))["conditional_accuracy"]
    half = ConditionalAccuracy(n=200).measure(subject_of(pixels, (test.labels[:200] + shift) % 10))["conditional_accuracy"]
    assert right.value >= 0.97
    assert half.value == pytest.approx(0.5, abs=0.02)
    assert right.protocol["classifier_accuracy"] >= 0.97  # type: ignore[operator]
    assert right.warning is None
    with pytest.raises(RecipeError, match="no labels; use a class-conditional model"):
        ConditionalAccuracy(n=20).measure(subject_of(pixels))
    with pytest.raises(RecipeError, match="no labels; use a class-conditional model"):
        ConditionalAccuracy().ready(Outlook(classifies=False, conditional=False, classes=10, real={"train": 9, "test": 9}))


def test_a_poor_classifier_is_a_warning(subject_of: SubjectOf) -> None:
    poor = ConditionalAccuracy(n=50, encoder=Classifier(width=2, steps=1, epochs=1))
    warning = poor.measure(subject_of(cache=None))["conditional_accuracy"].warning
    assert warning is not None
    assert "of held-out real images only" in warning


def test_diversity_by_hand(subject_of: SubjectOf) -> None:
    """Class 0: real pixels 0 and 100, generated 0 and 50: 1/2. Class 1: the same pair: 1. Mean 3/4; class 2 is empty."""
    real = torch.tensor([0, 100, 20, 60], dtype=torch.uint8).reshape(4, 1, 1, 1)
    test = Dataset(real, torch.tensor([0, 0, 1, 1]), ("a", "b", "c"))
    made = torch.tensor([0.0, 50.0, 20.0, 60.0]).reshape(4, 1, 1, 1) / 127.5 - 1
    measured = Diversity(n=4).measure(subject_of(made, torch.tensor([0, 0, 1, 1]), test=test))["diversity"]
    assert measured.value == pytest.approx(0.75, abs=1e-12)
    assert measured.protocol["classes"] == 2
    assert measured.warning == "1 of 3 classes have no two different images and are left out"


def test_diversity_of_real_and_of_collapsed_samples(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    train, test = digits
    assert Diversity(n=359).measure(subject_of())["diversity"].value == pytest.approx(1.0)
    other = subject_of(train.floats(train.images[:500]), train.labels[:500])
    assert Diversity(n=500).measure(other)["diversity"].value == pytest.approx(1.0, abs=0.1)
    collapsed = subject_of(torch.zeros(20, 1, 8, 8), torch.arange(20) % 10)
    assert Diversity(n=20).measure(collapsed)["diversity"].value == 0.0
    with pytest.raises(RecipeError, match="no labels"):
        Diversity(n=20).measure(subject_of(torch.zeros(20, 1, 8, 8)))
    with pytest.raises(RecipeError, match="no class has two generated"):
        Diversity(n=2).measure(subject_of(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])))


class Brightness(Classifier):
    """Black is class 0, grey class 1, white class 2: a classifier that is never wrong."""

    def identity(self, subject: Subject) -> str:
        return "brightness"

    def network(self, subject: Subject) -> Network:
        return lambda images: (
            images.flatten(1).float(),
            -(images.flatten(1)[:, :1].float() - torch.tensor([0.0, 128.0, 255.0])).abs(),
        )


def test_the_mix_of_classes_by_hand(subject_of: SubjectOf) -> None:
    """Real: 1/2 black, 1/4 grey, 1/4 white. Generated, of ten: 2 black, 3 grey, 5 white: (0.3 + 0.05 + 0.25) / 2 = 0.3.

    Ten real images would show sqrt(2 / (10 pi)) (sqrt(1/4) + 2 sqrt(3/16)) / 2 = 0.17233 on average.
    """
    real = torch.tensor([0, 0, 128, 255], dtype=torch.uint8).reshape(4, 1, 1, 1)
    test = Dataset(real, torch.tensor([0, 0, 1, 2]), ("black", "grey", "white"))
    made = torch.tensor([-1.0] * 2 + [0.0] * 3 + [1.0] * 5).reshape(10, 1, 1, 1)
    measured = ClassMix(n=10, encoder=Brightness()).measure(subject_of(made, train=test, test=test, cache=None))["class_mix"]
    assert measured.value == pytest.approx(0.3, abs=1e-12)
    assert measured.protocol["shares"] == "black 0.200, grey 0.300, white 0.500"
    assert measured.protocol["real_shares"] == "black 0.500, grey 0.250, white 0.250"
    assert measured.protocol["by_chance"] == pytest.approx(0.17233, abs=1e-5)
    assert measured.warning is None


def test_the_mix_of_classes_of_digits(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """Real images have distance 0; without the five highest digits it is 1/2."""
    train, _ = digits
    assert ClassMix(n=359).measure(subject_of())["class_mix"].value == 0.0
    low = train.images[train.labels < 5][:400]
    measured = ClassMix(n=400).measure(subject_of(train.floats(low)))["class_mix"]
    assert measured.value == pytest.approx(0.5, abs=0.03)
    with pytest.raises(ValueError, match="pixels.. gives none; use encoder=classifier"):
        ClassMix(encoder=Pixels())
