"""The fidelity metrics: names, protocols, warnings and refusals."""

from collections.abc import Callable

import pytest
import torch

from effuse.core.build import build_text
from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.metric import Metric, Outlook, Subject
from effuse.metrics.classifier import Classifier
from effuse.metrics.fidelity import FID, KID, InceptionScore, PrecisionRecall, RealFID

SubjectOf = Callable[..., Subject]


def test_real_images_are_close_to_real_ones_and_noise_is_not(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    train, _ = digits
    noise = torch.rand(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    real, far = subject_of(train.floats(train.images[:500])), subject_of(noise)
    for metric in (FID(n=500, encoder=Classifier()), KID(n=500, encoder=Classifier())):
        ((key, near),) = metric.measure(real).items()
        assert key == f"{metric.name}_classifier"
        assert metric.measure(far)[key].value > 5 * abs(near.value)  # an unbiased estimate may lie below zero


def test_the_reference_itself_is_perfect(subject_of: SubjectOf) -> None:
    subject = subject_of()
    for clipped, key in ((False, "fid_classifier"), (True, "fid_classifier_clipped")):  # generated and real images alike
        found = FID(n=359, encoder=Classifier(), clipped=clipped).measure(subject)
        assert found[key].value == pytest.approx(0.0, abs=1e-3)
    found = PrecisionRecall(n=359, encoder=Classifier()).measure(subject)
    assert {k: m.value for k, m in found.items()} == {"precision_classifier": 1.0, "recall_classifier": 1.0}
    score = InceptionScore(n=359, splits=1).measure(subject)["inception_score_classifier"]
    assert 8.0 < score.value <= 10.0


def test_the_fid_of_real_images_needs_no_samples(subject_of: SubjectOf, digits: tuple[Dataset, Dataset]) -> None:
    """It is the FID of a model that draws the other split: here 359 test digits against the training set."""
    _, test = digits
    metric = RealFID(n=359, encoder=Classifier(), split="train")
    found = metric.measure(subject_of(torch.zeros(1, 1, 8, 8)))["fid_real_classifier"]
    drawn = FID(n=359, encoder=Classifier(), split="train").measure(subject_of(test.floats(test.images)))["fid_classifier"]
    assert found.value == pytest.approx(drawn.value, rel=1e-6)
    assert metric.samples == 0
    assert {k: found.protocol[k] for k in ("generated", "real", "of", "split", "reference")} == {
        "generated": 0,
        "real": 359,
        "of": "test",
        "split": "train",
        "reference": 1438,
    }
    outlook = Outlook(classifies=False, conditional=False, classes=10, real={"train": 1438, "test": 359})
    metric.ready(outlook)
    with pytest.raises(RecipeError, match="n=360, but the test split has 359 images; lower n"):
        RealFID(n=360, encoder=Classifier(), split="train").ready(outlook)


def test_protocol_of_a_fid(subject_of: SubjectOf) -> None:
    measured = FID(n=100, encoder=Classifier(), reference=200, skip=100, clipped=True).measure(subject_of())
    protocol = measured["fid_classifier_clipped"].protocol
    assert len(str(protocol.pop("weights"))) == 16
    assert protocol == {
        "encoder": "classifier(width=32, steps=200, epochs=3, seed=0)",
        "preprocessing": "uint8, [-1, 1]",
        "clipped": True,
        "features": 64,
        "generated": 100,
        "reference": 200,
        "split": "test",
        "skipped": 100,
        "data": "digits()",
    }
    assert measured["fid_classifier_clipped"].warning is None


def test_images_that_another_number_has_used_can_be_skipped(subject_of: SubjectOf) -> None:
    """Two numbers with 150 real images each have different references, and separate cached features."""
    subject = subject_of()
    seen, unseen = (FID(n=300, encoder=Classifier(), reference=150, skip=skip) for skip in (0, 150))
    values = [metric.measure(subject)["fid_classifier"].value for metric in (seen, unseen, seen)]
    assert values[0] == values[2] != values[1]
    outlook = Outlook(classifies=False, conditional=False, classes=10, real={"train": 1438, "test": 359})
    FID(encoder=Classifier(), reference=150, skip=209).ready(outlook)
    with pytest.raises(
        RecipeError, match="skip=210 and reference=150, but the test split has 359 images; lower either: --set"
    ):
        FID(encoder=Classifier(), reference=150, skip=210).ready(outlook)
    with pytest.raises(RecipeError, match="skip=358 and reference=None, but the test split has 359 images"):
        FID(encoder=Classifier(), skip=358).ready(outlook)


def test_too_few_samples_are_a_warning(subject_of: SubjectOf) -> None:
    measured = FID(n=64, encoder=Classifier()).measure(subject_of())["fid_classifier"]
    assert measured.warning is not None
    assert measured.warning.startswith("64 samples for 64 dimensions")
    assert measured.value >= 0


def test_names_of_the_usual_numbers() -> None:
    assert FID().key("fid") == "fid"
    assert FID(clipped=True).key("fid") == "fid_clipped"
    assert PrecisionRecall().key("recall") == "recall"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("inception_score(encoder=inception())", "inception.. gives none; use encoder=classifier"),
        ("conditional_accuracy(encoder=inception())", "inception.. gives none; use encoder=classifier"),
        ("inception_score(n=5)", "cannot split 5 images into 10 parts"),
        ("fid(n=1)", "greater than or equal to 2"),
        ("fid(split='valid')", "'train' or 'test'"),
        ("fed()", "no metric 'fed'; did you mean fid"),
    ],
)
def test_refusals(source: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        build_text(source, Metric, "evaluate")


def test_too_few_images_for_neighbours(subject_of: SubjectOf) -> None:
    with pytest.raises(RecipeError, match="3 images have no 3 neighbours each"):
        PrecisionRecall(n=3, encoder=Classifier()).measure(subject_of())
