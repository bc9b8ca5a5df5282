"""How close generated images are to real ones: FID, KID, improved precision and recall, Inception Score."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.core.data import Split
from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics import distances
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Encoder, Inception, generated, reference, reference_key, reference_rows
from effuse.metrics.store import kept, once

AtLeastTwo = Annotated[int, Field(ge=2)]


@spec
class Fidelity(Metric, ABC):
    """A comparison of generated with real images in an encoder's features."""

    n: AtLeastTwo = 5000  # generated images
    encoder: Encoder = Inception()
    split: Split = "test"  # where the real images come from
    reference: AtLeastTwo | None = None  # how many of them; None for all
    skip: NonNegativeInt = 0  # so many of them first, in their fixed random order: those that another figure has seen
    clipped: bool = False  # write images as FedDiffuse does, all below mid-grey black

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key(self.name),)

    def ready(self, outlook: Outlook) -> None:
        if self._fitting(outlook) is not self:
            split = f"the {self.split} split has {outlook.real[self.split]} images"
            wanted = f"skip={self.skip} and reference={self.reference}" if self.skip else f"reference={self.reference}"
            listed = outlook.metrics or (self,)  # the key is set as a whole, so all of them are named
            fitting = ", ".join(str(m._fitting(outlook) if isinstance(m, Fidelity) else m) for m in listed).replace("'", '"')
            lower = f"lower {'either' if self.skip else 'it'}: --set 'evaluate.metrics=[{fitting}]'"
            raise RecipeError(f"{self.name}: {wanted}, but {split}; {lower}")
        self.encoder.ready()

    def _fitting(self, outlook: Outlook) -> "Fidelity":
        """This metric with no more real images than there are."""
        there = outlook.real[self.split] - self.skip
        if (self.reference or min(self.skip, 2)) <= there:
            return self
        return dataclasses.replace(self, **({"reference": there} if there >= 2 else {"reference": None, "skip": 0}))

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        # where the networks are: in float64, a GPU is done in a fraction of a second, and two threads of a CPU in minutes
        made = generated(subject, self.encoder, self.n, self.clipped).features.to(subject.device)
        there = len(reference_rows(subject, self.split, self.reference, self.skip))
        return self.compare(made, self.protocol(subject) | {"features": made.shape[1], "reference": there}, subject)

    @abstractmethod
    def compare(self, made: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        """The numbers, given the features of generated images."""

    def real(self, subject: Subject) -> Tensor:
        """The features of real images."""
        found = reference(subject, self.encoder, self.split, self.reference, self.clipped, self.skip)
        return found.features.to(subject.device)

    def key(self, name: str) -> str:
        """The number's name, which tells what makes it incomparable with the usual one."""
        encoder = "" if isinstance(self.encoder, Inception) else f"_{self.encoder.name}"
        return name + encoder + ("_clipped" if self.clipped else "")

    def protocol(self, subject: Subject) -> Protocol:
        return {
            **self.encoder.protocol(subject),
            "clipped": self.clipped,
            "generated": self.n,
            "split": self.split,
            "skipped": self.skip,
            "data": subject.data,
        }


@spec
class FID(Fidelity, name="fid"):
    """Fréchet distance of the features' Gaussians (Heusel et al., 2017)."""

    def compare(self, made: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        value = distances.frechet(distances.moments(made), self._real_moments(subject))
        fewest, dim = min(len(made), int(protocol["reference"])), made.shape[1]  # type: ignore[arg-type]
        warning = None
        if fewest <= dim:
            warning = f"{fewest} samples for {dim} dimensions: the covariance is singular and the distance too large"
        return {self.key("fid"): Measurement(value, protocol, warning)}

    def _real_moments(self, subject: Subject) -> distances.Moments:
        # with these at hand, the features of 50,000 images need neither be computed nor read
        key = reference_key(subject, self.encoder, self.split, self.reference, self.clipped, self.skip)

        def compute() -> dict[str, Tensor]:
            return distances.moments(self.real(subject))._asdict()

        held = once(subject, ("moments", *key), lambda: kept(subject.cache, "moments", key, compute))
        return distances.Moments(held["mean"].to(subject.device), held["covariance"].to(subject.device))


@spec
class KID(Fidelity, name="kid"):
    """Unbiased squared MMD under a cubic kernel (Bińkowski et al., 2018), over all pairs instead of random subsets."""

    def compare(self, made: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        return {self.key("kid"): Measurement(distances.kernel_distance(made, self.real(subject)), protocol)}


@spec
class PrecisionRecall(Fidelity):
    """Improved precision and recall (Kynkäänniemi et al., 2019)."""

    k: PositiveInt = 3

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key("precision"), self.key("recall"))

    def ready(self, outlook: Outlook) -> None:
        super().ready(outlook)
        self._require_neighbours(self.reference or outlook.real[self.split] - self.skip)

    def _require_neighbours(self, real: int) -> None:
        fewest = min(self.n, real)
        if fewest <= self.k:
            raise RecipeError(f"precision_recall: {fewest} images have no {self.k} neighbours each; raise n or lower k")

    def compare(self, made: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        real = self.real(subject)
        self._require_neighbours(len(real))
        precision, recall = distances.precision_recall(made, real, self.k)
        protocol = protocol | {"k": self.k}
        return {self.key("precision"): Measurement(precision, protocol), self.key("recall"): Measurement(recall, protocol)}


@spec
class InceptionScore(Metric):
    """Inception Score (Salimans et al., 2016): images that are each of one class, and together of all."""

    n: AtLeastTwo = 5000
    encoder: Encoder = Classifier()
    splits: PositiveInt = 10  # the score is the mean over this many parts

    def __post_init__(self) -> None:
        if not self.encoder.has_head:
            raise ValueError(f"inception_score needs class scores and {self.encoder} gives none; use encoder=classifier()")
        if self.splits > self.n:
            raise ValueError(f"inception_score cannot split {self.n} images into {self.splits} parts; lower splits")

    @property
    def keys(self) -> tuple[str, ...]:
        return (f"inception_score_{self.encoder.name}",)

    def ready(self, outlook: Outlook) -> None:
        self.encoder.ready()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        logits = generated(subject, self.encoder, self.n).logits
        assert logits is not None  # the encoder has a head
        scores = distances.inception_scores(logits, self.splits)
        protocol: Protocol = {
            **self.encoder.protocol(subject),
            "classes": logits.shape[1],
            "generated": self.n,
            "splits": self.splits,
            "spread": float(scores.std(correction=0)),
            "data": subject.data,
        }
        return {self.keys[0]: Measurement(float(scores.mean()), protocol)}
