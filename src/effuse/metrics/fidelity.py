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
from effuse.metrics.store import cached, once

AtLeastTwo = Annotated[int, Field(ge=2)]


@spec
class Fidelity(Metric, ABC):
    """A comparison of generated with real images in an encoder's features."""

    n: AtLeastTwo = 5000  # generated images
    encoder: Encoder = Inception()
    split: Split = "test"  # where the real images come from
    reference: AtLeastTwo | None = None  # the number of real images; None for all
    skip: NonNegativeInt = 0  # real images left out, in a fixed random order: for instance those that tuning used
    clipped: bool = False  # store images as FedDiffuse does, with values below mid-grey black

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key(self.name),)

    def ready(self, outlook: Outlook) -> None:
        if self._fitting(outlook) is not self:
            split = f"the {self.split} split has {outlook.real[self.split]} images"
            wanted = f"skip={self.skip} and reference={self.reference}" if self.skip else f"reference={self.reference}"
            listed = outlook.metrics or (self,)  # `--set` replaces the whole list, so the remedy names all metrics
            fitting = ", ".join(str(m._fitting(outlook) if isinstance(m, Fidelity) else m) for m in listed).replace("'", '"')
            lower = f"lower {'either' if self.skip else 'it'}: --set 'evaluate.metrics=[{fitting}]'"
            raise RecipeError(f"{self.name}: {wanted}, but {split}; {lower}")
        self.encoder.ready()

    def _fitting(self, outlook: Outlook) -> "Fidelity":
        """This metric with no more real images than the split has."""
        available = outlook.real[self.split] - self.skip
        if (self.reference or min(self.skip, 2)) <= available:
            return self
        return dataclasses.replace(self, **({"reference": available} if available >= 2 else {"reference": None, "skip": 0}))

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        # float64 products of 2048 dimensions take minutes on two CPU threads, so they run on the networks' device
        drawn = generated(subject, self.encoder, self.n, self.clipped).features.to(subject.device)
        count = len(reference_rows(subject, self.split, self.reference, self.skip))
        return self.compare(drawn, self.protocol(subject) | {"features": drawn.shape[1], "reference": count}, subject)

    @abstractmethod
    def compare(self, drawn: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        """The numbers, given the features of generated images."""

    def real_features(self, subject: Subject) -> Tensor:
        """The features of real images."""
        found = reference(subject, self.encoder, self.split, self.reference, self.clipped, self.skip)
        return found.features.to(subject.device)

    def key(self, name: str) -> str:
        """The number's name, with a suffix where it is not comparable with the usual one."""
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

    def compare(self, drawn: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        value = distances.frechet(distances.moments(drawn), self._real_moments(subject))
        reference = protocol["reference"]
        assert isinstance(reference, int)  # the number of real images
        fewest, dim = min(len(drawn), reference), drawn.shape[1]
        warning = None
        if fewest <= dim:
            warning = f"{fewest} samples for {dim} dimensions: the covariance is singular and the distance too large"
        return {self.key("fid"): Measurement(value, protocol, warning)}

    def _real_moments(self, subject: Subject) -> distances.Moments:
        # cached moments save computing or reading the features of up to 50,000 images
        key = reference_key(subject, self.encoder, self.split, self.reference, self.clipped, self.skip)

        def compute() -> dict[str, Tensor]:
            return distances.moments(self.real_features(subject))._asdict()

        held = once(subject, ("moments", *key), lambda: cached(subject.cache, "moments", key, compute))
        return distances.Moments(held["mean"].to(subject.device), held["covariance"].to(subject.device))


@spec
class RealFID(FID, name="fid_real"):
    """The FID of `n` real images of the other split: what a model would have that draws as the data does."""

    @property
    def samples(self) -> int:
        return 0

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        drawn = reference(subject, self.encoder, self._other, self.n, self.clipped).features.to(subject.device)
        count = len(reference_rows(subject, self.split, self.reference, self.skip))
        return self.compare(drawn, self.protocol(subject) | {"features": drawn.shape[1], "reference": count}, subject)

    def compare(self, drawn: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        ((_, found),) = super().compare(drawn, protocol, subject).items()
        return {self.key(self.name): found}

    def ready(self, outlook: Outlook) -> None:
        super().ready(outlook)
        if self.n > (available := outlook.real[self._other]):
            raise RecipeError(f"fid_real: n={self.n}, but the {self._other} split has {available} images; lower n")

    def protocol(self, subject: Subject) -> Protocol:
        own = super().protocol(subject)
        return own | {"generated": 0, "real": self.n, "of": self._other}

    @property
    def _other(self) -> Split:
        return "test" if self.split == "train" else "train"


@spec
class KID(Fidelity, name="kid"):
    """Unbiased squared MMD under a cubic kernel (Bińkowski et al., 2018), over all pairs instead of random subsets."""

    def compare(self, drawn: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        value = distances.kernel_distance(drawn, self.real_features(subject))
        return {self.key("kid"): Measurement(value, protocol)}


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

    def compare(self, drawn: Tensor, protocol: Protocol, subject: Subject) -> dict[str, Measurement]:
        real = self.real_features(subject)
        self._require_neighbours(len(real))
        precision, recall = distances.precision_recall(drawn, real, self.k)
        protocol = protocol | {"k": self.k}
        return {self.key("precision"): Measurement(precision, protocol), self.key("recall"): Measurement(recall, protocol)}


@spec
class InceptionScore(Metric):
    """Inception Score (Salimans et al., 2016): high if every image has one clear class and the classes are even."""

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
