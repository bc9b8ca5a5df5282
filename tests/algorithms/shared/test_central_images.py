"""Noisy class means: what is told by hand, and what is made of it."""

import dataclasses

import pytest
import torch
from hand import HandImages
from private_fits import Chosen

from effuse.algorithms.shared.central_images import class_means, copied
from effuse.core.data import Shard
from effuse.core.errors import RecipeError
from effuse.core.privacy import Budget
from effuse.core.protection import Protection
from effuse.core.rng import Stream
from effuse.core.workbench import Client
from effuse.machines.eager import Eager


def client(budget: Budget | None = None, groups=None) -> Client:
    data = dataclasses.replace(HandImages().load("train"), private=budget is not None, groups=groups)
    made = Client(Eager(torch.device("cpu")), None, 1, 0, Shard.whole(data))
    made.begin(Stream((0, 0, "tell")), 0)
    made.protection = None if budget is None else Protection(budget, 0.25)
    return made


def test_means_and_counts_without_noise():
    """Three white pixels of class 0 and a black one of class 1."""
    means, counts = class_means(client(), None)
    assert means.flatten().tolist() == [1.0, -1.0] and counts.tolist() == [3.0, 1.0]


def test_sums_and_counts_are_released_together_with_the_noise_of_both():
    """One pixel has a norm of at most 1, its scaled count of 1: together the root of 2. z = 0.25 is left to the budget.
    The four released values are 3, 3, -1, 1 and noise of 0.25 * 2^(1/2) = 0.35: the counts are within 6 deviations."""
    made = client(Budget(epsilon=5.0))
    means, counts = class_means(made, None)
    assert [(r.what, r.noise) for r in made.releases] == [("class means", 0.25)]
    assert counts.tolist() != [3.0, 1.0]
    assert (counts - torch.tensor([3.0, 1.0])).abs().max() < 6 * 0.25 * 2**0.5
    assert means.abs().max() <= 1.0
    with pytest.raises(RecipeError, match="class means would leave the client without noise"):
        class_means(client(Budget(epsilon=5.0)), 0)


def test_the_noise_on_sums_and_counts_is_that_of_both():
    """Where all noise is one and z is 0.25, every value moves by 0.25 * 2^(1/2): one pixel adds at most (1, 1) to its class.

    Of class 0 that is (3 + d) / (3 + d) and 3 + d; of class 1 (-1 + d) / (1 + d) and 1 + d.
    """
    made, d = client(Budget(epsilon=5.0)), 0.25 * 2**0.5
    made.protection = Protection(Budget(epsilon=5.0), 0.25, noise=lambda stream, device: Chosen(value=1.0))
    means, counts = class_means(made, None)
    assert counts.tolist() == pytest.approx([3 + d, 1 + d])
    assert means.flatten().tolist() == pytest.approx([1.0, (d - 1) / (1 + d)])


def test_noise_that_is_left_to_a_budget_and_never_solved_is_refused():
    """Otherwise the sums would leave as they are."""
    made = client(Budget(epsilon=5.0))
    made.protection = Protection(Budget(epsilon=5.0), None)
    with pytest.raises(RecipeError, match="the noise of class means is not settled"):
        class_means(made, None)
    assert made.releases == []


def test_every_patient_counts_one():
    """Patients 0 and 1 have two images each: white and white, white and black. Weights of a half: class 0 sums to 1.5 of
    brightness and count, class 1 to -0.5 and 0.5. With next to no noise the means are 1 and -1/1: a count below one divides
    by one, so class 1's mean is -0.5."""
    made = client(Budget(epsilon=5.0, unit="group"), groups=torch.tensor([0, 0, 1, 1]))
    assert made.unit_weights.tolist() == [0.5] * 4
    means, counts = class_means(made, 1e-6)
    assert counts.tolist() == pytest.approx([1.5, 0.5], abs=1e-4)
    assert means.flatten().tolist() == pytest.approx([1.0, -0.5], abs=1e-4)


def test_copies_differ_by_fresh_noise_only():
    """A mean of 0 is stored as 128 (127.5 rounds to even); noise of 0.3 has a deviation of 0.3 * 127.5 = 38 of 255."""
    labels = torch.zeros(1000, dtype=torch.int64)
    means = torch.zeros(2, 1, 1, 1)
    plain = copied(means, labels, 0.0, torch.Generator().manual_seed(0))
    assert plain.unique().tolist() == [128]
    noisy = copied(means, labels, 0.3, torch.Generator().manual_seed(0)).float()
    assert noisy.mean().item() == pytest.approx(127.5, abs=5) and noisy.std().item() == pytest.approx(38.0, abs=4)
