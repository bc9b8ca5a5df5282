"""How a site discloses its images of each class: exactly, or with noise that is drawn and charged once."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveFloat

from effuse.core.errors import RecipeError
from effuse.core.noise import Numbers
from effuse.core.privacy import Release
from effuse.core.rng import Stream
from effuse.core.spec import Spec, spec
from effuse.core.workbench import Client


@spec
class Disclosure(Spec, ABC):
    """A way to disclose counts. Adding or removing one image changes one count by one."""

    @property
    @abstractmethod
    def charge(self) -> tuple[float, float] | None:
        """The epsilon and delta that one disclosure costs a site; None without such a guarantee."""

    @property
    @abstractmethod
    def release(self) -> Release | None:
        """What one disclosure releases, for an accountant; None where there is no noise."""

    def of(self, client: Client, stream: Stream) -> list[float]:
        """A client's disclosed counts. Under a budget every unit counts one, and the total is that of the images."""
        if client.protection is None:
            if self.release is not None:
                client.charge(stream, self.release)
            return self.disclosed(client.data.histogram, stream)
        if self.release is None:
            raise RecipeError(f"{client.where}: {self} would send exact counts of private images; use gaussian(...)")
        client.book(self.release)
        weights = client.unit_weights
        counts = torch.zeros(len(client.data.dataset.classes)).index_add_(0, client.data.labels, weights)
        per_unit = client.size / float(weights.sum())
        return [n * per_unit for n in self.noisy(counts.tolist(), client.protection.numbers(stream))]

    @abstractmethod
    def noise(self, classes: int, rng: Numbers) -> np.ndarray:
        """The noise to add to the counts."""

    def disclosed(self, counts: Sequence[float], stream: Stream) -> list[float]:
        """The disclosed counts, with noise from a keyed stream."""
        return self.noisy(counts, stream.numpy())

    def noisy(self, counts: Sequence[float], rng: Numbers) -> list[float]:
        """Counts with noise, clipped at zero (post-processing costs no privacy), and rounded to float32."""
        noisy = np.asarray(counts, np.float64) + self.noise(len(counts), rng)
        return np.maximum(noisy, 0.0).astype(np.float32).astype(np.float64).tolist()  # float32 on the wire


@spec
class Exact(Disclosure):
    """The exact counts."""

    @property
    def charge(self) -> None:
        return None

    @property
    def release(self) -> None:
        return None

    def noise(self, classes: int, rng: Numbers) -> np.ndarray:
        return np.zeros(classes)


@spec
class Laplace(Disclosure):
    """Dwork et al., 2006: noise of scale 1/epsilon on every count."""

    epsilon: PositiveFloat

    @property
    def charge(self) -> tuple[float, float]:
        return self.epsilon, 0.0

    @property
    def release(self) -> Release:
        return Release("histogram", "laplace", 1.0 / self.epsilon)

    def noise(self, classes: int, rng: Numbers) -> np.ndarray:
        return rng.laplace(0.0, 1.0 / self.epsilon, classes)


@spec
class Gaussian(Disclosure):
    """Balle and Wang, 2018, the analytic Gaussian mechanism: the least noise that gives epsilon and delta."""

    epsilon: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    @property
    def charge(self) -> tuple[float, float]:
        return self.epsilon, self.delta

    @property
    def release(self) -> Release:
        return Release("histogram", "gaussian", self.sigma)

    @property
    def sigma(self) -> float:
        """The smallest standard deviation that gives this delta at this epsilon, by bisection."""
        low, high = 0.0, 1.0
        while gaussian_delta(self.epsilon, high) > self.delta:
            low, high = high, 2 * high
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if gaussian_delta(self.epsilon, middle) > self.delta else (low, middle)
        return high

    def noise(self, classes: int, rng: Numbers) -> np.ndarray:
        return rng.normal(0.0, self.sigma, classes)


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """The delta of noise sigma on a value that changes by one (Balle and Wang, Eq. 6)."""
    return _normal(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * _normal(-0.5 / sigma - epsilon * sigma)


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
