"""Encoders: networks that turn images into the features in which distances are measured."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from effuse.core.data import Split
from effuse.core.errors import DataError, MissingError, TrainingError
from effuse.core.metric import Protocol, Subject
from effuse.core.rng import Stream
from effuse.core.spec import Spec, spec, text
from effuse.metrics.store import Key, cached, once
from effuse.models import inception

SENT = 5000  # images in a transfer to the device, which waits for all work queued there


class Encoding(NamedTuple):
    """Features of some images, and their class logits where the encoder has a classifier head."""

    features: Tensor  # N x dim, float32, on the CPU
    logits: Tensor | None

    def first(self, n: int) -> "Encoding":
        return Encoding(self.features[:n], None if self.logits is None else self.logits[:n])


Network = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # stored images (uint8) on the device -> features, logits


@spec
class Encoder(Spec, ABC):
    """A network that reads stored images (uint8) and gives features."""

    preprocessing: ClassVar[str]  # what happens to a stored image before the network, for the protocol
    has_head: ClassVar[bool]  # whether it also gives class logits
    batch: ClassVar[int] = 100
    revision: ClassVar[int] = 1  # of the computation, so that cached features of an earlier one are not used

    def ready(self) -> None:
        """Refuse before computing if a file is missing."""

    @abstractmethod
    def identity(self, subject: Subject) -> str:
        """A digest that changes whenever the features would."""

    @abstractmethod
    def network(self, subject: Subject) -> Network:
        """The network on the subject's device, ready to use."""

    def protocol(self, subject: Subject) -> Protocol:
        """The entries that describe this encoder in the protocol of a number."""
        return {"encoder": text(self), "weights": self.identity(subject)[:16], "preprocessing": self.preprocessing}

    def encode(self, images: Tensor, subject: Subject) -> Encoding:
        """Features of stored images, batch by batch."""
        network = once(subject, ("network", text(self)), lambda: self.network(subject))
        features: list[Tensor] = []
        logits: list[Tensor] = []
        with torch.no_grad():
            for some in (part for sent in images.split(SENT) for part in sent.to(subject.device).split(self.batch)):
                f, scores = network(some)
                features.append(f.float())
                logits.extend([] if scores is None else [scores.float()])
        return Encoding(torch.cat(features).cpu(), torch.cat(logits).cpu() if logits else None)


@spec
class Inception(Encoder):
    """The Inception-v3 that FID is defined on; 2048 pool features, no classifier head."""

    preprocessing: ClassVar[str] = "uint8, grey to RGB, bilinear to 299x299 without antialiasing, [-1, 1]"
    has_head: ClassVar[bool] = False
    batch: ClassVar[int] = 50
    revision: ClassVar[int] = 2  # BatchNorm folded into the convolutions

    def ready(self) -> None:
        inception.require_weights(self.weights)

    def identity(self, subject: Subject) -> str:
        return once(subject, ("inception weights",), lambda: inception.weights_digest(self.weights))

    @property
    def weights(self) -> Path:
        root = os.environ.get("EFFUSE_DATA")
        if not root:
            raise MissingError(
                "the Inception weights for FID are looked for as EFFUSE_DATA/inception_fid.safetensors, and EFFUSE_DATA is "
                "not set; point it at the folder that holds them (docs/runs.md says how to get them), or use another "
                "encoder in the metric or in the algorithm's own test: encoder=classifier() or encoder=pixels()"
            )
        return Path(root) / "inception_fid.safetensors"

    def network(self, subject: Subject) -> Network:
        # tensor cores need channels last; a CPU gains nothing from it
        layout = torch.channels_last if subject.device.type == "cuda" else torch.contiguous_format
        net = inception.load(self.weights)
        cast(Any, net).to(subject.device, memory_format=layout)  # the stubs of `to` omit memory_format
        return lambda images: (net(inception.prepared(images).contiguous(memory_format=layout)), None)


@spec
class Pixels(Encoder):
    """No network: the image itself, averaged down to `side` pixels a side."""

    preprocessing: ClassVar[str] = "uint8, [0, 1], averaged over a grid"
    has_head: ClassVar[bool] = False
    batch: ClassVar[int] = 1000

    side: PositiveInt = 8

    def identity(self, subject: Subject) -> str:
        return "pixels"

    def network(self, subject: Subject) -> Network:
        return lambda images: (
            F.adaptive_avg_pool2d(images.float() / 255, min(self.side, images.shape[-1])).flatten(1),
            None,
        )


def stored(pixels: Tensor, clipped: bool) -> Tensor:
    """Images in [-1, 1] as uint8. `clipped` does not rescale them: values below mid-grey become black (FedDiffuse)."""
    if not pixels.isfinite().all():
        raise TrainingError("the generated images are not all numbers: the model has diverged; lower its learning rate")
    scaled = pixels.clamp(0.0, 1.0) * 255.0 if clipped else (pixels.clamp(-1.0, 1.0) + 1.0) * 127.5
    return scaled.round().to(torch.uint8)


def generated(subject: Subject, encoder: Encoder, n: int, clipped: bool = False) -> Encoding:
    """Features of the first `n` samples; the metrics of an evaluation share the longest encoding so far."""
    key = repr(("generated", text(encoder), clipped))
    held: Encoding | None = subject.encoded.get(key)
    if held is None or len(held.features) < n:
        held = encoder.encode(stored(subject.samples(n).pixels, clipped), subject)
        subject.encoded[key] = held
    return held.first(n)


def reference_rows(subject: Subject, split: Split, count: int | None, skip: int = 0) -> Tensor:
    """The real images to compare with: all, or a fixed random choice after `skip` others (a set may be sorted by class)."""
    available = len(subject.real(split)) - skip
    if (count or 0) > available:
        raise DataError(
            f"reference={count}, but the {split} split of {subject.data} has {available} images"
            + (f" beside the {skip} skipped; lower either" if skip else "; lower it or drop it")
        )
    chosen = Stream(("reference", split)).numpy().permutation(available + skip)[skip:][:count]
    return torch.from_numpy(chosen).sort().values


def reference(
    subject: Subject, encoder: Encoder, split: Split, count: int | None = None, clipped: bool = False, skip: int = 0
) -> Encoding:
    """Features of real images, cached on disk between evaluations and runs."""

    def compute() -> dict[str, Tensor]:
        dataset, rows = subject.real(split), reference_rows(subject, split, count, skip)
        images = dataset.images[rows.to(dataset.images.device)]
        pieces = [stored(dataset.floats(some), clipped) for some in images.split(1000)]
        features, logits = encoder.encode(torch.cat(pieces), subject)
        return {"features": features} if logits is None else {"features": features, "logits": logits}

    key = reference_key(subject, encoder, split, count, clipped, skip)
    held = once(subject, ("reference", *key), lambda: cached(subject.cache, "features", key, compute))
    return Encoding(held["features"], held.get("logits"))


def reference_key(subject: Subject, encoder: Encoder, split: Split, count: int | None, clipped: bool, skip: int = 0) -> Key:
    """Everything that reference features depend on."""
    rows = len(reference_rows(subject, split, count, skip))
    data = (subject.data, split, subject.real(split).digest, rows, skip)
    return (*data, text(encoder), encoder.identity(subject), encoder.revision, encoder.preprocessing, clipped)
