"""Samplers against an analytic denoiser, a hand-written update and diffusers' own pipelines."""

import itertools

import pytest
import torch
from torch import Tensor

from effuse.core.build import build
from effuse.core.errors import ModelError, RecipeError
from effuse.core.grammar import parse
from effuse.core.sampler import Predict, Sampler
from effuse.core.spec import text
from effuse.diffusion.samplers import Ancestral, Ddim, DpmSolver, quadratic
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Cosine, Linear, signal_and_noise

MEAN, STD = 0.1, 0.2
MANY = torch.Size((4000, 1, 1, 1))


def gaussian(task: Denoise, calls: list[Tensor] | None = None) -> Predict:
    """The exact denoiser of data from N(MEAN, STD^2): E[x0 | x_t] = m + a c^2 / (a^2 c^2 + s^2) (x_t - a m)."""

    def predict(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        if calls is not None:
            calls.append(t)
        a, s = signal_and_noise(task.schedule, x.device)[t].view(-1, 2, 1, 1, 1).double().unbind(1)
        x0 = MEAN + a * STD**2 / (a**2 * STD**2 + s**2) * (x - a * MEAN)
        epsilon = (x - a * x0) / s
        return {"epsilon": epsilon, "v": a * epsilon - s * x0, "x0": x0}[task.target].float()

    return predict


def sample(
    sampler: Sampler,
    task: Denoise,
    shape: torch.Size = MANY,
    seed: int = 0,
    net: Predict | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    return sampler.draw(net or gaussian(task), task, shape, labels, torch.Generator().manual_seed(seed), lambda: None)


@pytest.mark.parametrize(
    "sampler",
    [
        Ancestral(),
        Ancestral(steps=400, variance="large"),
        Ddim(steps=200),
        Ddim(steps=500, eta=1.0, clip=True),
        Ddim(steps=50, spacing="quadratic"),
        DpmSolver(steps=10),
        DpmSolver(steps=20, order=3),
    ],
    ids=str,
)
def test_a_gaussian_is_recovered(sampler: Sampler) -> None:
    """Mean 0.1 within four standard errors (0.2 / sqrt(4000) = 0.0032), deviation 0.2 within a tenth."""
    x = sample(sampler, Denoise())
    assert x.mean().item() == pytest.approx(MEAN, abs=0.013)
    assert x.std().item() == pytest.approx(STD, rel=0.1)


@pytest.mark.parametrize(
    ("sampler", "schedule"),
    [
        *itertools.product([Ancestral(steps=50), Ddim(), DpmSolver()], [Linear(), Cosine(steps=200)]),
        (Ddim(spacing="quadratic"), Linear()),
    ],
    ids=str,
)
def test_targets_are_equivalent(sampler: Sampler, schedule: Linear) -> None:
    """Equivalent networks that predict epsilon, v or x0 give the same images.

    DPM-Solver steps between integer time steps but passes the nearest one to the network. So the images differ slightly.
    """
    shape, tolerance = torch.Size((16, 1, 1, 1)), 1e-2 if isinstance(sampler, DpmSolver) else 2e-3
    epsilon, v, x0 = (sample(sampler, Denoise(target=target, schedule=schedule), shape) for target in ("epsilon", "v", "x0"))
    torch.testing.assert_close(v, x0, atol=tolerance, rtol=0)
    torch.testing.assert_close(epsilon, x0, atol=tolerance, rtol=0)


def mistaken(factor: float) -> Predict:
    """A prediction that is too large or too small, so that predicted images leave [-1, 1]."""
    return lambda x, t, labels: factor * gaussian(Denoise())(x, t, labels)


@pytest.mark.parametrize("spacing", ["uniform", "quadratic"])
@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("clip", [False, True])
def test_ddim_update_by_hand(spacing: str, eta: float, clip: bool) -> None:
    """x' = a' x0 + sqrt(s'^2 - sigma^2) epsilon + sigma z, where sigma = eta (s'/s) sqrt(1 - a^2/a'^2).

    At the last step a' = 1. If x0 is clipped, epsilon is recomputed as (x - a x0) / s.
    """
    task, shape = Denoise(), torch.Size((8, 1, 2, 2))
    sampler = Ddim(steps=20, eta=eta, spacing=spacing, clip=clip)
    times = list(range(0, 1000, 50)) if spacing == "uniform" else quadratic(1000, 20).tolist()
    alpha_bar = task.schedule.alpha_bar().double()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator).double()
    for i in reversed(range(len(times))):
        t, before = times[i], alpha_bar[times[i - 1]] if i else torch.tensor(1.0, dtype=torch.float64)
        epsilon = mistaken(1.1)(x, torch.full((8,), t), None).double()
        x0 = (x - (1 - alpha_bar[t]).sqrt() * epsilon) / alpha_bar[t].sqrt()
        if clip:
            x0 = x0.clamp(-1.0, 1.0)
            epsilon = (x - alpha_bar[t].sqrt() * x0) / (1 - alpha_bar[t]).sqrt()
        sigma = eta * ((1 - before) / (1 - alpha_bar[t]) * (1 - alpha_bar[t] / before)).sqrt()
        x = before.sqrt() * x0 + (1 - before - sigma**2).sqrt() * epsilon
        if eta:
            x = x + sigma * torch.randn(shape, generator=generator)
    torch.testing.assert_close(
        sample(sampler, task, shape, seed=5, net=mistaken(1.1)), x.float().clamp(-1.0, 1.0), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("factor", [0.5, 1.1, 1.5])
def test_ddim_with_all_steps_and_all_noise_is_ancestral(factor: float) -> None:
    """With eta = 1 and every time step, the update is Ho et al.'s Eq. 7 with their beta-tilde.

    This holds for a clipped x0 too, but only if the noise is recomputed from it.
    """
    ddim, ancestral = (
        sample(sampler, Denoise(), torch.Size((64, 1, 1, 1)), net=mistaken(factor))
        for sampler in (Ddim(steps=1000, eta=1.0, clip=True), Ancestral(clip=True))
    )
    torch.testing.assert_close(ddim, ancestral, atol=1e-4, rtol=0)


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.5])
def test_clipped_ddim_converges_with_more_steps(factor: float) -> None:
    """250 and 1,000 steps give the same images."""
    few, many = (
        sample(Ddim(steps=steps, clip=True), Denoise(), torch.Size((64, 1, 1, 1)), net=mistaken(factor))
        for steps in (250, 1000)
    )
    torch.testing.assert_close(few, many, atol=0.02, rtol=0)


def test_quadratic_steps() -> None:
    """T = 1000, S = 5: c = 800 / 16 = 50, so 0, 50, 200, 450, 800; repeated small steps are omitted."""
    assert quadratic(1000, 5).tolist() == [0, 50, 200, 450, 800]
    many = quadratic(1000, 100)
    assert 90 < len(many) < 100 and many[0] == 0 and many[-1] == 800 and many.unique().numel() == len(many)


@pytest.mark.parametrize(
    ("sampler", "first", "evaluations"),
    [
        (Ancestral(), 199, 200),
        (Ancestral(steps=10), 180, 10),
        (Ddim(steps=50), 196, 50),
        (Ddim(steps=5, spacing="quadratic"), 160, 5),
        (DpmSolver(steps=8), 199, 8),
    ],
    ids=str,
)
def test_evaluations(sampler: Sampler, first: int, evaluations: int) -> None:
    """The network gets decreasing time steps, one per image. `tick` counts its evaluations."""
    task, calls, ticks = Denoise(schedule=Linear(steps=200)), [], []
    generator = torch.Generator().manual_seed(0)
    sampler.draw(gaussian(task, calls), task, torch.Size((3, 1, 1, 1)), None, generator, lambda: ticks.append(1))
    assert len(calls) == len(ticks) == evaluations
    assert all(c.shape == (3,) and c.dtype == torch.int64 for c in calls)
    steps = [int(c[0]) for c in calls]
    assert steps[0] == first and steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("sampler", [Ancestral(), Ddim(steps=10, eta=0.5), DpmSolver(steps=5)], ids=str)
def test_draws_repeat(sampler: Sampler) -> None:
    """A draw depends only on its generator and does not change torch's default one."""
    task, shape = Denoise(schedule=Linear(steps=50)), torch.Size((4, 1, 2, 2))
    state = torch.random.get_rng_state()
    assert torch.equal(sample(sampler, task, shape), sample(sampler, task, shape))
    assert not torch.equal(sample(sampler, task, shape), sample(sampler, task, shape, seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_images_stay_in_range() -> None:
    """A prediction of zero noise makes the image grow; the result is clamped."""
    x = sample(Ddim(steps=5), Denoise(), torch.Size((2, 1, 4, 4)), net=lambda x, t, labels: torch.zeros_like(x))
    assert x.min() >= -1.0 and x.max() <= 1.0


def test_guidance_needs_labels() -> None:
    with pytest.raises(ModelError, match="needs a class-conditional model"):
        sample(Ddim(guidance=1.0), Denoise(), torch.Size((2, 1, 1, 1)))


def test_guided_sampling_moves_towards_the_class() -> None:
    """The classes predict +0.5 and -0.5, the null label 0. With w = 1, the first is 2 x 0.5 - 0 = 1."""
    task = Denoise(target="x0")

    def net(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        means = torch.tensor([0.5, -0.5, 0.0])[labels]  # -1, the null label, is the last
        return means[:, None, None, None].expand_as(x)

    labels = torch.tensor([0, 1])
    plain = sample(Ddim(steps=10), task, torch.Size((2, 1, 1, 1)), net=net, labels=labels).flatten()
    guided = sample(Ddim(steps=10, guidance=1.0), task, torch.Size((2, 1, 1, 1)), net=net, labels=labels).flatten()
    torch.testing.assert_close(plain, torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(guided, torch.tensor([1.0, -1.0]))


def test_too_many_steps_and_wrong_tasks_are_refused() -> None:
    with pytest.raises(RecipeError, match="sampler.steps: 80 is more than the 50"):
        sample(Ddim(steps=80), Denoise(schedule=Linear(steps=50)))
    with pytest.raises(RecipeError, match="trained for classify"):
        Ddim().scheduler(Classify())


@pytest.mark.parametrize(
    ("sampler", "schedule", "first", "left"),
    [
        (Ancestral(steps=510), Linear(), 509, 27),
        (Ddim(steps=600), Cosine(), 599, 58),
        (Ddim(spacing="quadratic"), Cosine(), 800, 31),
    ],
    ids=str,
)
def test_a_first_step_with_too_much_signal_is_refused(sampler: Sampler, schedule: Linear, first: int, left: int) -> None:
    """1000 // 510 = 1, so 510 steps are 509 to 0. At 509, a = exp(-(0.0001 * 510 + 0.0199 * 510^2 / 2000) / 2) = 0.27.

    Quadratic steps begin at 0.8 T, where a cosine schedule has a = cos(0.8 pi / 2) = 0.31 and a linear one 0.04.
    """
    with pytest.raises(RecipeError, match=f"first step is at {first} of 1000, where training images keep {left}% of their"):
        sampler.ready(Denoise(schedule=schedule), conditional=False)
    for good in (Ancestral(steps=400), Ddim(spacing="quadratic"), Ddim(steps=10)):
        good.ready(Denoise(), conditional=False)
    Ddim(steps=10).ready(Denoise(schedule=Cosine()), conditional=False)


def test_grammar() -> None:
    for sampler in (Ancestral(clip=True), Ddim(steps=10, eta=0.5, spacing="quadratic", guidance=2.0), DpmSolver(order=3)):
        assert build(parse(text(sampler)), Sampler, "sampler") == sampler
