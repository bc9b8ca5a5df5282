"""Linear probes: ridge regression by hand, from moments of any division, and logistic regression."""

from collections.abc import Callable

import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.errors import DataError, RecipeError
from effuse.core.metric import Outlook, Subject
from effuse.metrics.linear_probe import LinearProbe, Moments, logistic, moments, probe, ridge

SubjectOf = Callable[..., Subject]


def test_ridge_by_hand() -> None:
    """x = 1 (class 0), 3 (class 1): mean 2, variance 1. cov(x, y_1) = (0.5 * 3) - 0.5 * 2 = 0.5, and -0.5 for class 0.

    Penalty 1: w = 0.5 / (1 + 1) = 0.25, bias 0.5 - 0.25 * 2 = 0 for class 1; for class 0 -0.25 and 1.
    """
    m = moments(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]), 2)
    assert m.second.tolist() == [[5.0]] and m.cross.tolist() == [[0.5], [1.5]] and m.shares.tolist() == [0.5, 0.5]
    head = ridge(m, 1.0)
    assert head.weight.tolist() == [[-0.25], [0.25]] and head.bias.tolist() == [1.0, 0.0]
    assert head.right(torch.tensor([[1.0], [3.0], [1.9]]), torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)


def test_ridge_does_not_depend_on_the_features_scale() -> None:
    """Ten times the feature: a tenth of the weight, 0.025, and the same scores."""
    head = ridge(moments(torch.tensor([[10.0], [30.0]]), torch.tensor([0, 1]), 2), 1.0)
    assert head.weight[1].item() == pytest.approx(0.025) and head.bias[1].item() == pytest.approx(0.0, abs=1e-12)


def test_a_constant_feature_gets_no_weight() -> None:
    x = torch.tensor([[1.0, 0.1], [3.0, 0.1]])
    head = ridge(moments(x, torch.tensor([0, 1]), 2), 1.0)
    assert head.weight[:, 1].abs().max() < 1e-12 and head.weight[1, 0].item() == pytest.approx(0.25)


def test_weighted_means_of_moments_are_those_of_all_images(digits: tuple[Dataset, Dataset]) -> None:
    """3 clients sorted by class, 400 + 500 + 538 images: the pooled head, to rounding."""
    train, test = digits
    order = train.labels.argsort(stable=True)
    x, labels = train.images.flatten(1).float()[order], train.labels[order]
    parts = zip(x.split([400, 500, 538]), labels.split([400, 500, 538]))
    told = [(len(a), moments(a, b, 10)) for a, b in parts]
    mean = Moments(*(sum(n * m[i] for n, m in told) / 1438 for i in range(3)))
    whole = ridge(moments(x, labels, 10), 1e-3)
    torch.testing.assert_close(ridge(mean, 1e-3), whole, rtol=1e-9, atol=1e-9)
    assert whole.right(test.images.flatten(1).float(), test.labels) > 0.9


def test_logistic_is_at_the_minimum_of_its_loss(digits: tuple[Dataset, Dataset]) -> None:
    """The gradient of mean cross-entropy + penalty / 2 |W|^2 is nought, with autograd as the oracle."""
    train, test = digits
    x, labels = train.images.flatten(1)[:300, 20:30].double(), train.labels[:300]
    s = x.std(0, correction=0)
    head = logistic(x, labels, 10, 0.1)
    W, b = (head.weight * s).requires_grad_(), (head.bias + head.weight @ x.mean(0)).requires_grad_()
    loss = torch.nn.functional.cross_entropy((x - x.mean(0)) / s @ W.T + b, labels) + 0.05 * W.square().sum()
    for gradient in torch.autograd.grad(loss, (W, b)):
        assert gradient.abs().max() < 1e-3
    assert torch.autograd.grad(torch.nn.functional.cross_entropy((x - x.mean(0)) / s @ W.T + b, labels), W)[0].norm() > 1e-2


def test_logistic_of_two_of_three_classes() -> None:
    """A class without images is never chosen; between the others the threshold lies in the middle, at 2."""
    x, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 2])
    head = logistic(x, labels, 3, 0.01)
    assert head.right(torch.tensor([[1.9], [2.1], [-9.0]]), torch.tensor([0, 2, 0])) == 1.0
    with pytest.raises(DataError, match="needs two"):
        logistic(x, torch.tensor([1, 1]), 3, 0.01)


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_the_metric_trains_on_training_images_and_judges_on_the_test_set(
    subject_of: SubjectOf, digits: tuple[Dataset, Dataset], kind
) -> None:
    train, test = digits
    subject = subject_of(features=lambda x: x.flatten(1))
    measured = LinearProbe(kind=kind, penalty=0.01, images=500).measure(subject)["linear_probe"]
    assert 0.85 < measured.value < 1.0
    assert measured.protocol == {
        "probe": kind,
        "penalty": 0.01,
        "trained_on": 500,
        "split": "test",
        "images": len(test),
        "data": "digits()",
    }
    swapped = subject_of(features=lambda x: x.flatten(1), test=train)
    assert LinearProbe(kind=kind).measure(swapped)["linear_probe"].protocol["images"] == len(train)
    head = probe(train.floats(train.images).flatten(1), train.labels, 10, "ridge", 1e-3)
    whole = LinearProbe().measure(subject)["linear_probe"]
    assert whole.value == head.right(test.floats(test.images).flatten(1), test.labels)


def test_networks_without_features_are_refused(subject_of: SubjectOf) -> None:
    with pytest.raises(RecipeError, match="gives no features of an image"):
        LinearProbe().measure(subject_of())
    outlook = Outlook(classifies=True, conditional=False, classes=2, real={"train": 9, "test": 9})
    with pytest.raises(RecipeError, match="gives no features of an image"):
        LinearProbe().ready(outlook)
    featured = Outlook(classifies=True, conditional=False, classes=2, real={"train": 9, "test": 9}, featured=True)
    LinearProbe(images=9).ready(featured)
    with pytest.raises(RecipeError, match="images=10, but there are 9"):
        LinearProbe(images=10).ready(featured)
