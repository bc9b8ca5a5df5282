"""FedPhD's scores and edge probabilities by hand, and the balance of load that follows from them."""

import sys
from pathlib import Path

import numpy as np
import pytest

from effuse.algorithms.shared.homogeneity import edge_probabilities, homogeneity

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from edge_balance import room, simulated

UNIFORM = np.full(10, 0.1)


def images(*classes: int, n: int = 2500) -> np.ndarray:
    """A histogram of n images, evenly over some of ten classes."""
    counts = np.zeros(10)
    counts[list(classes)] = n / len(classes)
    return counts


def test_homogeneity():
    """mu = 2 - sqrt(1/k - 1/n) for k equal classes out of n: 1.367544 for 2 of 10, 2 for all, 2 - sqrt(0.9) for one."""
    assert homogeneity(images(0, 1), UNIFORM) == pytest.approx(1.367544, abs=1e-6)
    assert homogeneity(images(*range(10)), UNIFORM) == pytest.approx(2.0)
    assert homogeneity(images(3), UNIFORM) == pytest.approx(2 - 0.9**0.5)
    assert homogeneity(np.zeros(10), UNIFORM) == 2.0, "an empty histogram counts as the target"
    assert homogeneity(images(0, 1), images(0, 1) / 2500) == 2.0, "a known target takes the place of the uniform one"


def test_choices_of_an_edge():
    """a=15000, b=0, clients of 2500 images in two classes. Edge 0 has the same classes, edge 1 two others.

    15000 * 1.367544 - 5000 = 15513.167 against 15000 * 1.612702 - 5000 = 19190.525. An empty edge 1 has
    15000 * 1.367544 - 2500 = 18013.167. Two empty edges are equally likely.
    """
    own = images(0, 1)
    same, other, empty = images(0, 1), images(2, 3), np.zeros(10)
    P = edge_probabilities(own, np.array([same, other]), 15_000, 0, UNIFORM)
    assert pytest.approx([0.447018, 0.552982], abs=1e-6) == P
    assert P[0] / P[1] == pytest.approx(15513.167 / 19190.525, rel=1e-6)
    assert edge_probabilities(own, np.array([other, empty]), 15_000, 0, UNIFORM) == pytest.approx(
        [0.515823, 0.484177], abs=1e-6
    )
    assert edge_probabilities(own, np.array([empty, empty]), 15_000, 0, UNIFORM).tolist() == [0.5, 0.5]
    full = np.array([images(0, 1, n=90_000), images(2, 3, n=90_000)])
    assert edge_probabilities(own, full, 15_000, 0, UNIFORM).tolist() == [0.5, 0.5], "ReLU leaves neither: equally likely"
    several = edge_probabilities(np.array([own, images(2, 3)]), np.array([same, other]), 15_000, 0, UNIFORM)
    assert several[0] == pytest.approx(P) and several[1] == pytest.approx(P[::-1])


@pytest.mark.parametrize(
    ("options", "variance"),
    [
        ({}, (0.70, 0.83)),  # the published 0.72
        ({"a": 20_000.0}, (1.7, 2.3)),
        ({"a": 50_000.0}, (3.9, 5.0)),
        ({"snapshot": False}, (0.05, 0.25)),
        ({"selection": "random"}, (4.5, 5.5)),
    ],
)
def test_the_balance_of_load(options, variance):
    """20 clients of two classes, 4 a round, 2 edges, 5 rounds a cycle, 2,000 cycles: the number of clients at edge 0."""
    found = simulated(2000, **options)
    assert found.assigned[:, 0].mean() == pytest.approx(10, abs=0.15)
    assert variance[0] < found.variance < variance[1]
    assert found.scores.mean() == pytest.approx(1.815, abs=0.015), "the policy balances load; it hardly mixes classes better"


@pytest.mark.parametrize("per_edge", [2, 4, 6, 8])
@pytest.mark.parametrize("edges", [2, 3, 4])
def test_the_balance_of_load_in_larger_trees(edges, per_edge):
    """Fig. 6: C/N_e of 2 to 8 and more than two edges. By Eq. 25 the variance is less than half of random choice's."""
    shape = {"clients": 5 * per_edge * edges, "cohort": per_edge * edges, "edges": edges, "b": room(per_edge)}
    policy, random = (simulated(400, selection=s, **shape) for s in ("homogeneity", "random"))
    assert policy.assigned.mean(0) == pytest.approx([5 * per_edge] * edges, rel=0.05)
    assert policy.variance < 0.5 * random.variance
    assert random.variance == pytest.approx(5 * per_edge * edges * (1 / edges) * (1 - 1 / edges), rel=0.25), "binomial"
