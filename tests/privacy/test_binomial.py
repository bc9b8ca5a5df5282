"""Binomial tails and the interval of a share, by hand."""

import pytest

from effuse.privacy.binomial import at_least, probabilities, root, share


def test_the_probabilities_of_four_fair_coins():
    """1, 4, 6, 4, 1 of 16; three or more heads: 5 of 16."""
    assert probabilities(4, 0.5) == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16])
    assert at_least(3, 4, 0.5) == pytest.approx(5 / 16) and at_least(0, 4, 0.5) == pytest.approx(1)
    assert at_least(5, 4, 0.5) == 0
    assert probabilities(3, 0.0).tolist() == [1, 0, 0, 0] and probabilities(3, 1.0).tolist() == [0, 0, 0, 1]


def test_ten_thousand_coins_lose_nothing():
    assert probabilities(10_000, 0.3).sum() == pytest.approx(1, abs=1e-9)


def test_the_exact_interval_of_a_share():
    """None of n: the upper limit p solves (1 - p)^n = 0.025. At each limit the tail beyond the count has 2.5 %."""
    none = share(0, 100)
    assert (none.value, none.low) == (0, 0) and (1 - none.high) ** 100 == pytest.approx(0.025)
    every = share(100, 100)
    assert (every.value, every.high) == (1, 1) and every.low == pytest.approx(1 - none.high)
    some = share(3, 20)
    assert at_least(3, 20, some.low) == pytest.approx(0.025) and 1 - at_least(4, 20, some.high) == pytest.approx(0.025)


def test_a_root_is_where_the_sign_changes():
    assert root(lambda x: x * x - 2, 0, 2) == pytest.approx(2**0.5)
