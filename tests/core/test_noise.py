"""The noise of simulations: keyed by a stream, fresh in every call."""

import torch

from effuse.core.noise import KeyedNoise
from effuse.core.rng import Stream

CPU = torch.device("cpu")
HERE = Stream((1, 2, "fit"))


def drawn(stream: Stream) -> list[torch.Tensor]:
    noise = KeyedNoise(stream, CPU)
    return [noise.normal(50, CPU), noise.included(50, 0.5), noise.normal(50, CPU), noise.included(50, 0.5)]


def test_one_stream_repeats_and_another_differs():
    ours, again, other = drawn(HERE), drawn(HERE), drawn(HERE.child("other"))
    for mine, same, different in zip(ours, again, other):
        assert torch.equal(mine, same) and not torch.equal(mine, different)


def test_every_call_gives_fresh_values():
    first, took, second, takes = drawn(HERE)
    assert not set(first.tolist()) & set(second.tolist()) and not torch.equal(took, takes)


def test_batches_and_noise_do_not_depend_on_each_other():
    """A step that draws twice as much noise takes the same batches."""
    noise = KeyedNoise(HERE, CPU)
    noise.normal(100, CPU)
    _, took, _, takes = drawn(HERE)
    assert torch.equal(noise.included(50, 0.5), took) and torch.equal(noise.included(50, 0.5), takes)


def test_rates_of_zero_and_one_are_exact_and_others_are_met():
    """A share of 0.3 among 100,000 has a standard error of 0.00145."""
    noise = KeyedNoise(HERE, CPU)
    assert not noise.included(1000, 0.0).any() and noise.included(1000, 1.0).all()
    assert abs(noise.included(100_000, 0.3).double().mean() - 0.3) < 5 * 0.00145
    assert noise.included(0, 0.5).shape == (0,) and noise.included(3, 0.5).dtype == torch.bool


def test_noise_is_standard_normal():
    """Mean and standard deviation of 100,000 numbers have standard errors of 0.0032 and 0.0022."""
    drawn = KeyedNoise(HERE, CPU).normal(100_000, CPU)
    assert drawn.dtype == torch.float32 and abs(drawn.mean()) < 5 * 0.0032 and abs(drawn.std() - 1) < 5 * 0.0022
