"""Metrics of each class and of each subgroup."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from effuse.core.build import build_text
from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.metric import Metric, Outlook, Subject
from effuse.metrics.accuracy import Accuracy, ConditionalAccuracy
from effuse.metrics.by_class import ByClass, subgroups
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID

SubjectOf = Callable[..., Subject]
NAMES = ("sex=F age=40", "sex=F age=60", "sex=M age=40", "sex=M age=60")


def test_a_distance_of_each_class_is_that_of_its_images_alone(
    subject_of: SubjectOf, digits: tuple[Dataset, Dataset]
) -> None:
    """Test images as samples are perfect in every class; with the samples of 3 and 8 exchanged, only these two are not."""
    _, test = digits
    perfect = ByClass(of=FID(n=359, encoder=Pixels())).measure(subject_of())
    assert set(perfect) == {f"fid_pixels_of_{c}" for c in range(10)}
    assert all(m.value == pytest.approx(0, abs=1e-6) for m in perfect.values())
    assert ByClass(of=FID(encoder=Pixels())).keys == ("fid_pixels_of_",) != ByClass(of=Accuracy()).keys
    assert ByClass(of=Accuracy(), attribute="sex").keys == ("accuracy_of_sex=",)
    exchanged = test.labels.clone()
    exchanged[test.labels == 3], exchanged[test.labels == 8] = 8, 3
    found = ByClass(of=FID(n=359, encoder=Pixels())).measure(subject_of(test.floats(test.images), exchanged))
    wrong = {key for key, m in found.items() if m.value > 0.01}
    assert wrong == {"fid_pixels_of_3", "fid_pixels_of_8"}
    protocol = found["fid_pixels_of_3"].protocol
    assert protocol["subgroup"] == "3"
    assert protocol["test images"] == int((test.labels == 3).sum())
    assert protocol["generated"] == int((exchanged == 3).sum())


def test_accuracy_of_each_class(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """A classifier that always answers 4 is right on all fours and on nothing else."""
    subject = subject_of(predict=lambda x: torch.eye(10)[[4] * len(x)])
    found = ByClass(of=Accuracy()).measure(subject)
    assert {key: m.value for key, m in found.items()} == {f"accuracy_of_{c}": float(c == 4) for c in range(10)}


def test_classes_are_joined_by_an_attribute() -> None:
    assert subgroups(NAMES, "sex") == {"sex=F": [0, 1], "sex=M": [2, 3]}
    assert subgroups(NAMES, "age") == {"age=40": [0, 2], "age=60": [1, 3]}
    assert subgroups(("a", "b"), None) == {"a": [0], "b": [1]}
    with pytest.raises(RecipeError, match="no class name holds 'scanner=VALUE'"):
        subgroups(NAMES, "scanner")


def test_a_subgroup_pools_its_classes(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """Zeros and ones as women, twos and threes as men: each subgroup has the images of both of its classes."""
    train, test = (dataclasses.replace(d.rows((d.labels < 4).nonzero()[:, 0]), classes=NAMES) for d in digits)
    subject = subject_of(test.floats(test.images), test.labels, train=train, test=test)
    found = ByClass(of=FID(n=len(test), encoder=Pixels()), attribute="sex").measure(subject)
    assert found["fid_pixels_of_sex=F"].protocol["test images"] == int((test.labels < 2).sum())
    assert found["fid_pixels_of_sex=M"].value == pytest.approx(0, abs=1e-6)


def test_encoders_are_not_trained_on_a_class_alone(subject_of: SubjectOf) -> None:
    """The classifier knows all classes: it is right on each, as one that knew one class only could not be told to be."""
    whole = ConditionalAccuracy(n=359).measure(subject_of())["conditional_accuracy"]
    each = ByClass(of=ConditionalAccuracy(n=359)).measure(subject_of())
    assert {m.protocol["weights"] for m in each.values()} == {whole.protocol["weights"]}
    counts = [int(m.protocol["generated"]) for m in each.values()]  # type: ignore[arg-type]
    mean = sum(m.value * n for m, n in zip(each.values(), counts)) / sum(counts)
    assert mean == pytest.approx(whole.value)


def test_refusals(subject_of: SubjectOf) -> None:
    with pytest.raises(RecipeError, match="split=test"):
        build_text("by_class(fid(split=train))", Metric, "metric")
    blind = Outlook(classifies=False, conditional=False, classes=10, real={"train": 10, "test": 10})
    with pytest.raises(RecipeError, match="class-conditional"):
        ByClass(of=FID(n=10, encoder=Pixels())).ready(blind)
    subject = subject_of()
    few = subject_of(subject.samples(359).pixels[:11], torch.tensor([*range(10), 0]))
    with pytest.raises(RecipeError, match="1 of 11 samples are of '1'; raise n"):
        ByClass(of=FID(n=11, encoder=Pixels())).measure(few)
