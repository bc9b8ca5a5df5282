"""Binomial probabilities, and the Clopper-Pearson interval of a share."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95  # of every interval and bound of an audit


class Estimate(NamedTuple):
    """A number with its interval."""

    value: float
    low: float
    high: float


def probabilities(n: int, p: float) -> np.ndarray:
    """P[Bin(n, p) = k] for k from 0 to n."""
    k = np.arange(n + 1)
    if p in (0.0, 1.0):
        return (k == n * p).astype(np.float64)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    return np.exp(factorials[n] - factorials - factorials[::-1] + k * math.log(p) + (n - k) * math.log1p(-p))


def at_least(v: int, n: int, p: float) -> float:
    """P[Bin(n, p) >= v]."""
    return min(1.0, float(probabilities(n, p)[v:].sum()))


def share(k: int, n: int, confidence: float = CONFIDENCE) -> Estimate:
    """The share k/n with its exact interval (Clopper and Pearson, 1934)."""
    tail = (1 - confidence) / 2
    low = 0.0 if k == 0 else root(lambda p: at_least(k, n, p) - tail, 0.0, 1.0)
    high = 1.0 if k == n else root(lambda p: at_least(k + 1, n, p) - (1 - tail), 0.0, 1.0)
    return Estimate(k / n, low, high)


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is negative at `low` and not at `high` changes its sign, by bisection."""
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
