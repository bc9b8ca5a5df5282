"""Samplers on diffusers' schedulers. Random numbers are drawn in the order of diffusers' pipelines."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.core.sampler import Predict, Sampler
from effuse.core.spec import spec
from effuse.core.task import Task
from effuse.diffusion.guidance import guided, refuse_guidance
from effuse.tasks.denoise import PREDICTION_TYPES, Denoise
from effuse.tasks.edm import Edm

MOST_SIGNAL = 0.25  # amplitude of the image at the first step; ten uniform steps of a cosine schedule have 0.16 and work


@spec
class Scheduled(Sampler):
    """Noise, then one network evaluation and one scheduler step per time step."""

    steps: PositiveInt | None = None  # None: all of the task's
    guidance: Annotated[float, Field(ge=0.0)] = 0.0  # weight w of classifier-free guidance

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

        scheduler, times = self.plan(task)
        predict = guided(net, labels, self.guidance)
        x = randn_tensor(shape, generator=generator, device=generator.device) * scheduler.init_noise_sigma
        # the scheduler's coefficients are on the CPU; the network's time steps are copied to the device once
        inputs = times.to(x.device)[:, None].expand(-1, shape[0])
        for t, t_net in zip(scheduler.timesteps, inputs):
            output = predict(scheduler.scale_model_input(x, t), t_net).to(x.dtype)
            x = scheduler.step(output, t, x, return_dict=False, **self.step_options(generator))[0]
            tick()
        return x.clamp(-1.0, 1.0)

    def plan(self, task: Task) -> tuple[Any, Tensor]:
        """A scheduler with its steps set, and the network's time step at each of them."""
        scheduler = self.scheduler(task)
        scheduler.set_timesteps(self.count(denoising(task)))
        self._check_first_step(denoising(task), scheduler.timesteps)
        return scheduler, scheduler.timesteps

    def _check_first_step(self, task: Denoise, times: Tensor) -> None:
        """Refuse a first step at which training images still have much signal: sampling starts there from pure noise."""
        signal = task.schedule.alpha_bar()[int(times.max())].sqrt().item()
        if signal > MOST_SIGNAL:
            total = task.schedule.steps
            raise RecipeError(
                f"sampler: its first step is at {int(times.max())} of {total}, where training images keep {signal:.0%} of "
                f"their amplitude, but sampling starts from pure noise; use steps that divide {total}, more of them, "
                "uniform spacing, or dpm_solver()"
            )

    def ready(self, task: Task, conditional: bool) -> None:
        self.plan(task)
        refuse_guidance(self.guidance, conditional)

    def calls(self, task: Task) -> int:
        return len(self.plan(task)[1])

    @property
    def passes(self) -> int:
        return 2 if self.guidance else 1

    def count(self, task: Denoise) -> int:
        """The number of steps, which may not exceed those of training."""
        steps = self.steps or task.schedule.steps
        if steps > task.schedule.steps:
            raise RecipeError(f"sampler.steps: {steps} is more than the {task.schedule.steps} steps of task.schedule")
        return steps

    def step_options(self, generator: torch.Generator) -> dict[str, Any]:
        return {"generator": generator}


@spec
class Ancestral(Scheduled):
    """Ho et al., 2020, Algorithm 2: one step of the reverse chain at a time."""

    clip: bool = False  # clip the predicted clean image to [-1, 1] in every step
    variance: Literal["small", "large"] = "small"  # beta-tilde or beta

    def scheduler(self, task: Task) -> Any:
        from diffusers import DDPMScheduler

        return DDPMScheduler(**shared(task), clip_sample=self.clip, variance_type=f"fixed_{self.variance}")


@spec
class Ddim(Scheduled):
    """Song et al., 2021, Eq. 12: a subsequence of the steps, deterministic unless eta adds noise."""

    steps: PositiveInt | None = 50
    eta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    spacing: Literal["uniform", "quadratic"] = "uniform"
    clip: bool = False

    def scheduler(self, task: Task) -> Any:
        from diffusers import DDIMScheduler

        return DDIMScheduler(**shared(task), clip_sample=self.clip)

    def plan(self, task: Task) -> tuple[Any, Tensor]:
        if self.spacing == "uniform":
            return super().plan(task)
        from diffusers import DDIMScheduler

        schedule = denoising(task).schedule
        times = quadratic(schedule.steps, self.count(denoising(task)))
        # diffusers' spacing is uniform, so a schedule is made of the chosen steps alone
        short: Any = DDIMScheduler(
            num_train_timesteps=len(times), clip_sample=self.clip, prediction_type=PREDICTION_TYPES[denoising(task).target]
        )
        short.alphas_cumprod = schedule.alpha_bar()[times]
        short.set_timesteps(len(times))
        self._check_first_step(denoising(task), times)
        return short, times.flip(0)

    def step_options(self, generator: torch.Generator) -> dict[str, Any]:
        # recompute the noise from the clipped image: otherwise every step would lose what was clipped, and many steps
        # would produce stripes
        return {"generator": generator, "eta": self.eta, "use_clipped_model_output": self.clip}


@spec
class DpmSolver(Scheduled):
    """Lu et al., 2022: DPM-Solver++, multistep; few steps suffice."""

    steps: PositiveInt | None = 20
    order: Literal[1, 2, 3] = 2

    def plan(self, task: Task) -> tuple[Any, Tensor]:
        if not isinstance(task, Edm):
            return super().plan(task)
        if self.steps is None:
            raise RecipeError("sampler.steps: edm() has no time steps of its own; give dpm_solver() a number of steps")
        scheduler = self.scheduler(task)
        scheduler.set_timesteps(self.steps)
        return scheduler, scheduler.timesteps

    def scheduler(self, task: Task) -> Any:
        from diffusers import DPMSolverMultistepScheduler, EDMDPMSolverMultistepScheduler

        if isinstance(task, Edm):  # along EDM's noise levels, Eq. 5
            return EDMDPMSolverMultistepScheduler(sigma_data=task.sigma_data, solver_order=self.order)
        # steps uniform in log SNR, as in the paper for pixels; uniform in time, few steps would remain for fine detail
        return DPMSolverMultistepScheduler(
            **shared(task), solver_order=self.order, algorithm_type="dpmsolver++", use_lu_lambdas=True
        )


def quadratic(total: int, steps: int) -> Tensor:
    """DDIM's quadratic steps, floor(c i^2) up to 0.8 T, without repetitions."""
    root = torch.linspace(0.0, math.sqrt(0.8 * total), steps, dtype=torch.float64)
    return torch.unique((root**2 + 1e-9).long())  # rounding must not lose the last integer


def shared(task: Task) -> dict[str, Any]:
    """The scheduler arguments that follow from the task."""
    task = denoising(task)
    return {**task.schedule.config(), "prediction_type": PREDICTION_TYPES[task.target]}


def denoising(task: Task) -> Denoise:
    if isinstance(task, Edm):
        raise RecipeError("sampler: edm() has no time steps, which this sampler counts; use heun() or dpm_solver()")
    if not isinstance(task, Denoise):
        raise RecipeError(f"sampler: a model trained for {task} cannot draw images; set task=denoise(), or sampler=None")
    return task
