"""EDM's samplers against exact denoisers, a step by hand, and their refusals."""

import math

import pytest
import torch
from torch import Tensor

from effuse.core.build import build
from effuse.core.errors import ModelError, RecipeError
from effuse.core.grammar import parse
from effuse.core.sampler import Predict, Sampler
from effuse.core.spec import text
from effuse.diffusion.heun import Heun
from effuse.diffusion.samplers import Ancestral, Ddim, DpmSolver
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm

MEAN, STD = 0.1, 0.2
TASK, MANY = Edm(), torch.Size((4000, 1, 1, 1))


def network(denoiser, task: Edm = TASK, calls: list[Tensor] | None = None) -> Predict:
    """F of a denoiser D(x; sigma): it is given c_in x and c_noise = ln(sigma) / 4."""

    def predict(scaled: Tensor, c_noise: Tensor, labels: Tensor | None) -> Tensor:
        if calls is not None:
            calls.append(c_noise)
        sigma = (4.0 * c_noise.double()).exp()[:, None, None, None]
        c = task.at(sigma)
        x = scaled.double() / c.c_in
        return ((denoiser(x, sigma) - c.c_skip * x) / c.c_out).float()

    return predict


def gaussian(x: Tensor, sigma: Tensor) -> Tensor:
    """The ideal denoiser of data from N(MEAN, STD^2): E[y | x] = m + c^2 / (c^2 + sigma^2) (x - m)."""
    return MEAN + STD**2 / (STD**2 + sigma**2) * (x - MEAN)


def sample(sampler: Sampler, shape=MANY, seed: int = 0, net: Predict | None = None, labels=None, task: Edm = TASK) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sampler.draw(net or network(gaussian, task), task, shape, labels, generator, lambda: None)


@pytest.mark.parametrize(
    "sampler", [Heun(steps=40), DpmSolver(steps=40), DpmSolver(steps=40, order=3), Heun(rho=3.0, steps=60)], ids=str
)
@pytest.mark.parametrize("task", [Edm(), Edm(sigma_data=0.2)], ids=str)
def test_a_gaussian_is_recovered(sampler: Sampler, task: Edm) -> None:
    """Mean 0.1 within four standard errors (0.2 / sqrt(4000) = 0.0032), deviation 0.2 within four (0.2 / sqrt(8000))."""
    x = sample(sampler, task=task)
    assert x.mean().item() == pytest.approx(MEAN, abs=0.013)
    assert x.std().item() == pytest.approx(STD, abs=0.009)


def test_heun_is_of_second_order() -> None:
    """The exact flow takes x_0 to m + (x_0 - m) c / sqrt(c^2 + sigma_max^2). Twice the steps leave a quarter."""
    shape, first = torch.Size((1, 1, 1, 1)), 80.0 * torch.randn(1, generator=torch.Generator().manual_seed(0)).item()
    exact = MEAN + (first - MEAN) * STD / math.hypot(STD, 80.0)
    errors = [abs(sample(Heun(steps=steps), shape).item() - exact) for steps in (64, 128)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)


def test_two_steps_by_hand() -> None:
    """Levels 4, 1, 0 (rho 1), and D(x) = 0 everywhere, so d = x / t.

    From x = 4 z: d = z, Euler gives z at 1, where d' = z; Heun keeps z. The last step is Euler's: z - 1 * z = 0.
    With D = x / 2, d = x / (2 t): from 4 z, d = z/2, Euler gives 2.5 z, d' = 1.25 z, and 4 z - 3 * 0.875 z = 1.375 z.
    Then x - 1 * (1.375 z / 2) = 0.6875 z.
    """
    sampler, shape = Heun(steps=2, sigma_max=4.0, sigma_min=1.0, rho=1.0), torch.Size((8, 1, 1, 1))
    assert sampler.levels().tolist() == [4.0, 1.0, 0.0]
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert sample(sampler, shape, net=network(lambda x, sigma: 0.0 * x)).abs().max() < 1e-6
    half = sample(sampler, shape, net=network(lambda x, sigma: x / 2))
    torch.testing.assert_close(half, (0.6875 * z).clamp(-1, 1), atol=1e-5, rtol=0)


def test_noise_levels() -> None:
    """Eq. 5 with rho = 7: the second of 18 levels is (80^(1/7) + (0.002^(1/7) - 80^(1/7)) / 17)^7 = 57.59."""
    levels = Heun().levels()
    assert len(levels) == 19 and levels[0].item() == pytest.approx(80) and levels[-2].item() == pytest.approx(0.002)
    assert levels[1].item() == pytest.approx(57.586, abs=1e-3) and levels[-1] == 0
    assert (levels.diff() < 0).all()


@pytest.mark.parametrize(("sampler", "evaluations"), [(Heun(steps=5), 9), (DpmSolver(steps=5), 5)], ids=str)
def test_evaluations(sampler: Sampler, evaluations: int) -> None:
    """The network gets c_noise, one per image, from ln(80)/4 down to ln(0.002)/4. `tick` counts its evaluations."""
    calls: list[Tensor] = []
    ticks: list[int] = []
    net = network(gaussian, calls=calls)
    sampler.draw(net, TASK, torch.Size((3, 1, 1, 1)), None, torch.Generator().manual_seed(0), lambda: ticks.append(1))
    assert len(calls) == len(ticks) == evaluations == sampler.calls(TASK)
    assert all(c.shape == (3,) and c.dtype == torch.float32 for c in calls)
    assert calls[0][0].item() == pytest.approx(math.log(80) / 4) and calls[-1][0].item() == pytest.approx(
        math.log(0.002) / 4
    )


def test_draws_repeat_and_stay_in_range() -> None:
    shape, state = torch.Size((4, 1, 2, 2)), torch.random.get_rng_state()
    for sampler in (Heun(steps=4), DpmSolver(steps=4)):
        assert torch.equal(sample(sampler, shape), sample(sampler, shape))
        assert not torch.equal(sample(sampler, shape), sample(sampler, shape, seed=1))
        wild = sample(sampler, shape, net=network(lambda x, sigma: 3.0 + 0.0 * x))
        assert wild.min() >= -1.0 and wild.max() <= 1.0
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("sampler", [Heun, DpmSolver])
def test_guided_sampling_moves_towards_the_class(sampler) -> None:
    """The classes are denoised to +0.5 and -0.5, the null label to 0. With w = 1, the first is 2 x 0.5 - 0 = 1."""

    def net(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        means = torch.tensor([0.5, -0.5, 0.0])[labels][:, None, None, None]
        return network(lambda noisy, sigma: means.expand_as(noisy))(x, t, None)

    labels, shape = torch.tensor([0, 1]), torch.Size((2, 1, 1, 1))
    plain = sample(sampler(steps=10), shape, net=net, labels=labels).flatten()
    guided = sample(sampler(steps=10, guidance=1.0), shape, net=net, labels=labels).flatten()
    torch.testing.assert_close(plain, torch.tensor([0.5, -0.5]), atol=1e-4, rtol=0)
    torch.testing.assert_close(guided, torch.tensor([1.0, -1.0]), atol=1e-4, rtol=0)


def test_the_saved_scheduler_has_the_same_levels_and_coefficients() -> None:
    """Diffusers' Euler sampler, given F, makes Heun's first half step."""
    sampler, task = Heun(steps=6, sigma_max=10.0, rho=5.0), Edm(sigma_data=0.7)
    scheduler = sampler.scheduler(task)
    scheduler.set_timesteps(6)
    torch.testing.assert_close(scheduler.sigmas.double(), sampler.levels(), rtol=1e-5, atol=1e-8)
    x, output = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1, 1), 0.4)
    t, after = sampler.levels()[:2]
    c = task.at(t)
    torch.testing.assert_close(scheduler.scale_model_input(x, scheduler.timesteps[0]), c.c_in.float() * x)
    assert scheduler.timesteps[0].item() == pytest.approx(c.c_noise.item())
    d = (x - (c.c_skip * x + c.c_out * output)) / t
    found = scheduler.step(output, scheduler.timesteps[0], x).prev_sample
    torch.testing.assert_close(found, (x + (after - t) * d).float())


def test_refusals() -> None:
    """Samplers that count time steps have none to count; Heun has no noise levels in a denoiser of time steps."""
    for sampler in (Ancestral(), Ddim()):
        with pytest.raises(RecipeError, match=r"edm\(\) has no time steps.*use heun\(\) or dpm_solver\(\)"):
            sampler.ready(TASK, conditional=False)
    with pytest.raises(RecipeError, match=r"give dpm_solver\(\) a number of steps"):
        DpmSolver(steps=None).ready(TASK, conditional=False)
    with pytest.raises(RecipeError, match=r"heun\(\) follows the noise levels of edm\(\), and denoise\(\) has none"):
        Heun().ready(Denoise(), conditional=False)
    with pytest.raises(ModelError, match="needs a class-conditional model"):
        Heun(guidance=1.0).ready(TASK, conditional=False)
    for wrong in ({"steps": 1}, {"sigma_min": 90.0}):
        with pytest.raises(RecipeError, match="it needs two or more, and sigma_min below sigma_max"):
            Heun(**wrong)
    Heun().ready(TASK, conditional=False)
    DpmSolver().ready(TASK, conditional=False)


def test_grammar() -> None:
    sampler = Heun(steps=10, rho=5.0, guidance=0.5, batch=7)
    assert build(parse(text(sampler)), Sampler, "sampler") == sampler
