"""One ask under way, and what it is measured by."""

import time
from typing import NamedTuple

from effuse.core.algorithm import Job
from effuse.core.federation import Order
from effuse.transport.flower.messages import Packet


class Connection(NamedTuple):
    """Where a client is reached, and since which start of its."""

    node: int
    session: str


class Terms(NamedTuple):
    """How patient a federation is."""

    quorum: int | None = None  # clients, of all, that must answer; None: everyone
    deadline: float = 3600.0  # seconds that a job may take
    shut_out: frozenset[int] = frozenset()  # clients that are neither drawn nor asked: their keys were taken away


class OpenOrders:
    """One ask under way."""

    def __init__(self, job: Job, orders: dict[int, Order], letters: dict[int, Packet], deadline: float) -> None:
        self.job, self.orders, self.letters = job, orders, letters
        self.until = time.monotonic() + deadline
        self.seats: dict[int, Connection] = {}  # client -> where its order went last
        self.tickets: dict[str, int] = {}  # the order may have gone out more than once; the first answer counts
        self.arrived: set[int] = set()
        self.turn: int | None = None  # the client whose answer is waited for
        self.held: Packet | None = None  # that answer: it need not go through the spool
        self.rejected: dict[int, str] = {}

    @property
    def waiting(self) -> list[int]:
        return [k for k in self.orders if k not in self.arrived and k not in self.rejected]

    @property
    def left(self) -> float:
        return self.until - time.monotonic()
