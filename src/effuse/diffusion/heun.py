"""EDM's sampler: Karras et al., 2022, Algorithm 1, Heun's second-order method along decreasing noise levels."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.core.sampler import Predict, Sampler
from effuse.core.spec import spec
from effuse.core.task import Task
from effuse.diffusion.guidance import guided, refuse_guidance
from effuse.tasks.edm import Edm


@spec
class Heun(Sampler):
    """EDM's deterministic sampler; a step takes two network evaluations, the last one."""

    steps: PositiveInt = 18  # N
    sigma_min: PositiveFloat = 0.002  # sigma_min, the last noise level before zero
    sigma_max: PositiveFloat = 80.0  # sigma_max, the first
    rho: PositiveFloat = 7.0  # rho of Eq. 5: the larger, the shorter the steps at low noise
    guidance: NonNegativeFloat = 0.0  # weight w of classifier-free guidance

    def __post_init__(self) -> None:
        if self.steps < 2 or self.sigma_min >= self.sigma_max:
            raise RecipeError(
                f"sampler: heun() goes from sigma_max={self.sigma_max:g} to sigma_min={self.sigma_min:g} in "
                f"{self.steps} steps; it needs two or more, and sigma_min below sigma_max"
            )

    def levels(self) -> Tensor:
        """Eq. 5: t_0 ... t_{N-1}, and t_N = 0."""
        first, last = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        i = torch.arange(self.steps, dtype=torch.float64)
        t = (first + i / (self.steps - 1) * (last - first)) ** self.rho
        return torch.cat([t, t.new_zeros(1)])

    @torch.no_grad()
    def draw(
        self,
        net: Predict,
        task: Task,
        shape: torch.Size,
        labels: Tensor | None,
        generator: torch.Generator,
        tick: Callable[[], None],
    ) -> Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        task, predict = edm(task), guided(net, labels, self.guidance)

        def slope(x: Tensor, t: Tensor) -> Tensor:
            """dx/dt = (x - D(x; t)) / t, where D(x; t) = c_skip x + c_out F(c_in x; c_noise)."""
            c = task.at(t)
            output = predict(c.c_in.item() * x, c.c_noise.to(x).expand(len(x)))
            tick()
            return (x - (c.c_skip.item() * x + c.c_out.item() * output.to(x.dtype))) / t.item()

        levels = self.levels()
        x = randn_tensor(shape, generator=generator, device=generator.device) * levels[0].item()
        for t, after in itertools.pairwise(levels):
            step = (after - t).item()
            d = slope(x, t)
            onward = x + step * d
            x = x + step * 0.5 * (d + slope(onward, after)) if after else onward
        return x.clamp(-1.0, 1.0)

    def ready(self, task: Task, conditional: bool) -> None:
        edm(task)
        refuse_guidance(self.guidance, conditional)

    def calls(self, task: Task) -> int:
        return 2 * self.steps - 1

    @property
    def passes(self) -> int:
        return 2 if self.guidance else 1

    def scheduler(self, task: Task) -> Any:
        """Diffusers' first-order sampler along the same noise levels: it has no Heun for this preconditioning."""
        from diffusers import EDMEulerScheduler

        levels = {"sigma_min": self.sigma_min, "sigma_max": self.sigma_max, "rho": self.rho}
        return EDMEulerScheduler(**levels, sigma_data=edm(task).sigma_data)


def edm(task: Task) -> Edm:
    if not isinstance(task, Edm):
        raise RecipeError(
            f"sampler: heun() follows the noise levels of edm(), and {task.name}() has none; set task=edm(), or "
            "sampler=dpm_solver()"
        )
    return task
