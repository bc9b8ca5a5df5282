"""Loopback: every client in this process, every message through the wire format; other engines must give its results."""

from collections.abc import Iterator
from typing import Any

from effuse.core.algorithm import Algorithm, Job
from effuse.core.build import build
from effuse.core.federation import Order, T
from effuse.core.grammar import parse
from effuse.core.ledger import EDGE_CLOUD, Account
from effuse.core.spans import span
from effuse.core.spec import text
from effuse.core.visit import placed
from effuse.core.wire import decode, encode
from effuse.transport.simulator import InProcess
from effuse.transport.worker import Receipt


class Loopback(InProcess):
    """Encodes, decodes and measures each message; as in a deployment, clients have their own copy of the algorithm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for worker in self.workers:
            worker.algorithm = build(parse(text(self.algorithm)), Algorithm, "algorithm")

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        encoded: dict[int, bytes] = {}  # a broadcast is encoded once
        heads = {client: encode(order, Order) for client, order in orders.items()}
        for client, message in messages.items():
            if id(message) not in encoded:
                with span("wire"):
                    encoded[id(message)] = encode(message, job.arguments, self.wire)
            self._charge("down", client, message, len(heads[client]) + len(encoded[id(message)]))
        return self._perform(job, {client: (heads[client], encoded[id(m)]) for client, m in messages.items()})

    def carry(self, direction: str, edge: int, what: T) -> T:
        blob = encode(what, type(what), self.wire)
        self.ledger.charge(Account(self._column, EDGE_CLOUD, direction, edge), what, len(blob))
        return placed(decode(blob, type(what)), self.workbench.machine.device)

    def _perform(self, job: Job, requests: dict[int, tuple[bytes, bytes]]) -> Iterator[tuple[int, Any, str | None]]:
        for client, (receipt, blob) in self._each(lambda worker, client: worker.handle(*requests[client]), list(requests)):
            with span("wire"):
                reply = placed(decode(blob, job.returns), self.workbench.machine.device)
                self._charge("up", client, reply, len(receipt) + len(blob))
            yield client, reply, decode(receipt, Receipt).snapshot
            del reply, blob  # or they would stay in memory while the next ones are made
