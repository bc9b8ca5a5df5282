"""Accuracy: of a trained classifier on real images, and of generated images under a classifier trained on real ones."""

from abc import ABC

import torch
from pydantic import PositiveInt
from torch import Tensor

from effuse.core.data import Dataset, Split
from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Encoder, generated, reference

BATCH = 500
TRUSTED = 0.95  # a classifier below this accuracy on real images causes a warning


@spec
class Predictive(Metric, ABC):
    """A metric of the classes that the model under test predicts for real images."""

    def ready(self, outlook: Outlook) -> None:
        if not outlook.classifies:
            raise self._no_classifier()

    def right(self, subject: Subject, dataset: Dataset) -> Tensor:
        """For each image, whether the model assigns it to its class."""
        if subject.predict is None:
            raise self._no_classifier()
        scores = (subject.predict(dataset.floats(x.to(subject.device))) for x in dataset.images.split(BATCH))
        return torch.cat([own.argmax(dim=1).cpu() for own in scores]) == dataset.labels.cpu()

    def _no_classifier(self) -> RecipeError:
        return RecipeError(f"{self.name}: this model does not classify; train it with task=classify(), or measure fid")


@spec
class Accuracy(Predictive):
    """The share of real images that the model under test assigns to their class."""

    split: Split = "test"

    @property
    def predicts(self) -> bool:
        return self.split == "test"

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        dataset = subject.real(self.split)
        protocol: Protocol = {"split": self.split, "images": len(dataset), "data": subject.data}
        return {"accuracy": Measurement(share(self.right(subject, dataset)), protocol)}


@spec
class ConditionalAccuracy(Metric):
    """The share of conditional samples that a classifier trained on real images assigns to their label."""

    n: PositiveInt = 500
    encoder: Encoder = Classifier()

    def __post_init__(self) -> None:
        if not self.encoder.has_head:
            raise ValueError(f"conditional_accuracy needs class scores, {self.encoder} gives none; use encoder=classifier()")

    def ready(self, outlook: Outlook) -> None:
        require_labels(self, outlook.conditional)
        self.encoder.ready()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        labels = subject.samples(self.n).labels
        require_labels(self, labels is not None)
        assert labels is not None
        value = share_right(generated(subject, self.encoder, self.n).logits, labels)
        own = share_right(reference(subject, self.encoder, "test").logits, subject.test.labels)
        protocol: Protocol = {
            **self.encoder.protocol(subject),
            "classifier_accuracy": own,  # on held-out real images
            "reference": len(subject.test),
            "split": "test",
            "generated": self.n,
            "data": subject.data,
        }
        return {"conditional_accuracy": Measurement(value, protocol, accuracy_warning(own))}


def require_labels(metric: Metric, labelled: bool) -> None:
    """Refuse samples without labels."""
    if not labelled:
        raise RecipeError(f"{metric.name}: the samples have no labels; use a class-conditional model")


def share_right(logits: Tensor | None, labels: Tensor) -> float:
    """The share of images that their scores assign to their class."""
    assert logits is not None  # the encoder has a head
    return share(logits.argmax(dim=1) == labels.cpu())


def share(right: Tensor) -> float:
    """The share of images that are right."""
    return float(right.double().mean())


def accuracy_warning(accuracy: float) -> str | None:
    """A warning if the classifier's accuracy on real images is too low to judge generated ones."""
    return None if accuracy >= TRUSTED else f"the classifier itself is right on {accuracy:.1%} of held-out real images only"
