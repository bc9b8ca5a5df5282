"""The rules by which a claim is reproduced, contradicted or neither; docs/results/README.md has them in words."""

import math
import statistics
from collections.abc import Iterable, Sequence

from text import spread

REPRODUCED, CONTRADICTED, UNDECIDED, NOT_TESTABLE = "reproduced", "contradicted", "undecided", "not testable"
AHEAD, BEHIND, LEVEL = "ahead", "behind", "not told apart"
COUNTED = 0.1  # how far a counted figure may be from the printed one, as a share of it
ERRORS = 2  # standard errors that a difference must have
POINTS = 3  # of accuracy, that drawn images may cost
SURE = 96  # per cent on real digits; nearest class means alone have 91


def near(printed: float, deviation: float, ours: float, ours_deviation: float) -> str:
    """Whether two means with their deviations agree: one joint deviation apart, or more than two."""
    apart = abs(ours - printed) / math.hypot(deviation, ours_deviation)
    return REPRODUCED if apart <= 1 else CONTRADICTED if apart > 2 else UNDECIDED


def counted(printed: Iterable[float], ours: Iterable[float]) -> str:
    """Whether figures that need no training are those of the paper."""
    return REPRODUCED if all(abs(b - a) <= COUNTED * a for a, b in zip(printed, ours, strict=True)) else CONTRADICTED


def standing(gains: Sequence[float]) -> str:
    """Where a method stands by its gains over another, seed by seed; one seed tells nothing."""
    deviation = spread(gains)
    if deviation is None:
        return LEVEL
    error = deviation / math.sqrt(len(gains))
    gain = statistics.fmean(gains)
    return AHEAD if gain > ERRORS * error else BEHIND if gain < -ERRORS * error else LEVEL


def order(*standings: str) -> str:
    """The verdict on a claim that a method is ahead of each of some others."""
    if BEHIND in standings:
        return CONTRADICTED
    return REPRODUCED if standings and {*standings} == {AHEAD} else UNDECIDED


def clear(ours: Sequence[float], other: Sequence[float]) -> str:
    """The verdict on a claim of lower numbers from two seeds: ahead on each, by more than the seeds of either differ."""
    if min(len(ours), len(other)) < 2:
        return UNDECIDED
    noise = max(max(found) - min(found) for found in (ours, other))
    gaps = gains(ours, other, lower=True)
    return REPRODUCED if min(gaps) > noise else CONTRADICTED if max(gaps) < -noise else UNDECIDED


def answer(gains: Sequence[float]) -> str:
    """The answer to a question of our own: is one method ahead of another?"""
    return {AHEAD: "yes", BEHIND: "no", LEVEL: UNDECIDED}[standing(gains)]


def close(drawn: Sequence[float], real: Sequence[float]) -> str:
    """Whether a classifier that saw drawn digits alone is good, and near one that saw real ones."""
    if min(len(drawn), len(real)) < 2:  # one seed tells nothing
        return UNDECIDED
    mean, bound = statistics.fmean(drawn), statistics.fmean(real)
    return REPRODUCED if mean >= SURE and bound - mean <= POINTS else CONTRADICTED


def controlled(better: Sequence[float], worse: Sequence[float]) -> str:
    """The answer of a positive control: is the better setting's mean FID lower by two of the larger deviation?"""
    deviations = [deviation for deviation in (spread(better), spread(worse)) if deviation is not None]
    if len(deviations) < 2:  # one seed tells nothing
        return UNDECIDED
    return "yes" if statistics.fmean(worse) - statistics.fmean(better) > 2 * max(deviations) else "no"


def within(ours: Sequence[float], bound: Sequence[float], factor: float) -> str:
    """Whether the mean is at most a multiple of another one."""
    if min(len(ours), len(bound)) < 2:
        return UNDECIDED
    return "yes" if statistics.fmean(ours) <= factor * statistics.fmean(bound) else "no"


def below(ours: Sequence[float], bound: float, seeds: int = 3) -> str:
    """Whether every seed is below a printed number, or none is; fewer seeds tell nothing."""
    passed = [value < bound for value in ours]
    if len(ours) < seeds or len({*passed}) > 1:
        return UNDECIDED
    return "yes" if passed[0] else "no"


def gains(ours: Sequence[float], other: Sequence[float], lower: bool = False) -> list[float]:
    """Differences seed by seed, positive where ours is better; `lower`: small numbers are good."""
    return [(b - a) if lower else (a - b) for a, b in zip(ours, other)]
