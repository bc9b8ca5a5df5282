"""The client's side of every engine: it carries out orders on the machine that holds the data."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from effuse.core.algorithm import Algorithm, fields_of, job_of
from effuse.core.errors import RecipeError
from effuse.core.federation import Order
from effuse.core.message import message
from effuse.core.privacy import Release
from effuse.core.protection import Protection
from effuse.core.rng import stream
from effuse.core.spans import span
from effuse.core.visit import copied, placed
from effuse.core.wire import decode, encode
from effuse.core.workbench import Client
from effuse.transport.state import Snapshots, bytes_in
from effuse.transport.write_guard import WriteGuard, tensors_in

CPU = torch.device("cpu")


@message(name="receipt")
class Receipt:
    """The head of every reply: whose it is, to which order, and the snapshot of the client's state after the job."""

    client: int
    t: int
    call: int
    snapshot: str | None


def message_digest(message: Any, kind: type) -> str:
    """The digest of a message's content, equal on every engine; of its shapes in a rehearsal."""
    if any(tensor.is_meta for tensor in tensors_in(message)):
        return "rehearsed"
    return hashlib.blake2b(encode(message, kind), digest_size=16).hexdigest()


class StateCache:
    """The last state of each client, so that it is not read from disk again.

    A state is found by the name of its snapshot. It lies in CPU memory, and is copied on its way in and out, so that a job
    cannot change it.
    """

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit  # bytes of all states together
        self._states: dict[int, tuple[str, dict[str, Any], int]] = {}  # in the order of last use

    def get(self, client: int, name: str | None) -> dict[str, Any] | None:
        found = self._states.get(client)
        if found is None or found[0] != name:
            return None
        self._states[client] = self._states.pop(client)
        return {k: copied(v) for k, v in found[1].items()}  # the caller moves it to its device

    def put(self, client: int, name: str | None, state: dict[str, Any]) -> None:
        self._states.pop(client, None)
        size = bytes_in(list(state.values()))
        if name is None or size > self.limit:
            return
        self._states[client] = name, {k: copied(placed(v, CPU)) for k, v in state.items()}, size
        while sum(size for _, _, size in self._states.values()) > self.limit:
            self._states.pop(next(iter(self._states)))


class Worker:
    """Runs jobs for the clients of this machine."""

    def __init__(
        self,
        algorithm: Algorithm,
        seed: int,
        client: Callable[[int], Client],
        snapshots: Callable[[int], Snapshots],
        wire: str = "fp32",
        secret: bytes = b"",
    ) -> None:
        self.algorithm = algorithm
        self.seed = seed
        self.client = client
        self.snapshots = snapshots
        self.wire = wire
        self.secret = secret
        self.protections: Mapping[int, Protection] = {}  # of clients with private data
        self.on_release: Callable[[Order, Release], None] = lambda order, release: None
        self._recent = StateCache()

    def perform(self, order: Order, arguments: Any) -> tuple[Any, str | None]:
        """Do one job from the state that the order names; returns the reply and the snapshot of the state after it."""
        job = job_of(self.algorithm, order.job)
        client, snapshots = self.client(order.client), self.snapshots(order.client)
        with span("checkpoint"):
            before = self._recent.get(order.client, order.base) if snapshots.on_disk else None
            if before is None:
                before = snapshots.read(order.base)
                self._remember(order.client, order.base, before, snapshots)
            before = placed(before, client.machine.device)
        client.state = dict(before)
        client.begin(stream(self.seed, order.t, job.name, order.call, order.client, "", self.secret), order.federated)
        client.protection = self.protections.get(order.client)
        if client.protection is None and client.data.dataset.private:
            raise RecipeError(f"{client.where}: private images reached a worker that does not protect them")
        if client.protection is not None:
            if not job.covered:
                raise RecipeError(
                    f"the recipe has a budget, but job '{job.name}' of {self.algorithm.name} does not say that its reply is "
                    "covered by it; read it, then declare it with @on_client(covered=True)"
                )
            client.message = message_digest(arguments, job.arguments)
        try:
            guard = WriteGuard(before, f"job '{job.name}' of {self.algorithm.name}", "client.state in place")
            with span("client"), guard:
                reply = getattr(self.algorithm, job.name)(client, **fields_of(arguments))
        finally:
            client.end()
        name = order.base
        if client.state.keys() != before.keys() or any(client.state[k] is not before[k] for k in before):
            name = f"{order.t}_{order.call}"
            with span("checkpoint"):
                snapshots.write(name, client.state)
                self._remember(order.client, name, client.state, snapshots)
        for release in client.releases:
            self.on_release(order, release)
        # at the end, so that an order that names a missing snapshot deletes none
        durable = order.durable.strip() or None
        snapshots.prune({order.base, durable, name}, durable)
        return reply, name

    def _remember(self, client: int, name: str | None, state: dict[str, Any], snapshots: Snapshots) -> None:
        if snapshots.on_disk:
            self._recent.put(client, name, state)

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The same in the wire format: takes an order and its arguments, returns a receipt and the reply."""
        with span("wire"):
            order = decode(head, Order)
            job = job_of(self.algorithm, order.job)
            device = self.client(order.client).machine.device  # fails before the body of another client's order is read
            arguments = placed(decode(body, job.arguments), device)
        reply, snapshot = self.perform(order, arguments)
        with span("wire"):
            receipt = Receipt(order.client, order.t, order.call, snapshot)
            return encode(receipt, Receipt), encode(reply, job.returns, self.wire)
