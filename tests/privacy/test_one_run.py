"""The bound on epsilon from one training: published numbers, hand-made guesses, and mechanisms whose epsilon is known."""

import math

import pytest
import torch

from effuse.core.errors import RecipeError
from effuse.core.rng import Stream
from effuse.privacy.one_run import audited, guesses_by_rule, lower_bound, p_value, right_guesses


@pytest.mark.parametrize("m, r, v, bound", [(1000, 100, 90, 1.6261), (1000, 1000, 600, 0.2972), (1000, 1000, 500, 0.0)])
def test_published_bounds(m, r, v, bound):
    assert lower_bound(m, r, v, 1e-5) == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize("r, most", [(100, 3.49), (1000, 5.81), (10_000, 8.11)])
def test_the_most_that_right_guesses_can_show(r, most):
    """All right: p^r = 0.05 with p = e^eps / (1 + e^eps), so eps = ln(p / (1 - p))."""
    p = 0.05 ** (1 / r)
    assert lower_bound(r, r, r, 0.0) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
    assert lower_bound(r, r, r, 0.0) == pytest.approx(most, abs=0.005)


def test_delta_weakens_the_bound():
    """Two canaries, two right guesses, epsilon 0: P[Bin >= 2] = 1/4.

    With i = 1 P[Bin = 1] = 1/2, with i = 2 P[Bin in (0, 1)] / 2 = 3/8: the largest is 1/2, times 2 * 2 * delta.
    """
    assert p_value(2, 2, 2, 0.0, 0.0) == pytest.approx(1 / 4)
    assert p_value(2, 2, 2, 0.0, 0.01) == pytest.approx(1 / 4 + 4 * 0.01 / 2)
    assert lower_bound(1000, 100, 90, 1e-3) < lower_bound(1000, 100, 90, 1e-5) < lower_bound(1000, 100, 90, 0.0)


def test_guesses_are_made_from_both_ends():
    """Sorted by score: in, out, in, in, out, in. Of the lowest two one is in, of the highest two one is out."""
    scores, coins = torch.tensor([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]), torch.tensor([1, 1, 0, 1, 0, 1])
    assert right_guesses(scores, coins, 1) == 1, "the lowest, in"
    assert right_guesses(scores, coins, 2) == 1, "the highest is in, which is wrong"
    assert right_guesses(scores, coins, 4) == 2
    assert right_guesses(scores, 1 - coins, 4) == 2 and right_guesses(-scores, coins, 2) == 1
    assert right_guesses(torch.arange(6.0), torch.tensor([1, 1, 1, 0, 0, 0]), 6) == 6
    assert right_guesses(torch.arange(6.0), torch.tensor([0, 0, 0, 1, 1, 1]), 6) == 0


def test_more_guesses_than_canaries_are_refused():
    for wrong in (0, 7):
        with pytest.raises(RecipeError, match=f"guesses: {wrong} of 6 canaries; choose a number from 1 to 6"):
            right_guesses(torch.zeros(6), torch.zeros(6), wrong)
    assert [guesses_by_rule(m) for m in (1, 2, 3, 1000)] == [1, 1, 1, 500]


def test_scores_that_do_not_know_the_coins_show_nothing():
    """At 95 % confidence about one of twenty seeds may show a bound; here at most ten of a hundred do."""
    shown = 0
    for seed in range(100):
        rng = Stream(("scores", seed)).torch()
        scores, coins = torch.rand(200, generator=rng), torch.rand(200, generator=rng) < 0.5
        shown += audited(scores, coins, 100, 1e-5).epsilon > 0
    assert shown <= 10


def test_the_bound_of_randomised_response_is_near_and_below_its_epsilon():
    """Each coin is told truly with probability e^eps / (1 + e^eps), which is exactly eps-DP; eps = 2 here, m = 5000."""
    rng = Stream(("response",)).torch()
    coins = torch.rand(5000, generator=rng) < 0.5
    told = coins ^ (torch.rand(5000, generator=rng) > math.exp(2) / (1 + math.exp(2)))
    found = audited((~told).float() + 0.1 * torch.rand(5000, generator=rng), coins, 2500, 0.0)
    assert 1.7 < found.epsilon < 2.0 and (found.canaries, found.guesses) == (5000, 2500)
