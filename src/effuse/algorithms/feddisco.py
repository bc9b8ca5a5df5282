"""FedDisco: Ye et al., 2023: clients whose labels are far from uniform weigh less in the mean."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import NonNegativeFloat

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.shared.labels import Histogram, spent_on, told
from effuse.core.aggregate import Average
from effuse.core.capabilities import Discloses
from effuse.core.errors import WireError
from effuse.core.prelude import Client, Federation, Model, RecipeError, Server, message, on_client, spec
from effuse.core.reducers import Clipped
from effuse.privacy.histogram import Disclosure, Exact


@message(name="feddisco.told")
class Told(Histogram):
    """A client's disclosed histogram, and what it weighs in FedAvg."""

    weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight > 0:
            raise WireError(f"feddisco: the weight {self.weight:g} is not positive")


@message(name="feddisco.member")
class Member:
    """What the server knows of a client."""

    counts: tuple[float, ...]
    weight: float


@message(name="feddisco.server")
class DiscoServer(Server):
    """The global model, and what clients have told."""

    members: dict[int, Member] = dataclasses.field(default_factory=dict)


def divergence(counts: Sequence[float]) -> float:
    """The KL divergence of the distribution of labels from the uniform one; nought where nothing was counted."""
    total = sum(counts)
    return sum(n / total * math.log(n / total * len(counts)) for n in counts if n > 0)


def discrepancy_aware(members: Mapping[int, Member], a: float, b: float) -> dict[int, float]:
    """p_k = ReLU(n_k / sum n - a d_k + b), normalised, with d normalised over these clients."""
    d = {k: divergence(member.counts) for k, member in members.items()}
    n, far = sum(member.weight for member in members.values()), sum(d.values())
    size = {k: member.weight / n for k, member in members.items()}
    p = {k: max(0.0, size[k] - a * (d[k] / far if far else 0.0) + b) for k in members}
    total = sum(p.values())
    return {k: value / total for k, value in p.items()} if total else size


@spec
class FedDisco(FedAvg, Discloses, name="feddisco"):
    """FedAvg whose weights fall with the distance of a client's labels from uniform ones."""

    a: NonNegativeFloat = 0.5  # the weight of that distance
    b: float = 0.1  # the offset of all weights
    histogram: Disclosure = Exact()

    def ready(self, clients: int) -> None:
        super().ready(clients)
        plain = isinstance(self.aggregate, Average) and not self.aggregate.weights and self.aggregate.cap is None
        if type(self.aggregate) not in (Average, Clipped) or not plain:
            raise RecipeError(
                f"algorithm.aggregate: {self.aggregate} ignores the weights that {self.name} computes; "
                "use mean() or clipped(norm)"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        return DiscoServer(model)

    def round(self, server: DiscoServer, fed: Federation) -> Server:
        S, members = fed.sample(self.cohort), dict(server.members)
        if not members.keys() >= set(S):  # all of S are asked: the silent ones alone could not meet a quorum
            for client, answer in fed.ask(self.enrol, S):
                with fed.using(client):
                    members[client] = Member(answer.histogram, answer.weight)
            fed.note(histograms={str(k): members[k].counts for k in sorted(members.keys() - server.members.keys())})
            S = [k for k in S if k in members]
        p = discrepancy_aware({k: members[k] for k in S}, self.a, self.b)
        fed.note(weights={str(k): value for k, value in p.items()})
        # in a group, since those that have a weight may all be silent
        group = dict.fromkeys(S, "all")
        means = fed.mean(self.train, S, by=self.aggregate, weight=p, group=group, model=server.model)
        found = means["all"]
        return DiscoServer(found.value.model if found.weight else server.model, members=members)

    @on_client(covered=True)
    def enrol(self, client: Client) -> Told:
        return Told(torch.tensor(told(client, self.histogram)), self.weight(client))

    def spent(self, server: Server) -> dict[str, Any] | None:
        return spent_on(self.histogram)
