"""The rehearsal: the algorithm's server program on shapes instead of numbers, so that its traffic is exact."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from effuse.core.algorithm import FEDERATE, Job, Server
from effuse.core.data import Shard
from effuse.core.federation import SETUP_T, Order
from effuse.core.model import Model
from effuse.core.privacy import Release
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.workbench import SERVER
from effuse.machines.hollow import Hollow
from effuse.transport.simulator import InProcess
from effuse.transport.state import MemorySnapshots


class Rehearsal(InProcess):
    """Runs jobs on shapes."""

    rehearsing = True

    def __init__(self, recipe: Recipe, shards: Sequence[Shard]) -> None:
        self.recipe, self.machine = recipe, Hollow()
        snapshots: dict[int, MemorySnapshots] = defaultdict(MemorySnapshots)
        self.released: dict[int, list[tuple[int, Release]]] = defaultdict(list)  # client -> (round, release)
        super().__init__(recipe, shards, self.machine, snapshots=snapshots.__getitem__)
        self.worker.on_release = lambda order, release: self.released[order.client].append((order.t, release))
        if recipe.budget is not None:
            self.protect(dict.fromkeys((SERVER, *self.clients), Protection(recipe.budget, None)))

    def prepare(self, model: Model) -> Server:
        """The server's state before the first round, from the initial model."""
        self.begin(SETUP_T, 0)
        server = self.algorithm.setup(model, self)
        self.close()
        return server

    def play(self, model: Model) -> Iterator[str]:
        """Play the whole run; yields the phase of each round."""
        server, t, federated = self.prepare(model), 0, 0
        while not self.recipe.over(server, federated):
            phase = server.phase
            self.begin(t, federated)
            server = self.algorithm.round(server, self)
            self.close()
            federated, t = federated + (phase == FEDERATE), t + 1
            yield phase

    def close(self) -> None:
        super().close()
        self.released[SERVER] += [(self.t, release) for release in self.workbench.releases]
        self.workbench.releases = []

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        for client in orders:
            self._charge("down", client, messages[client])
        return self._perform(orders, messages)

    def _perform(self, orders: dict[int, Order], messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        for client, order in orders.items():
            reply, snapshot = self.worker.perform(order, messages[client])
            self._charge("up", client, reply)
            yield client, reply, snapshot
