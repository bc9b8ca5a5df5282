"""Linear probes: how well a linear classifier tells the classes from frozen features."""

from typing import Any, Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from effuse.core.data import Dataset
from effuse.core.errors import DataError, RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.encoders import reference_rows

Kind = Literal["ridge", "logistic"]
BATCH = 500
STEPS = 500  # the most iterations of a logistic regression


class Moments(NamedTuple):
    """Means over images, from which ridge regression follows: x x', the one-hot label times x, and the one-hot label."""

    second: Tensor  # d x d
    cross: Tensor  # classes x d
    shares: Tensor  # classes


class Head(NamedTuple):
    """A linear classifier."""

    weight: Tensor  # classes x d
    bias: Tensor  # classes

    def right(self, features: Tensor, labels: Tensor) -> float:
        """The share of images whose class has the highest score."""
        scores = features.double() @ self.weight.T + self.bias
        return float((scores.argmax(dim=1).cpu() == labels.cpu()).double().mean())


def moments(features: Tensor, labels: Tensor, classes: int) -> Moments:
    """The moments of features, N x d, in fp64."""
    x = features.double()
    y = torch.nn.functional.one_hot(labels.to(x.device), classes).double()
    return Moments(x.T @ x / len(x), y.T @ x / len(x), y.mean(0))


def ridge(m: Moments, penalty: float) -> Head:
    """Ridge regression of one-hot labels on standardised features, with an intercept.

    With s_i^2 the variances: (corr(x) + penalty I) W' = cov(x / s, y), and the bias makes the mean score a class's share.
    """
    mean = m.cross.sum(0)
    covariance = m.second - torch.outer(mean, mean)
    variance = covariance.diagonal()
    # a feature without variance has rounding errors only
    s = torch.where(variance > 1e-12 * m.second.diagonal(), variance, torch.ones_like(variance)).sqrt()
    left = covariance / torch.outer(s, s) + penalty * torch.eye(len(s), dtype=s.dtype, device=s.device)
    right = (m.cross - torch.outer(m.shares, mean)) / s
    weight = torch.linalg.solve(left, right.T).T / s
    return Head(weight, m.shares - weight @ mean)


def logistic(features: Tensor, labels: Tensor, classes: int, penalty: float) -> Head:
    """Logistic regression on standardised features: mean cross-entropy + penalty / 2 |W|^2, by L-BFGS."""
    from sklearn.linear_model import LogisticRegression

    x = features.double().cpu()
    mean, s = x.mean(0), x.std(0, correction=0)
    s = torch.where(s > 1e-9, s, torch.ones_like(s))
    known = labels.unique().tolist()
    if len(known) < 2:
        raise DataError("linear_probe: all training images have one class; logistic regression needs two")
    model: Any = LogisticRegression(C=1 / (penalty * len(x)), max_iter=STEPS, tol=1e-5)
    model.fit(((x - mean) / s).numpy(), labels.cpu().numpy())
    rows, offsets = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    if len(known) == 2:  # one row of scores for the second class
        rows, offsets = torch.cat([-rows, rows]) / 2, torch.cat([-offsets, offsets]) / 2
    weight, bias = torch.zeros(classes, x.shape[1], dtype=x.dtype), torch.full((classes,), -torch.inf, dtype=x.dtype)
    weight[known], bias[known] = rows / s, offsets - (rows / s) @ mean  # a class without images is never chosen
    return Head(weight.to(features.device), bias.to(features.device))


def probe(features: Tensor, labels: Tensor, classes: int, kind: Kind, penalty: float) -> Head:
    """The linear classifier of that kind."""
    if kind == "ridge":
        return ridge(moments(features, labels, classes), penalty)
    return logistic(features, labels, classes, penalty)


@spec
class LinearProbe(Metric):
    """The accuracy of a linear classifier on the model's frozen features. Training images train it, the test set judges."""

    kind: Kind = "ridge"
    penalty: PositiveFloat = 1e-3
    images: PositiveInt | None = None  # training images that train it, chosen at random; None: all

    def ready(self, outlook: Outlook) -> None:
        if not outlook.featured:
            raise _no_features()
        if (self.images or 0) > outlook.real["train"]:
            raise RecipeError(f"linear_probe: images={self.images}, but there are {outlook.real['train']}; lower it")

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        rows = reference_rows(subject, "train", self.images)
        train, test = subject.train.rows(rows), subject.test
        classes = len(train.classes)
        head = probe(features_of(subject, train), train.labels, classes, self.kind, self.penalty)
        protocol: Protocol = {
            "probe": self.kind,
            "penalty": self.penalty,
            "trained_on": len(train),
            "split": "test",
            "images": len(test),
            "data": subject.data,
        }
        return {"linear_probe": Measurement(head.right(features_of(subject, test), test.labels), protocol)}


def features_of(subject: Subject, data: Dataset) -> Tensor:
    """The model's features of these images, as they are stored: not mirrored."""
    if subject.features is None:
        raise _no_features()
    return torch.cat([subject.features(data.floats(some.to(subject.device))) for some in data.images.split(BATCH)])


def _no_features() -> RecipeError:
    return RecipeError("linear_probe: this model gives no features of an image; use a resnet(...), or run `effuse probe`")
