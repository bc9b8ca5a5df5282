"""Noise schedules: the share of the image that remains at each of the T diffusion steps."""

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from effuse.core.spec import Spec, spec

DESIGNED_FOR = 1000  # the number of steps for which the published values of beta were chosen


@spec
class NoiseSchedule(Spec, ABC):
    """The variances beta_1 ... beta_T of the noise that is added in each step."""

    steps: PositiveInt = 1000

    @abstractmethod
    def betas(self) -> Tensor:
        """The T variances, fp32."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The same schedule as arguments of a diffusers scheduler."""

    def alpha_bar(self) -> Tensor:
        """The T cumulative products of 1 - beta, equal to the bit to those of diffusers' schedulers."""
        return torch.cumprod(1.0 - self.betas(), dim=0)


@spec
class Ranged(NoiseSchedule):
    """A schedule between two variances. `rescale` multiplies them by 1000/T, so that any T ends with the same noise."""

    start: PositiveFloat
    end: PositiveFloat
    rescale: bool = True

    def __post_init__(self) -> None:
        if self.ends[1] >= 1.0:
            raise ValueError(f"{self.steps} steps would need a beta of {self.ends[1]:g}; use more steps or rescale=False")

    @property
    def ends(self) -> tuple[float, float]:
        factor = DESIGNED_FOR / self.steps if self.rescale else 1.0
        return self.start * factor, self.end * factor

    def config(self) -> dict[str, Any]:
        start, end = self.ends
        return {"num_train_timesteps": self.steps, "beta_schedule": self.name, "beta_start": start, "beta_end": end}


@spec
class Linear(Ranged):
    """Ho et al., 2020: beta grows linearly."""

    start: PositiveFloat = 1e-4
    end: PositiveFloat = 0.02

    def betas(self) -> Tensor:
        return torch.linspace(*self.ends, self.steps, dtype=torch.float32)


@spec
class ScaledLinear(Ranged):
    """Rombach et al., 2022 (Stable Diffusion): the square root of beta grows linearly."""

    start: PositiveFloat = 0.00085
    end: PositiveFloat = 0.012

    def betas(self) -> Tensor:
        start, end = self.ends
        return torch.linspace(start**0.5, end**0.5, self.steps, dtype=torch.float32) ** 2


@spec
class Cosine(NoiseSchedule):
    """Nichol and Dhariwal, 2021: alpha_bar falls like a squared cosine, for any T."""

    def betas(self) -> Tensor:
        def alpha_bar(u: Tensor) -> Tensor:
            return torch.cos((u + 0.008) / 1.008 * (torch.pi / 2)) ** 2

        u = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
        return (1.0 - alpha_bar(u[1:]) / alpha_bar(u[:-1])).clamp(max=0.999).float()

    def config(self) -> dict[str, Any]:
        return {"num_train_timesteps": self.steps, "beta_schedule": "squaredcos_cap_v2"}


@functools.cache
def signal_and_noise(schedule: NoiseSchedule, device: torch.device) -> Tensor:
    """A T x 2 table of sqrt(alpha_bar) and sqrt(1 - alpha_bar), cached per device."""
    alpha_bar = schedule.alpha_bar()
    return torch.stack([alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt()], dim=1).to(device)
