"""The units that a budget protects: single images, or all images of a group."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import RecipeError
from effuse.core.privacy import Budget, DpSgd

HELD = 160  # rows in memory at a time, unless the recipe says otherwise
ROUNDED = 16  # rows: clients of similar sizes hold equally many, so that they share a recorded step


class PrivacyUnits:
    """The units of a shard, each with the positions of its images."""

    def __init__(self, images: int, groups: Sequence[Tensor] | None = None) -> None:
        self.images, self.groups = images, groups

    @classmethod
    def of(cls, shard: Shard, budget: Budget) -> "PrivacyUnits":
        if budget.unit == "image":
            return cls(len(shard))
        groups = shard.dataset.groups
        if groups is None:
            raise RecipeError("budget.unit: the data has no groups; use unit=image, or data that names them")
        own = groups[shard.rows.to(groups.device)].cpu()
        order = own.argsort(stable=True)
        return cls(len(shard), order.split(own[order].unique_consecutive(return_counts=True)[1].tolist()))

    def __len__(self) -> int:
        return self.images if self.groups is None else len(self.groups)

    def rows(self, units: Tensor, repeats: int, generator: torch.Generator) -> Tensor:
        """`repeats` positions of each unit: one image repeated, or images of the group, different ones first."""
        if self.groups is None:
            return units.repeat_interleave(repeats)
        members = [self.groups[u] for u in units.tolist()]
        shuffled = [m[torch.randperm(len(m), generator=generator)] for m in members]
        return torch.cat([m.repeat(math.ceil(repeats / len(m)))[:repeats] for m in shuffled])

    @property
    def weights(self) -> Tensor:
        """A weight for each image with which every unit counts one."""
        weights = torch.ones(self.images)
        for group in self.groups or ():
            weights[group] = 1 / len(group)
        return weights


def held(dp: DpSgd, units: int, rate: float) -> int:
    """How many units are in memory at a time: most Poisson batches fit in the least number of equal parts, rounded up."""
    if dp.physical is not None:
        return dp.physical
    most = rate * units + 1.4 * math.sqrt(units * rate * (1 - rate))
    parts = math.ceil(most * dp.repeats / HELD)
    return rounded(most / parts, dp.repeats)


def rounded(units: float, repeats: int) -> int:
    """So many units, rounded up to sixteen rows."""
    step = max(1, ROUNDED // repeats)
    return step * math.ceil(units / step)
