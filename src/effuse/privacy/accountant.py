"""What releases compose to, and the noise that a budget asks for.

Neighbouring data sets differ in one unit, which is replaced by nothing: the accounting of add-or-remove.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Sequence

from effuse.core.errors import RecipeError, RunError
from effuse.core.files import cache_folder, write_atomically
from effuse.core.privacy import Accountant, Budget, Release
from effuse.privacy.renyi import renyi_epsilon

GRID = 1e-4  # of privacy losses
FINE = 1e-10  # below this delta, rounding in the Fourier transforms of a loss distribution counts
HUGE = 500.0  # above this epsilon, a loss distribution would need gigabytes
TOLERANCE = 1e-4  # of the logarithm of a solved sigma
MOST = 1e6  # the largest sigma that is tried


def epsilon_of(releases: Sequence[Release], delta: float, accountant: Accountant = "pld") -> float:
    """The epsilon that releases compose to at this delta; never too small.

    Privacy loss distributions give the smaller of their own bound and that of Renyi divergences: both are proofs.
    """
    if not 0 < delta < 1:
        raise RecipeError(f"delta is {delta}; it must lie between 0 and 1")
    return _epsilon(merged(releases), delta, accountant)


def solve(releases: Sequence[Release], budget: Budget) -> float:
    """The smallest sigma that, put in for every `noise=None`, keeps the budget; 0 where there is none to put in.

    It is at most 1e-4 of itself too large, and never too small.
    """
    fixed, asked = merged([r for r in releases if r.noise is not None]), merged(releases)
    spent = _epsilon(fixed, budget.delta, budget.accountant)
    if spent > budget.epsilon:
        said = ", ".join(sorted({r.what for r in releases if r.noise is not None}))
        raise RecipeError(
            f"{said}: these releases alone cost epsilon {spent:.4g}, and the budget is {budget.epsilon:g}; "
            "give them more noise, or raise the budget"
        )
    return _solved(asked, budget) if fixed != asked else 0.0


def merged(releases: Sequence[Release]) -> tuple[Release, ...]:
    """Releases in one order, without their names, equal ones as one of more steps: what a composition depends on."""
    steps: dict[Release, int] = collections.Counter()
    for release in releases:
        _checked(release)
        steps[dataclasses.replace(release, what="", steps=1)] += release.steps
    made = [dataclasses.replace(release, steps=n) for release, n in steps.items()]
    return tuple(sorted(made, key=lambda r: (r.kind, r.noise or 0.0, r.rate)))


def _checked(release: Release) -> None:
    """Refuse a release that no accountant can judge."""
    if release.noise is not None and not 0 < release.noise < math.inf:
        raise RecipeError(f"{release.what}: the noise of a release is {release.noise}; it must be a positive number")
    if not 0 < release.rate <= 1:
        raise RecipeError(f"{release.what}: the rate of a release is {release.rate}; it must be in (0, 1]")
    if release.steps < 1:
        raise RecipeError(f"{release.what}: a release has {release.steps} steps; it must have at least one")
    if release.kind == "laplace" and (release.rate < 1 or release.noise is None):
        raise RecipeError(
            f"{release.what}: Laplace noise is accounted on all data and with a given scale only; use gaussian"
        )


@functools.lru_cache(maxsize=4096)
def _epsilon(releases: tuple[Release, ...], delta: float, accountant: Accountant) -> float:
    if any(release.noise is None for release in releases):
        raise RecipeError("the noise of a release is not known yet; solve it from a budget")
    if not releases:
        return 0.0
    renyi = renyi_epsilon(releases, delta)
    if accountant == "rdp" or delta < FINE or renyi > HUGE:
        return renyi
    from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent  # slow to import
    from dp_accounting.pld import PLDAccountant

    losses = PLDAccountant(value_discretization_interval=GRID)
    for release in releases:
        event = GaussianDpEvent(release.noise) if release.kind == "gaussian" else LaplaceDpEvent(release.noise)
        losses.compose(event if release.rate == 1 else PoissonSampledDpEvent(release.rate, event), release.steps)
    return min(renyi, float(losses.get_epsilon(delta)))


@functools.lru_cache(maxsize=4096)
def _solved(releases: tuple[Release, ...], budget: Budget) -> float:
    """A solved sigma, from a file named after everything that it depends on."""
    place = repr((releases, budget, GRID, TOLERANCE, importlib.metadata.version("dp-accounting")))
    path = cache_folder() / "sigma" / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # a damaged file counts as missing
        saved = json.loads(path.read_text())
        if saved["of"] == place and saved["sigma"] > 0:
            return float(saved["sigma"])
    sigma = _computed(releases, budget)
    with contextlib.suppress(OSError, RunError):  # it saves seconds; no run should fail for it
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"of": place, "sigma": sigma}).encode(), wait=False)
    return sigma


def _computed(releases: tuple[Release, ...], budget: Budget) -> float:
    def epsilon(sigma: float, accountant: Accountant) -> float:
        known = [r if r.noise is not None else dataclasses.replace(r, noise=sigma) for r in releases]
        return _epsilon(merged(known), budget.delta, accountant)

    guess = _smallest(lambda sigma: epsilon(sigma, "rdp"), budget.epsilon, 1.0)
    found = guess
    if budget.accountant == "pld":  # Renyi divergences take a millisecond, and ask for a few per cent more
        found = _smallest(lambda sigma: epsilon(sigma, "pld"), budget.epsilon, guess or 1.0)
    if found is None:
        raise RecipeError(
            f"no noise keeps epsilon {budget.epsilon:g} at delta {budget.delta:g}: "
            "the other releases leave next to nothing; give them more noise, or raise the budget"
        )
    return found


def _smallest(epsilon: Callable[[float], float], budget: float, guess: float) -> float | None:
    """The smallest sigma within the budget, to the tolerance and on the safe side; None where no sigma is."""
    from scipy.optimize import brentq  # slow to import

    @functools.cache
    def excess(x: float) -> float:
        """By how much sigma = exp(x) exceeds the budget, as a logarithm."""
        return math.log(max(epsilon(math.exp(x)), 1e-300) / budget)

    high = math.log(guess)
    while excess(high) > 0:
        high += 0.5
        if high > math.log(MOST):
            return None
    low = high - 0.1
    while excess(low) <= 0:
        low, high = low - 0.5, low
    x = brentq(excess, low, high, xtol=TOLERANCE / 4, rtol=TOLERANCE / 100)
    while excess(x) > 0:
        x += TOLERANCE / 4
    return math.exp(x)
