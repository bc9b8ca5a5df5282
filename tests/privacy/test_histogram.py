"""Noise on counts: its size, its charge, and its distribution."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hand import HandImages

from effuse.core.data import Shard
from effuse.core.privacy import Budget
from effuse.core.protection import Protection
from effuse.core.rng import Stream
from effuse.core.workbench import Client
from effuse.machines.eager import Eager
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.histogram import Exact, Gaussian, Laplace, gaussian_delta
from effuse.privacy.noise import SecureNoise, SecureNumbers

MANY = [1000] * 20_000


def test_exact_counts_are_unchanged():
    assert Exact().disclosed([3, 0, 5], Stream((0,))) == [3.0, 0.0, 5.0] and Exact().charge is None


def test_laplace_noise_has_scale_one_over_epsilon():
    """Standard deviation sqrt(2) / epsilon = 2.83 at epsilon 0.5, over 20,000 draws within 3 %."""
    disclosed = np.array(Laplace(epsilon=0.5).disclosed(MANY, Stream((0,))))
    assert disclosed.std() == pytest.approx(2 * math.sqrt(2), rel=0.03) and disclosed.mean() == pytest.approx(1000, abs=0.1)
    assert Laplace(epsilon=0.5).charge == (0.5, 0.0)


@pytest.mark.parametrize("mechanism", [Laplace(epsilon=0.5), Gaussian(epsilon=1.0)])
def test_what_an_accountant_is_told_is_the_noise_that_is_added(mechanism):
    """Adding or removing one image changes one count by one, so the noise over the sensitivity is its scale.

    A disclosure books what its own formula charges: at its own delta the accountant finds its own epsilon.
    """
    asked = {}

    class Watching:
        def laplace(self, loc, scale, size):
            return asked.setdefault("laplace", scale) * np.zeros(size)

        def normal(self, loc, scale, size):
            return asked.setdefault("gaussian", scale) * np.zeros(size)

    mechanism.noise(3, Watching())
    release = mechanism.release
    assert asked == {release.kind: release.noise} and (release.rate, release.steps) == (1.0, 1)
    epsilon, delta = mechanism.charge
    assert epsilon_of([release], delta or 1e-9) == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize("unit, told", [("image", [3.0, 1.0]), ("group", [2.0, 2.0])])
def test_under_a_budget_every_unit_counts_one(unit, told):
    """Three images of class 0 belong to one patient, one of class 1 to another. By patient the counts are 1 and 1, which
    are scaled to the four images. The noise of one is added before: 1 * 4 / 2 for patients."""

    class Ones:
        def normal(self, loc, scale, size):
            return np.ones(size)

    data = dataclasses.replace(HandImages().load("train"), private=True, groups=torch.tensor([0, 0, 0, 1]))
    client = Client(Eager(torch.device("cpu")), None, 1, 0, Shard.whole(data))
    client.begin(Stream((0, 0, "tell")), 0)
    client.protection = Protection(Budget(epsilon=5.0, unit=unit), None, numbers=lambda stream: Ones())
    added = 1.0 if unit == "image" else 2.0
    assert Gaussian(epsilon=1.0).of(client, Stream((0,))) == [n + added for n in told]
    assert client.releases == [Gaussian(epsilon=1.0).release]


def test_gaussian_noise_is_minimal():
    """Balle and Wang's condition holds with equality.

    For epsilon 1, delta 1e-5 sigma is 3.73; the classical bound is 4.84.
    """
    mechanism = Gaussian(epsilon=1.0, delta=1e-5)
    assert gaussian_delta(1.0, mechanism.sigma) == pytest.approx(1e-5, rel=1e-6)
    assert mechanism.sigma == pytest.approx(3.7306, abs=1e-3) and mechanism.sigma < math.sqrt(2 * math.log(1.25e5))
    disclosed = np.array(mechanism.disclosed(MANY, Stream((0,))))
    assert disclosed.std() == pytest.approx(mechanism.sigma, rel=0.03) and mechanism.charge == (1.0, 1e-5)


def test_negative_counts_are_clipped_and_a_stream_repeats():
    disclosed = [Laplace(epsilon=0.1).disclosed([0] * 100, Stream((seed,))) for seed in (0, 0, 1)]
    assert min(disclosed[0]) == 0.0 < max(disclosed[0]) and disclosed[0] == disclosed[1] != disclosed[2]


def test_laplace_noise_of_four_normals():
    """Standard deviation sqrt(2) / epsilon = 2.83 at epsilon 0.5, and a mean deviation of 1 / epsilon = 2."""
    rng = SecureNumbers(SecureNoise(bytes(32), bytes(16)))
    noise = Laplace(epsilon=0.5).noise(100_000, rng)
    assert noise.std() == pytest.approx(2 * math.sqrt(2), rel=0.02) and noise.mean() == pytest.approx(0, abs=0.05)
    assert np.abs(noise).mean() == pytest.approx(2.0, rel=0.02)
    assert (noise > 2 * math.log(10)).mean() == pytest.approx(0.05, rel=0.05), "P(X > s log 10) = 1 / 20"
