"""Accuracy by class and by domain, by hand."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.metric import Outlook, Subject
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.class_accuracy import ClassAccuracy, DomainAccuracy

SubjectOf = Callable[..., Subject]
# four dark, two light and no grey image; the predictor takes the pixel for the class
PIXELS = torch.tensor([0, 0, 0, 255, 255, 255], dtype=torch.uint8).reshape(6, 1, 1, 1)
TEST = Dataset(PIXELS, torch.tensor([0, 0, 0, 0, 1, 1]), ("dark", "light", "grey"))


def predict(x: torch.Tensor) -> torch.Tensor:
    light = (x.flatten(1)[:, 0] > 0).long()
    return torch.nn.functional.one_hot(light, 3).float()


def test_by_class(subject_of: SubjectOf) -> None:
    """Dark: 3 of 4. Light: 2 of 2. The mean is 0.875, though 5 of 6 images are right. Grey has no image."""
    found = ClassAccuracy().measure(subject_of(test=TEST, predict=predict))
    assert {k: m.value for k, m in found.items()} == {"class_accuracy": 0.875, "class_accuracy_lowest": 0.75}
    assert found["class_accuracy"].protocol["accuracies"] == "dark 0.7500, light 1.0000"
    assert found["class_accuracy"].protocol["classes"] == 2
    assert tuple(found) == ClassAccuracy().keys


def test_by_domain(subject_of: SubjectOf) -> None:
    """The first domain has images 0, 1 and 3: 2 of 3 right. The second has the others: all right. Mean 5/6."""
    test = dataclasses.replace(TEST, domains=torch.tensor([0, 0, 1, 0, 1, 1]))
    metric = DomainAccuracy(names=("photo", "drawing"))
    found = metric.measure(subject_of(test=test, predict=predict))
    values = {k: m.value for k, m in found.items()}
    assert values == pytest.approx({"domain_accuracy": 5 / 6, "accuracy_photo": 2 / 3, "accuracy_drawing": 1.0})
    assert tuple(found) == metric.keys
    with pytest.raises(RecipeError, match="1 names for 2 domains"):
        DomainAccuracy(names=("photo",)).measure(subject_of(test=test, predict=predict))
    with pytest.raises(RecipeError, match="2 names for 0 domains"):
        metric.measure(subject_of(test=TEST, predict=predict))


@pytest.mark.parametrize("metric", [Accuracy(), ClassAccuracy(), DomainAccuracy()])
def test_only_of_classifiers(subject_of: SubjectOf, metric) -> None:
    with pytest.raises(RecipeError, match=f"^{metric.name}: this model does not classify"):
        metric.measure(subject_of())
    with pytest.raises(RecipeError, match=f"^{metric.name}: this model does not classify"):
        metric.ready(Outlook(classifies=False, conditional=True, classes=3, real={"train": 1, "test": 1}))
