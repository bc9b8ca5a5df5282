"""Noise schedules: known constants, and agreement with diffusers."""

import pytest
import torch

from effuse.core.build import build
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.spec import text
from effuse.tasks.schedules import Cosine, Linear, NoiseSchedule, ScaledLinear, signal_and_noise


@pytest.mark.parametrize(
    ("schedule", "index", "value"),
    [
        (Linear(), -1, 4.0358e-5),
        (Linear(), 499, 0.078587),
        (Linear(steps=500, rescale=False), -1, 6.3527e-3),
        (Linear(steps=100, rescale=False), -1, 0.36356),
        (ScaledLinear(), 0, 0.99915),
        (ScaledLinear(), 150, 0.827812),
        (ScaledLinear(), 999, 0.0046601),
    ],
)
def test_published_constants(schedule: NoiseSchedule, index: int, value: float) -> None:
    """Constants computed by hand from the betas; alpha_bar_n is entry n - 1."""
    assert schedule.alpha_bar()[index].item() == pytest.approx(value, rel=5e-5)


def test_rescaled_schedules_end_in_noise() -> None:
    """T = 500 doubles beta, so that about as little signal remains as after 1000 steps."""
    assert Linear(steps=500).ends == (2e-4, 0.04)
    assert Linear(steps=500).alpha_bar()[-1].item() < 5e-5
    assert Linear(steps=100).alpha_bar()[-1].item() < 5e-5


@pytest.mark.parametrize(
    "schedule",
    [
        Linear(),
        Linear(steps=500),
        Linear(steps=37),
        Linear(steps=100, rescale=False),
        ScaledLinear(),
        ScaledLinear(steps=250),
        Cosine(),
        Cosine(steps=123),
    ],
)
def test_diffusers_computes_the_same_schedule(schedule: NoiseSchedule) -> None:
    """Training and sampling use the same alpha_bar, and the saved configuration needs no list of betas."""
    from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

    for kind in (DDPMScheduler, DDIMScheduler, DPMSolverMultistepScheduler):
        made = kind(**schedule.config())
        torch.testing.assert_close(made.betas, schedule.betas(), rtol=2e-7, atol=1e-9)
        torch.testing.assert_close(made.alphas_cumprod, schedule.alpha_bar(), rtol=1e-5, atol=1e-9)
    if not isinstance(schedule, Cosine):
        assert torch.equal(DDPMScheduler(**schedule.config()).alphas_cumprod, schedule.alpha_bar())
    assert "trained_betas" not in schedule.config()


def test_table_is_made_once_per_device() -> None:
    """a^2 + s^2 = 1 at every step."""
    table = signal_and_noise(Linear(), torch.device("cpu"))
    assert table is signal_and_noise(Linear(), torch.device("cpu"))
    assert table.dtype == torch.float32 and table.shape == (1000, 2)
    torch.testing.assert_close(table.square().sum(1), torch.ones(1000))


def test_grammar() -> None:
    assert build(parse("linear(steps=400)"), NoiseSchedule, "s") == Linear(steps=400)
    assert build(parse(text(Cosine(steps=10))), NoiseSchedule, "s") == Cosine(steps=10)
    with pytest.raises(RecipeError, match="20 steps would need a beta of 1; use more steps or rescale=False"):
        build(parse("linear(steps=20)"), NoiseSchedule, "s")
