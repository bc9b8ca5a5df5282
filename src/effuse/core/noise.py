"""The randomness of a private fit: which units a step takes, and the noise on their sum."""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from effuse.core.rng import Stream


class Numbers(Protocol):
    """What the noise on a few disclosed numbers is drawn from; a numpy generator is one."""

    def normal(self, loc: float, scale: float, size: int) -> np.ndarray: ...

    def laplace(self, loc: float, scale: float, size: int) -> np.ndarray: ...


class Noise(ABC):
    """A source of random numbers for one private fit. Every call gives fresh ones."""

    @abstractmethod
    def included(self, units: int, rate: float) -> Tensor:
        """Which units take part in a step, each with probability `rate`; booleans on the CPU."""

    @abstractmethod
    def normal(self, n: int, device: torch.device) -> Tensor:
        """Standard normal numbers in fp32."""


class KeyedNoise(Noise):
    """Noise of a simulation: whoever knows the stream can draw it again, so it protects nobody."""

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self._poisson = stream.child("poisson").torch()
        self._noise = stream.child("noise").torch(device)

    def included(self, units: int, rate: float) -> Tensor:
        return torch.rand(units, generator=self._poisson, dtype=torch.float64) < rate

    def normal(self, n: int, device: torch.device) -> Tensor:
        return torch.randn(n, generator=self._noise, device=self._noise.device).to(device)
