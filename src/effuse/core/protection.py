"""How a workbench protects private data, and what it refuses to do with them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from effuse.core.data import Shard
from effuse.core.errors import RecipeError
from effuse.core.fit import Private
from effuse.core.model import Net
from effuse.core.noise import KeyedNoise, Noise, Numbers
from effuse.core.privacy import Budget, Release
from effuse.core.rng import Stream
from effuse.core.solvers import Solver
from effuse.core.units import PrivacyUnits, held


class Protection(NamedTuple):
    """A site's promise, and what keeps it."""

    budget: Budget
    sigma: float | None  # of fits that leave it to the budget; None in a rehearsal, which finds out what it must cover
    noise: Callable[[Stream, torch.device], Noise] = KeyedNoise
    numbers: Callable[[Stream], Numbers] = Stream.numpy  # of disclosed counts


def protected(
    protection: Protection | None,
    net: Net,
    solver: Solver,
    data: Shard,
    noise: Callable[[], Noise],
    uphill: float | None,
) -> tuple[Private | None, Release | None]:
    """How a fit protects private data, and what it releases; None for other data."""
    dp = solver.privacy
    if not data.dataset.private:
        if dp is not None and protection is None:
            raise RecipeError("a solver has privacy, but the recipe has no budget; set budget=budget(epsilon=10.0)")
        return None, None
    if protection is None:
        raise RecipeError("private images reached a workbench that does not protect them")
    if dp is None:
        raise RecipeError(
            f"the recipe has a budget, but its solver {solver.name} trains on private images without noise; "
            "give it privacy=dp_sgd()"
        )
    if uphill is not None:
        raise RecipeError("a sharpness-aware step climbs along a gradient without noise, so it is not private")
    refuse_batch_norm(net)
    units = PrivacyUnits.of(data, protection.budget)
    rate, sigma = solver.rate_on(len(units)), dp.sigma or protection.sigma
    release = Release("fit", noise=sigma, rate=rate, steps=solver.steps_on(len(units)))
    return Private(dp.clip, sigma, units, rate, dp.repeats, held(dp, len(units), rate), noise()), release


def refuse_batch_norm(net: Net) -> None:
    """Refuse a network whose normalisation mixes the images of a batch."""
    for name, module in net.module.named_modules():
        if isinstance(module, _BatchNorm):
            raise RecipeError(
                f"{net.arch.name}: layer '{name}' normalises over the images of a batch, so that no image has a gradient of "
                "its own; use norm=group"
            )
