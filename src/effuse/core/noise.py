"""Randomness that protects a site: which units take part in a step, and the noise on their sum."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from effuse.core.rng import Stream


class Noise(ABC):
    """A source of Poisson batches and Gaussian noise. Every call gives fresh values."""

    @abstractmethod
    def included(self, units: int, rate: float) -> Tensor:
        """Whether each unit takes part, independently with probability `rate`; bool, on the CPU."""

    @abstractmethod
    def normal(self, n: int, device: torch.device) -> Tensor:
        """Standard normal values, fp32."""


class KeyedNoise(Noise):
    """The randomness of a simulation: keyed, so that every engine draws the same values. It protects nobody."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._inclusion = stream.child("poisson").torch()
        self._normal: torch.Generator | None = None  # on the device of the first call

    def included(self, units: int, rate: float) -> Tensor:
        return torch.rand(units, dtype=torch.float64, generator=self._inclusion) < rate

    def normal(self, n: int, device: torch.device) -> Tensor:
        if self._normal is None:
            self._normal = self._stream.child("noise").torch(device)
        return torch.randn(n, device=device, generator=self._normal)
