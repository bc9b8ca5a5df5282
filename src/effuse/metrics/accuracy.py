"""Accuracy: of a trained classifier on real images, and of generated images under a classifier trained on real ones."""

from pydantic import PositiveInt
from torch import Tensor

from effuse.core.data import Split
from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Encoder, generated, reference

BATCH = 500
TRUSTED = 0.95  # a classifier below this accuracy on real images causes a warning


@spec
class Accuracy(Metric):
    """The share of real images that the model under test assigns to their class."""

    split: Split = "test"

    @property
    def predicts(self) -> bool:
        return self.split == "test"

    def ready(self, outlook: Outlook) -> None:
        if not outlook.classifies:
            raise _no_classifier()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        if subject.predict is None:
            raise _no_classifier()
        dataset = subject.real(self.split)
        right = 0
        for images, labels in zip(dataset.images.split(BATCH), dataset.labels.split(BATCH)):
            logits = subject.predict(dataset.floats(images.to(subject.device)))
            right += int((logits.argmax(dim=1).cpu() == labels.cpu()).sum())
        protocol: Protocol = {"split": self.split, "images": len(dataset), "data": subject.data}
        return {"accuracy": Measurement(right / len(dataset), protocol)}


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
    return float((logits.argmax(dim=1) == labels.cpu()).double().mean())


def accuracy_warning(accuracy: float) -> str | None:
    """A warning if the classifier's accuracy on real images is too low to judge generated ones."""
    return None if accuracy >= TRUSTED else f"the classifier itself is right on {accuracy:.1%} of held-out real images only"


def _no_classifier() -> RecipeError:
    return RecipeError("accuracy: this model does not classify; train it with task=classify(), or measure fid")
