"""How long a federation waits for whom, and the orders that wait for an answer."""

import time
from typing import NamedTuple

from effuse.core.algorithm import Job
from effuse.core.errors import QuorumError
from effuse.core.federation import Order
from effuse.transport.flower.messages import Packet

KEEP = 60.0  # seconds that the transport keeps a small packet that was not fetched, or an order after its deadline


class Connection(NamedTuple):
    """How a client is reached."""

    node: int
    session: str  # of the site's process: another one after a restart


class Terms(NamedTuple):
    """Who must answer, and by when."""

    quorum: int | None = None  # clients, of all, that must answer; None: every client
    deadline: float = 3600.0  # seconds that a job may take
    shut_out: frozenset[int] = frozenset()  # clients without a key: neither drawn nor asked
    grace: float = 30.0  # seconds that a client which is gone is waited for, where the others' answers are enough
    images: int | None = None  # that a client may claim to have; None: 100,000, or twice what the server itself has


class OpenOrders:
    """The orders of one ask, and what has become of each."""

    def __init__(self, job: Job, orders: dict[int, Order], packets: dict[int, Packet], deadline: float) -> None:
        self.job, self.orders, self.packets = job, orders, packets
        self.began = time.monotonic()
        self.until = self.began + deadline
        self.told = False  # whether the operator was told who is missing
        self.sent_to: dict[int, Connection] = {}  # client -> the connection that its order was last sent over
        self.tickets: dict[str, int] = {}  # -> client; an order may be sent more than once, and the first answer counts
        self.arrived: set[int] = set()
        self.next: int | None = None  # the client whose answer comes next in cohort order
        self.next_answer: Packet | None = None  # that answer, which need not wait in the inbox
        self.rejected: dict[int, str] = {}  # client -> why

    @property
    def waiting(self) -> list[int]:
        return [k for k in self.orders if k not in self.arrived and k not in self.rejected]

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def needed(self, spared: int) -> int:
        """How many answers are enough, where so many clients may be silent in a job for all of them, or for few."""
        return min(len(self.orders), max(1, len(self.orders) - spared))

    def result(self, spared: int) -> str:
        """Who did not answer, in words for the log; an error unless enough did."""
        asked, silent, needed = len(self.orders), self.waiting, self.needed(spared)
        answered = asked - len(silent) - len(self.rejected)
        missing = f"; silent: {joined(silent)}" if silent else ""
        if self.rejected:
            missing += "; rejected: " + ", ".join(f"{k} ({why})" for k, why in self.rejected.items())
        if answered < needed:
            raise QuorumError(
                f"{self}: {answered} of {asked} answered, but {needed} must{missing}; lower the quorum or raise the deadline"
            )
        return f"{self}: continuing with {answered} of {asked}{missing}" if silent else ""

    def __str__(self) -> str:
        return f"round {next(iter(self.orders.values())).t + 1}, job '{self.job.name}'"


def joined(clients: list[int]) -> str:
    """Clients as a list in words."""
    return ", ".join(map(str, clients))
