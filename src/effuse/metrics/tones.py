"""Tones: whether a model's pixels are as dark and as bright as real ones. It shows a haze too faint for the eye."""

import torch
from pydantic import PositiveInt
from torch import Tensor

from effuse.core.data import Dataset, Split
from effuse.core.metric import Measurement, Metric, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.encoders import stored
from effuse.metrics.store import once

BINS = 32  # each of eight of the 256 stored values
AT_ONCE = 5000  # real images processed at a time


@spec
class Tones(Metric):
    """The total variation distance of the pixels' histograms, generated and real; it needs no encoder."""

    n: PositiveInt = 1000
    split: Split = "train"

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        real = subject.real(self.split)
        drawn = shares(stored(subject.samples(self.n).pixels, clipped=False))
        wanted = once(subject, ("tones", subject.data, self.split), lambda: real_shares(real))
        protocol: Protocol = {
            "bins": BINS,
            "generated": self.n,
            "reference": len(real),
            "split": self.split,
            "data": subject.data,
        }
        return {"tones": Measurement(apart(drawn, wanted), protocol)}


def shares(images: Tensor) -> Tensor:
    """The share of each channel's pixels in each bin: C x BINS, rows of sum 1."""
    tones = images.to(torch.int64) // (256 // BINS)
    counts = torch.stack([channel.flatten().bincount(minlength=BINS) for channel in tones.unbind(1)])
    return counts.double() / counts.sum(dim=1, keepdim=True)


def real_shares(real: Dataset) -> Tensor:
    """The same of a data set, some images at a time."""
    parts = (stored(real.floats(some.cpu()), clipped=False) for some in real.images.split(AT_ONCE))
    return torch.stack([shares(part) * len(part) for part in parts]).sum(dim=0) / len(real)


def apart(a: Tensor, b: Tensor) -> float:
    """The total variation distance of two histograms, averaged over channels."""
    return float((a - b).abs().sum(dim=1).mean() / 2)
