"""How the accuracy went over the rounds of a run: the figures of tables that a single round would leave to chance."""

import statistics
from collections.abc import Sequence

LAST = 5  # evaluations whose mean is reported
LEVELS = (0.2, 0.3, 0.4, 0.6, 0.8)


def accuracy_over_rounds(measured: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Of (round, accuracy): the mean of the last five, the best, and the first round at each level that was reached."""
    if len(measured) < LAST:
        return {}
    values = [accuracy for _, accuracy in measured]
    found = {"accuracy_last5": statistics.fmean(values[-LAST:]), "accuracy_best": max(values)}
    for level in LEVELS:
        reached = [t for t, accuracy in measured if accuracy >= level]
        found |= {f"rounds_to_{level:g}": float(reached[0])} if reached else {}
    return found
