"""A lower bound on epsilon from one training (Steinke, Nasr and Jagielski, 2023).

Each of m canaries was trained on or left out by a fair coin. An auditor guesses r of the coins. Under (epsilon, delta)-DP
few guesses can be right, so many right guesses refute small values of epsilon.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.privacy.binomial import CONFIDENCE, at_least, probabilities, root


@dataclasses.dataclass(frozen=True)
class OneRun:
    """The result of guessing the coins of one training."""

    canaries: int  # m
    guesses: int  # r
    right: int  # v
    delta: float
    epsilon: float  # the lower bound
    confidence: float = CONFIDENCE


def audited(scores: Tensor, coins: Tensor, guesses: int, delta: float) -> OneRun:
    """Guess the coins from scores, which are low for images that were trained on, and bound epsilon from below.

    The number of guesses must be chosen before the scores are seen.
    """
    right = right_guesses(scores, coins, guesses)
    return OneRun(len(scores), guesses, right, delta, lower_bound(len(scores), guesses, right, delta))


def right_guesses(scores: Tensor, coins: Tensor, guesses: int) -> int:
    """Guess `in` for the lowest scores and `out` for the highest, half of the guesses each; returns how many are right."""
    if not 1 <= guesses <= len(scores):
        raise RecipeError(f"guesses: {guesses} of {len(scores)} canaries; choose a number from 1 to {len(scores)}")
    order = torch.sort(scores.cpu(), stable=True).indices
    out = guesses // 2
    coins = coins.cpu().bool()[order]
    return int(coins[: guesses - out].sum()) + int((~coins[len(coins) - out :]).sum())


def guesses_by_rule(canaries: int) -> int:
    """The number of guesses where none is given: half of the canaries, known before any score is."""
    return max(1, canaries // 2)


def lower_bound(m: int, r: int, v: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that v right guesses of r refute; 0 where they refute none."""

    def excess(epsilon: float) -> float:
        return p_value(m, r, v, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return root(excess, 0.0, high)


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The largest probability of v or more right guesses among r under (epsilon, delta)-DP."""
    p = 1 / (1 + np.exp(-epsilon))  # e^eps / (1 + e^eps)
    # P[v - i <= Bin < v] for i = 1 ... v
    below = np.cumsum(probabilities(r, p)[:v][::-1])
    worst = float((below / np.arange(1, v + 1)).max()) if v else 0.0
    return min(1.0, at_least(v, r, p) + 2 * m * delta * worst)
