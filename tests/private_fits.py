"""Private fits whose batches and noise a test chooses."""

import dataclasses

import torch
from torch import Tensor

from effuse.core.build import with_values
from effuse.core.data import Shard
from effuse.core.fit import Private, Work
from effuse.core.noise import KeyedNoise, Noise
from effuse.core.privacy import DpSgd
from effuse.core.rng import Stream
from effuse.core.solvers import Solver
from effuse.core.task import Task
from effuse.core.units import PrivacyUnits, held

CPU = torch.device("cpu")
ON_DATA = ("local", "warmup")  # keys of solvers that clients run on their own images


class Chosen(Noise):
    """Batches written down by their units, and one value of noise for every number."""

    def __init__(self, *batches: list[int], value: float = 0.0) -> None:
        self.batches, self.value = list(batches), value

    def included(self, units: int, rate: float) -> Tensor:
        taken = torch.zeros(units, dtype=torch.bool)
        taken[self.batches.pop(0)] = True
        return taken

    def normal(self, n: int, device: torch.device) -> Tensor:
        return torch.full((n,), self.value, device=device)


def private_work(
    solver: Solver,
    shard: Shard,
    task: Task,
    *,
    noise: Noise | None = None,
    groups: list[Tensor] | None = None,
    sigma: float | None = 1.0,
    seed: int = 0,
    **rest,
) -> Work:
    """A fit of a private solver on one image per unit, or on groups."""
    dp, units = solver.privacy, PrivacyUnits(len(shard), groups)
    rate = solver.rate_on(len(units))
    noise = noise or KeyedNoise(Stream((seed, "noise")), shard.dataset.images.device)
    private = Private(dp.clip, sigma, units, rate, dp.repeats, held(dp, len(units), rate), noise)
    values = {"lr": solver.lr, "stream": Stream((seed,)), "place": 0, "where": "round 3, client 7, job train"}
    return Work(solver=solver, task=task, shard=shard, private=private, **values | rest)


def private(algorithm, **dp):
    """The same algorithm with private solvers on the clients' images."""
    changes = {
        f.name: with_values(value, f.name, privacy=DpSgd(**dp))
        for f in dataclasses.fields(algorithm)
        if f.name in ON_DATA and isinstance(value := getattr(algorithm, f.name), Solver)
    }
    return with_values(algorithm, "algorithm", **changes)
