"""The simulator: every client in this process, nothing serialised."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from effuse.core.algorithm import Job
from effuse.core.data import Shard
from effuse.core.errors import FederationError, TrainingError
from effuse.core.federation import Federation, Order
from effuse.core.machine import Machine
from effuse.core.params import Params
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.spans import span
from effuse.core.visit import each_params, through_wire
from effuse.core.workbench import SERVER, Client, Workbench
from effuse.transport.slots import in_slots
from effuse.transport.state import Snapshots, bound_to
from effuse.transport.worker import Worker
from effuse.transport.write_guard import WriteGuard

T = TypeVar("T")


class InProcess(Federation):
    """A federation whose clients are on this machine; its subclasses differ in what a message goes through."""

    def __init__(
        self, recipe: Recipe, shards: Sequence[Shard], *machines: Machine, snapshots: Callable[[int], Snapshots]
    ) -> None:
        bench = Workbench(machines[0], recipe.task, recipe.rounds)
        super().__init__(recipe.algorithm, range(len(shards)), bench, recipe.seed, recipe.wire)
        self.shards = list(shards)
        # one worker per machine, so that several clients can work at a time
        self.workers = [
            Worker(recipe.algorithm, recipe.seed, self._clients(machine), snapshots, recipe.wire) for machine in machines
        ]
        self.worker = self.workers[0]
        self.streams = [machine.stream for machine in machines]
        self.at_a_time = len(machines)

    def _each(self, job: Callable[[Any, int], T], clients: Sequence[int]) -> Iterator[tuple[int, T]]:
        """Do a job for every client, several at a time where there are several workers."""
        job = self.timed(job)
        if len(self.workers) == 1:
            return ((client, job(self.worker, client)) for client in clients)
        return in_slots(job, clients, self.workers, self.streams, self.workbench.machine.threads, self.stop)

    def timed(self, job: Callable[[Any, int], T]) -> Callable[[Any, int], T]:
        """The same job, whose time is recorded for its client."""

        def done(worker: Any, client: int) -> T:
            began = time.monotonic()
            answer = job(worker, client)
            self.spent(client, time.monotonic() - began)
            return answer

        return done

    def protect(self, protections: Mapping[int, Protection]) -> None:
        """Give the clients and the server what protects their private data."""
        self.workbench.protection = protections.get(SERVER)
        for worker in self.workers:
            worker.protections = protections

    def stop(self) -> None:
        self.workbench.machine.meter.stopped = True  # fits under way end at their next step

    def _clients(self, machine: Machine) -> Callable[[int], Client]:
        def client(k: int) -> Client:
            if not 0 <= k < len(self.shards):
                raise FederationError(f"there is no client {k} here; clients are 0 to {len(self.shards) - 1}")
            return Client(machine, self.workbench.task, self.rounds, k, self.shards[k])

        return client

    def settle(self) -> None:
        for client, name in self.snapshots.items():
            if self.durable.get(client) != name:
                self.worker.snapshots(client).settle(name)

    def pool(self) -> Shard:
        # in the data set's order, so that the pool does not depend on the partition
        return Shard(self.shards[0].dataset, torch.cat([s.rows for s in self.shards]).sort().values)


class Simulator(InProcess):
    """Passes messages on as they are, and checks that no job writes on them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._proven: dict[str, bool] = defaultdict(bool)  # jobs whose first run changed no byte of their message

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        arriving: dict[int, Any] = {}  # a broadcast is rounded once
        for client in orders:
            self._charge("down", client, messages[client])
            key = id(messages[client])
            if key not in arriving:
                with span("wire"):
                    arriving[key] = through_wire(messages[client], self.wire)
        return self._perform(job, orders, {k: arriving[id(m)] for k, m in messages.items()})

    def _perform(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        def one(worker: Worker, client: int) -> tuple[Any, str | None]:
            who = f"job '{job.name}' of {self.algorithm.name}"
            with WriteGuard(messages[client], who, "the message it received", thorough=not self._proven[job.name]):
                reply, snapshot = worker.perform(orders[client], messages[client])
            self._proven[job.name] = True
            with span("wire"):
                for params in each_params(reply):
                    if isinstance(params, Params) and not params.finite():
                        raise TrainingError(
                            f"{who}: client {client} answers with a non-finite number; lower the learning rate"
                        )
                return through_wire(reply, self.wire), snapshot

        for client, (reply, snapshot) in self._each(one, list(orders)):
            self._charge("up", client, reply)
            yield client, reply, snapshot
            del reply  # or it would stay in memory while the next one is made


def on_disk(run: Path) -> Callable[[int], Snapshots]:
    """Each client's folder of states; they need not reach the disk before a checkpoint names them."""
    bound = bound_to(run)
    return lambda client: Snapshots(run / "clients" / str(client), wait=False, run=bound)
