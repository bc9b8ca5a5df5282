"""The mix of classes: whether a model draws each class as often as the data has it."""

import math

from pydantic import PositiveInt
from torch import Tensor

from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.accuracy import accuracy_warning, share_right
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Encoder, generated, reference


@spec
class ClassMix(Metric):
    """The total variation distance of the classes that a classifier finds in samples and in real images."""

    n: PositiveInt = 1000
    encoder: Encoder = Classifier()

    def __post_init__(self) -> None:
        if not self.encoder.has_head:
            raise ValueError(f"class_mix needs class scores, {self.encoder} gives none; use encoder=classifier()")

    def ready(self, outlook: Outlook) -> None:
        self.encoder.ready()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        names, real = subject.test.classes, reference(subject, self.encoder, "test").logits
        drawn = _shares(generated(subject, self.encoder, self.n).logits, len(names))
        wanted = _shares(real, len(names))
        own = share_right(real, subject.test.labels)
        protocol: Protocol = {
            **self.encoder.protocol(subject),
            "classifier_accuracy": own,
            "by_chance": _by_chance(wanted, self.n),  # the expected value for as many real images
            "shares": _listed(names, drawn),
            "real_shares": _listed(names, wanted),
            "generated": self.n,
            "reference": len(subject.test),
            "split": "test",
            "data": subject.data,
        }
        value = sum(abs(p - q) for p, q in zip(drawn, wanted)) / 2
        return {"class_mix": Measurement(value, protocol, accuracy_warning(own))}


def _shares(logits: Tensor | None, classes: int) -> list[float]:
    assert logits is not None  # the encoder has a head
    return (logits.argmax(dim=1).bincount(minlength=classes).double() / len(logits)).tolist()


def _by_chance(shares: list[float], n: int) -> float:
    """Half the sum of the mean absolute deviations of n draws: sqrt(2 p (1 - p) / (pi n)) each."""
    return sum(math.sqrt(2 * p * (1 - p) / (math.pi * n)) for p in shares) / 2


def _listed(names: tuple[str, ...], shares: list[float]) -> str:
    return ", ".join(f"{name} {share:.3f}" for name, share in zip(names, shares))
