"""The client's side of every engine: it carries out orders where the data is."""

from collections.abc import Callable
from typing import Any

from effuse.core.algorithm import Algorithm, fields_of, job_of
from effuse.core.federation import Order
from effuse.core.rng import stream
from effuse.core.spans import span
from effuse.core.wire import decode, encode, message, placed
from effuse.core.workbench import Client
from effuse.engines.state import Snapshots
from effuse.engines.untouched import Untouched


@message(name="receipt")
class Receipt:
    """What goes with every reply."""

    client: int
    snapshot: str | None


class Worker:
    """Runs jobs for the clients that live here."""

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

    def perform(self, order: Order, arguments: Any) -> tuple[Any, str | None]:
        """Do one job from the state that the order names; returns the reply and the snapshot of the state after it."""
        job = job_of(self.algorithm, order.job)
        client, kept = self.client(order.client), self.snapshots(order.client)
        with span("checkpoint"):
            before = placed(kept.read(order.base), client.machine.device)
        client.state = dict(before)
        client.begin(stream(self.seed, order.t, job.name, order.call, order.client, "", self.secret), order.federated)
        try:
            watch = Untouched(before, f"job '{job.name}' of {self.algorithm.name}", "client.state in place")
            with span("client"), watch:
                reply = getattr(self.algorithm, job.name)(client, **fields_of(arguments))
        finally:
            client.end()
        name = order.base
        if client.state.keys() != before.keys() or any(client.state[k] is not before[k] for k in before):
            name = f"{order.t}_{order.call}"
            with span("checkpoint"):
                kept.write(name, client.state)
        # only now: an order that names a state we do not have must cost us nothing
        kept.prune({order.base, order.durable, name})
        return reply, name

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The same through the wire format: an order and its arguments in, a receipt and its reply out."""
        with span("wire"):
            order = decode(head, Order)
            job = job_of(self.algorithm, order.job)
            device = self.client(order.client).machine.device  # an order for another client is not even read
            arguments = placed(decode(body, job.arguments), device)
        reply, snapshot = self.perform(order, arguments)
        with span("wire"):
            return encode(Receipt(order.client, snapshot), Receipt), encode(reply, job.returns, self.wire)
