"""FedCDA: Wang et al., 2024, Algorithm 1: the server averages models of several rounds, chosen to lie close together."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.core.aggregate import Average
from effuse.core.federation import cohort_size
from effuse.core.model import Net
from effuse.core.params import Mean, Params, mean
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch

MOST = 100_000  # choices of one batch of clients that are compared


@message(name="fedcda.cached")
class Cached:
    """A client's model of one round, and its loss F_n(w_n) on the client's images."""

    client: int
    model: Model
    objective: float


@message(name="fedcda.server")
class CacheServer(Server):
    """The global model, the last models of every client, their inner products, and which of each client's is chosen."""

    cache: tuple[Cached, ...] = ()  # by client, the newest first
    gram: Tensor | None = None  # <w_i, w_j> in fp64; None during warm-up
    chosen: dict[int, int] = dataclasses.field(default_factory=dict)  # by client, the place of its model in the cache


@message(name="fedcda.update")
class CacheUpdate:
    """A client's model after local training, and its loss on all of the client's images."""

    model: Model
    objective: float
    weight: float
    loss: float | None


def error(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss of each image."""
    task: Any = batch.task
    return task.error(net(*task.inputs(batch)), batch)


def product(a: Params, b: Params) -> float:
    """The inner product of two models, which does not depend on what else is multiplied."""
    return float(torch.stack([(x.double() * y.double()).sum() for x, y in zip(a.tensors, b.tensors)]).sum())


def gram_of(cache: Sequence[Cached], before: Mapping[tuple[int, int], float]) -> Tensor:
    """All inner products; those of models that have been multiplied `before`, by their places now, are taken from there."""
    found = torch.zeros(len(cache), len(cache), dtype=torch.float64)
    for i, j in itertools.combinations_with_replacement(range(len(cache)), 2):
        known = before.get((i, j))
        found[i, j] = found[j, i] = product(cache[i].model.params, cache[j].model.params) if known is None else known
    return found


def objectives(F: np.ndarray, gram: np.ndarray, fixed: Sequence[int], choices: np.ndarray, L: float) -> np.ndarray:
    """For each row of choices: mean F_n(w_n) + L/2 (mean |w_n|^2 - |mean w_n|^2), over these models and the fixed ones."""
    n, rest, own = len(fixed) + choices.shape[1], np.array(fixed, int), gram.diagonal()
    total = gram[np.ix_(rest, rest)].sum() + 2 * gram[:, rest].sum(1)[choices].sum(1)
    total = total + gram[choices[:, :, None], choices[:, None, :]].sum((1, 2))  # n^2 |mean w_n|^2
    squares = own[rest].sum() + own[choices].sum(1)
    return (F[rest].sum() + F[choices].sum(1)) / n + L / 2 * (squares / n - total / n**2)


def selected(
    cache: Sequence[Cached], gram: Tensor, chosen: Mapping[int, int], batches: Sequence[Sequence[int]], L: float
) -> dict[int, int]:
    """The best choice of one batch of clients after the other, all others held; of equals, the newest models."""
    F, products, found = np.array([c.objective for c in cache]), gram.numpy(), dict(chosen)
    for batch in batches:
        places = [[i for i, c in enumerate(cache) if c.client == k] for k in batch]
        choices = np.array(list(itertools.product(*places)))
        fixed = [place for k, place in found.items() if k not in batch]
        best = choices[objectives(F, products, fixed, choices, L).argmin()]
        found |= dict(zip(batch, best.tolist()))
    return found


@spec
class FedCDA(FedAvg, name="fedcda"):
    """FedAvg until `warmup`, then the plain mean of one of each client's last models, chosen to be good and close."""

    cache: PositiveInt = 3  # K: models that the server keeps of each client
    batches: PositiveInt = 3  # B: groups of the cohort, whose models are chosen one group after the other
    L: NonNegativeFloat = 1.0  # the weight of the models' spread against their losses
    warmup: NonNegativeInt | Annotated[float, Field(gt=0, le=1)] = 0.5  # rounds of FedAvg first: a count, or a share of all

    def ready(self, clients: int) -> None:
        super().ready(clients)
        if self.aggregate != Average():
            raise RecipeError(
                f"algorithm.aggregate: {self.aggregate}, but {self.name} takes the plain mean of models that it chooses; "
                "leave it out"
            )
        group = -(-cohort_size(self.cohort, clients) // self.batches)
        if self.cache**group > MOST:
            raise RecipeError(
                f"algorithm.batches: {group} clients with {self.cache} models each have {self.cache}^{group} "
                f"choices, of at most {MOST:,}; raise batches or lower cache"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        return CacheServer(model)

    def rounds_before(self, rounds: int) -> int:
        """The rounds of FedAvg that come first."""
        return round(self.warmup * rounds) if isinstance(self.warmup, float) else self.warmup

    def round(self, server: CacheServer, fed: Federation) -> Server:
        average, arrived = Mean[Model](), dict[int, Cached]()
        for client, u in fed.ask(self.train, fed.sample(self.cohort), model=server.model):
            with fed.using(client):
                average.add(u.model, u.weight)
                arrived[client] = Cached(client, u.model, u.objective)
            del u
        cache, now = self.renewed(server.cache, arrived)
        chosen = {k: now[place] for k, place in server.chosen.items() if k not in arrived}
        chosen |= {c.client: place for place, c in reversed(list(enumerate(cache))) if c.client in arrived}
        chosen = dict(sorted(chosen.items()))
        if fed.federated < self.rounds_before(fed.rounds):
            return CacheServer(average.value, cache=cache, chosen=chosen)
        gram = None
        if not fed.rehearsing:  # shapes have no products
            gram = gram_of(cache, self.products(server, now))
            order = fed.workbench.stream("batches").numpy().permutation(list(arrived))
            batches = [part.tolist() for part in np.array_split(order, min(self.batches, len(order)))]
            chosen = selected(cache, gram, chosen, batches, self.L)
        newest = {c.client: place for place, c in reversed(list(enumerate(cache)))}
        fed.note(age={str(k): place - newest[k] for k, place in chosen.items()})
        return CacheServer(mean((cache[p].model, 1.0) for p in chosen.values()), cache=cache, gram=gram, chosen=chosen)

    def renewed(self, cache: Sequence[Cached], arrived: Mapping[int, Cached]) -> tuple[tuple[Cached, ...], dict[int, int]]:
        """The cache with what arrived, by client and the newest first; and the new places of the models that stay."""
        old: dict[int, list[tuple[int, Cached]]] = defaultdict(list)
        for place, c in enumerate(cache):
            old[c.client].append((place, c))
        found: list[Cached] = []
        now: dict[int, int] = {}
        for k in sorted({*old, *arrived}):
            found += [arrived[k]] if k in arrived else []
            for place, c in old[k][: self.cache - (k in arrived)]:
                now[place] = len(found)
                found.append(c)
        return tuple(found), now

    @staticmethod
    def products(server: CacheServer, now: Mapping[int, int]) -> dict[tuple[int, int], float]:
        """The inner products that are known already, by the models' new places."""
        if server.gram is None:
            return {}
        known = server.gram.tolist()
        return {(a, b): known[i][j] for i, a in now.items() for j, b in now.items()}

    @on_client
    def train(self, client: Client, model: Model) -> CacheUpdate:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        found = client.apply(net, error, client.data)
        objective = 0.0 if found.is_meta else float(found.double().mean())
        return CacheUpdate(client.unload(net), objective, self.weight(client), fit.loss)

    def warnings(self, rounds: int) -> list[str]:
        if (before := self.rounds_before(rounds)) < rounds:
            return []
        return [f"algorithm.warmup: all {rounds} rounds are FedAvg's, since no model is chosen in the first {before}"]
