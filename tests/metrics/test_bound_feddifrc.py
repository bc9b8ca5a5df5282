"""FedDifRC's theorems: the oracle numbers, and where they are empty."""

import dataclasses

import pytest

from effuse.core.errors import RecipeError
from effuse.metrics.bound_feddifrc import FLAWS, Theorems

GIVEN = Theorems(B=1.0, classes=10, L2=0.05, L1=2.0, sigma2=0.5, eta=0.05, E=10, xi=1.0, start=2.0)


def test_theorem_1_by_hand():
    """2.3 - 0.0475 * 10 + 2 * 10 * 0.0025 * 0.5 / 2 + 9 * 0.05 * 10 * 0.05 = 2.3 - 0.475 + 0.0125 + 0.225 = 2.0625."""
    found = dataclasses.replace(GIVEN, start=2.3)
    assert found.terms() == pytest.approx({"descent": -0.475, "noise": 0.0125, "aggregation": 0.225})
    assert found.after() == pytest.approx(2.0625)


def test_theorem_2_by_hand():
    """(2 - 2 * 9 * 0.05) / (2 (0.5 + 1)) = 1.1 / 3. At that step the round adds nothing to the loss."""
    assert GIVEN.falls_below() == pytest.approx(0.366667, abs=1e-6)
    assert dataclasses.replace(GIVEN, eta=GIVEN.falls_below()).after() == pytest.approx(GIVEN.start)


def test_theorem_3_by_hand():
    """2 * 2 / (10 * 0.05 * 1.9 - 2 * 10 * 0.0025 * 0.5 - 2 * 9 * 0.05 * 0.5) = 4 / (0.95 - 0.025 - 0.45) = 8.421053."""
    assert GIVEN.rounds() == pytest.approx(8.421053, abs=1e-6)
    assert GIVEN.converges_below() == pytest.approx(1.1 / 3)
    assert dataclasses.replace(GIVEN, eta=0.36).rounds() > 0 and dataclasses.replace(GIVEN, eta=0.37).rounds() is None


def test_both_are_empty_with_ten_classes_and_constants_of_one():
    """B = L2 = L1 = sigma = 1: (2 - 18) / 2 = -8. They hold something only where B, or xi / B, exceeds (|C| - 1) L2."""
    ones = Theorems(classes=10)
    assert ones.falls_below() == pytest.approx(-8) and ones.converges_below() == pytest.approx(-8)
    told = ones.report()
    assert told["theorem 2"]["empty"] and told["theorem 3"]["empty"] and told["theorem 3"]["rounds"] is None
    assert told["flaws"] == list(FLAWS) and len(FLAWS) == 2
    assert Theorems(classes=10, L2=0.11).falls_below() > 0 > Theorems(classes=10, L2=0.12).falls_below()
    assert not GIVEN.report()["theorem 2"]["empty"]


def test_constants_are_checked():
    for wrong, words in (
        ({"B": 0.0}, "B: 0.0 must be a number above nought"),
        ({"eta": float("nan")}, "eta: nan must be"),
        ({"sigma2": -1.0}, "sigma2: -1.0 must be a number, nought or more"),
        ({"classes": 0}, "classes: 0"),
        ({"least": 3.0}, "least: 3.0 must be a number that is no larger than start=2.3"),
    ):
        with pytest.raises(RecipeError, match=words):
            Theorems(**wrong)
