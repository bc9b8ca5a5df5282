"""Solvers: the optimiser and its settings. The machine that runs a solver calls `backward()`."""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from effuse.core.privacy import DpSgd
from effuse.core.spec import Spec, spec

Decay = Annotated[float, Field(gt=0, lt=1)]


@spec
class Schedule(Spec, ABC):
    """A factor on the learning rate for each federated round."""

    @abstractmethod
    def factor(self, t: int, rounds: int) -> float:
        """The factor in round `t` of `rounds`."""


@spec
class Constant(Schedule):
    """A factor of one in every round."""

    def factor(self, t: int, rounds: int) -> float:
        return 1.0


@spec
class CosineDecay(Schedule):
    """From 1 to `floor` along half a cosine, after a linear warm-up."""

    floor: NonNegativeFloat = 0.0
    warmup: Annotated[int, Field(ge=0)] = 0

    def factor(self, t: int, rounds: int) -> float:
        if t < self.warmup:
            return (t + 1) / (self.warmup + 1)
        progress = (t - self.warmup) / max(1, rounds - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@spec
class ExponentialDecay(Schedule):
    """The factor is multiplied by `rate` every round."""

    rate: PositiveFloat = 0.998

    def factor(self, t: int, rounds: int) -> float:
        return self.rate**t


@spec
class Solver(Spec, ABC):
    """An optimiser, its schedule, and its amount of work in either epochs or steps."""

    lr: PositiveFloat
    batch: PositiveInt = 128
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    clip: PositiveFloat | None = None  # the largest norm of the gradient or direction that the optimiser is given
    schedule: Schedule = Constant()
    state: Literal["fresh", "kept"] = "fresh"  # the optimiser's moments at a client's next fit
    ema: Decay | None = None  # keep a moving average of the weights over steps
    privacy: DpSgd | None = None  # train with differential privacy; `batch` is then the expected number of units in a step
    ragged: Literal["keep", "drop"] = "keep"  # an epoch's last batch, where it is smaller and not the only one

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"{self.name} needs either epochs or steps, and not both")

    def steps_on(self, size: int) -> int:
        """How many steps a fit on `size` images takes."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 0) * self.batches_in(size)

    def batches_in(self, size: int) -> int:
        """How many batches an epoch on `size` images has."""
        if self.ragged == "drop" and size >= self.batch and self.privacy is None:  # a Poisson batch is never ragged
            return size // self.batch
        return math.ceil(size / self.batch)

    def ragged_on(self, size: int) -> bool:
        """Whether a fit on `size` images has a batch with fewer images."""
        return min(self.steps_on(size), self.batches_in(size)) * self.batch > size

    def rate_on(self, units: int) -> float:
        """The share of the units in a private step, q."""
        return 1 / max(1, math.ceil(units / self.batch))  # a server without images counts none

    def images_on(self, size: int) -> int:
        """How many images a fit on `size` images processes; the last batch of an epoch may be smaller."""
        if self.privacy is not None:  # expected: a Poisson batch has no fixed size
            return round(self.steps_on(size) * self.rate_on(size) * size) * self.privacy.repeats
        batches = max(1, self.batches_in(size))
        whole, rest = divmod(self.steps_on(size), batches)
        return whole * min(size, batches * self.batch) + rest * self.batch

    @abstractmethod
    def optimiser(self, parameters: list[Tensor], lr: float | Tensor) -> torch.optim.Optimizer:
        """A new optimiser."""


@spec
class SGD(Solver, name="sgd"):
    """Stochastic gradient descent, with momentum."""

    momentum: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0

    def optimiser(self, parameters: list[Tensor], lr: float | Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True)


@spec
class Adam(Solver):
    """Kingma and Ba, 2015."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0

    def optimiser(self, parameters: list[Tensor], lr: float | Tensor) -> torch.optim.Optimizer:
        # a tensor as rate means a captured step, whose counters must be on the device
        captured = isinstance(lr, Tensor)
        make = self._kind()
        betas, eps, decay = self.betas, self.eps, self.weight_decay
        return make(parameters, lr, betas=betas, eps=eps, weight_decay=decay, fused=True, capturable=captured)

    def _kind(self) -> type[torch.optim.Adam]:
        return torch.optim.Adam


@spec
class AdamW(Adam, name="adamw"):
    """Loshchilov and Hutter, 2019: Adam with decoupled weight decay."""

    weight_decay: NonNegativeFloat = 0.01

    def _kind(self) -> type[torch.optim.Adam]:
        return torch.optim.AdamW
