"""Renyi divergences of releases (Mironov, 2017; Mironov, Talwar and Zhang, 2019)."""

import math
from collections.abc import Iterable

import numpy as np

from effuse.core.privacy import Release

ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024])  # alpha
SMALL = 0.1  # below this noise the integral would need too many points


def renyi_epsilon(releases: Iterable[Release], delta: float) -> float:
    """The epsilon that releases compose to by Renyi divergences, at the best order."""
    from dp_accounting.rdp import compute_epsilon  # slow to import

    with np.errstate(over="ignore", divide="ignore"):  # an infinite divergence is an infinite epsilon, which no cap allows
        total = sum((release.steps * divergence(release) for release in releases), np.zeros_like(ORDERS))
    return float(compute_epsilon(ORDERS, total, delta)[0])


def divergence(release: Release) -> np.ndarray:
    """The Renyi divergence of one step at each order."""
    noise = min(release.noise or math.nan, 1e150)  # the square of more is no number
    if release.kind == "laplace":  # Mironov (2017), Table II
        near = np.log(ORDERS / (2 * ORDERS - 1)) + (ORDERS - 1) / noise
        far = np.log((ORDERS - 1) / (2 * ORDERS - 1)) - ORDERS / noise
        return np.logaddexp(near, far) / (ORDERS - 1)
    if release.rate == 1 or noise < SMALL:  # sampling never raises the divergence
        return ORDERS / (2 * noise**2)
    return np.array([_sampled(alpha, noise, release.rate) for alpha in ORDERS])


def _sampled(alpha: float, sigma: float, q: float) -> float:
    """The divergence of a sampled Gaussian: log E[(1 - q + q exp((2z - 1) / 2 sigma^2))^alpha] / (alpha - 1).

    z is of N(0, sigma^2) (Mironov, Talwar and Zhang, Eq. 2). dp-accounting sums a series whose terms alternate at fractional
    orders, and adds their absolute values: at sigma 0.5 its epsilon is 10 % too large. The trapezoidal rule is exact to
    exp(-30) at this step, because the nearest pole of the integrand lies pi sigma^2 off the axis.
    """
    step = min(sigma**2 / 2, sigma / 4)
    z = np.arange(-12 * sigma, alpha + 12 * sigma, step)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
    terms = alpha * ratio - z**2 / (2 * sigma**2)
    top = terms.max()
    moment = top + math.log(np.exp(terms - top).sum()) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
    return max(moment, 0.0) / (alpha - 1)
