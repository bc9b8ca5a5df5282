"""Broken images: samples that a classifier of real images is less sure of than of nearly every real one."""

from typing import Annotated

from pydantic import Field, PositiveInt
from torch import Tensor

from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.accuracy import accuracy_warning, share_right
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Encoder, generated, reference


@spec
class Unclear(Metric):
    """The share of samples below the certainty that all but `share` of the real test images have."""

    n: PositiveInt = 1000
    share: Annotated[float, Field(gt=0, lt=1)] = 0.01  # of real images, which would therefore have this value
    encoder: Encoder = Classifier()

    def __post_init__(self) -> None:
        if not self.encoder.has_head:
            raise ValueError(f"unclear needs class scores, {self.encoder} gives none; use encoder=classifier()")

    def ready(self, outlook: Outlook) -> None:
        self.encoder.ready()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        logits = reference(subject, self.encoder, "test").logits
        own = share_right(logits, subject.test.labels)
        least = float(certainty(logits).quantile(self.share))
        found = certainty(generated(subject, self.encoder, self.n).logits)
        protocol: Protocol = {
            **self.encoder.protocol(subject),
            "classifier_accuracy": own,
            "certainty": least,
            "real_share": self.share,
            "generated": self.n,
            "reference": len(subject.test),
            "split": "test",
            "data": subject.data,
        }
        return {"unclear": Measurement(float((found < least).double().mean()), protocol, accuracy_warning(own))}


def certainty(logits: Tensor | None) -> Tensor:
    """The log-odds of each image's most likely class; its probability would round to 1."""
    assert logits is not None  # the encoder has a head
    best, rest = logits.double().sort(dim=1, descending=True).values.split([1, logits.shape[1] - 1], dim=1)
    return best[:, 0] - rest.logsumexp(dim=1)
