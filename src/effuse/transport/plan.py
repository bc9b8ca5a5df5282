"""The privacy plan of a run: what every client will release, the noise that keeps it within the budget, and the spend."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from effuse.core.data import Dataset, Shard
from effuse.core.privacy import Release
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.workbench import SERVER
from effuse.privacy.accountant import epsilon_of, solve
from effuse.transport.refusals import hollow_model
from effuse.transport.rehearsal import Rehearsal

NOT_COVERED = {
    "image": "the number of images of each client, which is public",
    "group": "the numbers of groups and of images of each client, which are public",  # a mean of models weighs by images
}
MANY = 1000  # images of each class at a site that has many
Planned = list[tuple[int, Release]]  # (round, release), in order


class Plan:
    """What each client releases in a run, and the noise of its fits."""

    def __init__(self, recipe: Recipe, planned: dict[int, Planned], only: Sequence[int] | None = None) -> None:
        self.recipe, self.planned = recipe, planned
        budget = recipe.budget
        self.protections: dict[int, Protection] = {}
        if budget is None:
            return
        for client in (SERVER, *range(recipe.clients)) if only is None else only:
            found = [release for _, release in planned.get(client, [])]
            self.protections[client] = Protection(budget, solve(found, budget) or None)

    def releases(self, client: int) -> list[Release]:
        """All releases of a client, with their noise."""
        return self._made(client, self.planned.get(client, []))

    def _made(self, client: int, found: Planned) -> list[Release]:
        sigma = self.protections[client].sigma
        return [r if r.noise is not None else dataclasses.replace(r, noise=sigma) for _, r in found]

    def spent(self, rounds: int | None = None) -> dict[str, Any] | None:
        """What the releases of the first rounds, or of all, cost each client; None without a budget."""
        budget = self.recipe.budget
        if budget is None:
            return None
        clients: dict[str, Any] = {}
        for client, found in self.planned.items():
            if client not in self.protections or not found:
                continue
            sigma = self.protections[client].sigma
            made = self._made(client, [(t, release) for t, release in found if rounds is None or t < rounds])
            spent = epsilon_of(made, budget.delta, budget.accountant) if made else 0.0
            name = "server" if client == SERVER else str(client)
            what = sorted({release.what for release in made})
            clients[name] = {"epsilon": spent, "sigma": sigma, "releases": len(made), "what": what}
        return {
            # sites plan for themselves, each within the budget
            "epsilon": max((c["epsilon"] for c in clients.values()), default=budget.epsilon),
            "delta": budget.delta,
            "budget": budget.epsilon,
            "unit": budget.unit,
            "adjacency": f"one {budget.unit} is replaced by nothing",
            "accountant": budget.accountant,
            "not_covered": NOT_COVERED[budget.unit],
            "clients": clients,
        }


def plan(recipe: Recipe, shards: Sequence[Shard], only: Sequence[int] | None = None) -> Plan:
    """Rehearse a whole run, and solve the noise of each client, or of some."""
    return Plan(recipe, releases(recipe, shards), only)


def stand_in(recipe: Recipe, classes: int, images: int) -> Shard:
    """Data of a site that nobody here has seen: so many images of each class, without values, each a group of its own."""
    side, channels, _ = recipe.model.shape
    labels = torch.arange(classes).repeat(images)
    pixels = torch.empty((len(labels), channels, side, side), dtype=torch.uint8, device="meta")
    data = Dataset(pixels, labels, tuple(map(str, range(classes))), groups=torch.arange(len(labels)))
    return Shard.whole(recipe.protected(data))


def releases(recipe: Recipe, shards: Sequence[Shard]) -> dict[int, Planned]:
    """What each client, and the server where it pools data, would release in a whole run."""
    if recipe.budget is None:
        return {}
    fed = Rehearsal(recipe, shards)
    for _ in fed.play(hollow_model(recipe)):
        pass
    return {client: found for client, found in sorted(fed.released.items()) if found}
