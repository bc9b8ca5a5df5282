"""A federation as the server program sees it: clients that can be asked, and a workbench of its own."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from effuse.core.algorithm import Algorithm, Job, job_of
from effuse.core.capabilities import Hierarchical
from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.ledger import CLIENT_EDGE, CLIENT_SERVER, EDGE_CLOUD, EVALUATION, TRAINING, Account, Ledger
from effuse.core.rng import Stream, stream
from effuse.core.wire import message, through_wire
from effuse.core.workbench import SERVER, Workbench

T = TypeVar("T")
EVALUATION_T = -2  # evaluation is keyed by purpose, not by round: its cadence cannot change training
SETUP_T = -1


@message(name="order")
class Order:
    """What goes with every job: the address of its randomness and the client state it starts from."""

    job: str
    t: int
    federated: int
    call: int
    client: int
    base: str | None  # the snapshot of its state that the server last accepted from this client
    durable: str | None  # the snapshot that the last checkpoint names: it must be kept


class Federation(ABC):
    """Asks clients and keeps the books; engines say how a message gets there and back."""

    rehearsing: ClassVar[bool] = False  # values are shapes only: where they would decide, an algorithm takes the longest way

    def __init__(self, algorithm: Algorithm, clients: Sequence[int], workbench: Workbench, seed: int, wire: str) -> None:
        self.algorithm = algorithm
        self.clients = list(clients)
        self.present = self.clients  # those that may be drawn
        self.at_a_time: int | None = None  # how many of them work here side by side; None where they are elsewhere
        self._known = set(self.clients)
        self.workbench = workbench
        self.ledger = Ledger(wire)
        self.seed = seed
        self.wire = wire
        self.t = SETUP_T
        self.federated = 0
        self.snapshots: dict[int, str] = {}  # accepted client states
        self.durable: dict[int, str] = {}  # those that a checkpoint names
        self.losses: list[tuple[float, float]] = []  # (loss, weight) that clients reported in this round
        self.noted: dict[str, Any] = {}  # what the algorithm wants remembered of this round
        self.memo: dict[str, Any] = {}  # what a server program computes once in a process, and after a restart again
        self.on_reply: Callable[[int, Any], None] = lambda client, reply: None
        self._call = 0
        self._busy: set[int] = set()
        self._column = TRAINING

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    @property
    def rounds(self) -> int:
        return self.workbench.rounds

    @property
    def link(self) -> str:
        """What clients talk over: to the server itself, or to its edges."""
        return CLIENT_EDGE if isinstance(self.algorithm, Hierarchical) else CLIENT_SERVER

    def begin(self, t: int, federated: int) -> None:
        """Open a round."""
        self.t, self.federated, self.losses, self.noted = t, federated, [], {}
        self._call = 0
        self.workbench.begin(self._address("round", 0, SERVER), federated)

    def close(self) -> None:
        """End a round; an answer that nobody took would be a silent loss."""
        if self._busy:
            silent = ", ".join(map(str, sorted(self._busy)))
            raise FederationError(
                f"round {self.t}: answers of clients {silent} were asked for and never taken; consume every ask"
            )

    def settle(self) -> None:
        """Before a checkpoint names them, make client states outlive a power cut; sites elsewhere do so themselves."""

    def stop(self) -> None:
        """The run is over, one way or another: nobody is to go on working for it."""

    def sample(self, cohort: int | float | None) -> list[int]:
        """A cohort without repetition, in id order: a count, a fraction, or everyone."""
        total = len(self.clients)
        n = total if cohort is None else max(1, round(cohort * total)) if isinstance(cohort, float) else cohort
        if not 1 <= n <= total:
            raise FederationError(
                f"round {self.t}: a cohort of {n} cannot be drawn from {total} clients; set algorithm.cohort"
            )
        if n >= len(self.present):
            return list(self.present)
        # whatever came before federation: the methods of a comparison meet the same cohorts
        chosen = self.workbench.by_federated_round("sample").numpy().choice(len(self.present), n, replace=False)
        return sorted(self.present[i] for i in chosen)

    def ask(self, job: Callable[..., Any], clients: Sequence[int], **arguments: Any) -> Iterator[tuple[int, Any]]:
        """Send one message to several clients; answers come lazily, in cohort order, and a silent client's not at all."""
        if len(set(clients)) != len(clients):
            raise FederationError(f"round {self.t}, job '{job.__name__}': a client is asked twice in {list(clients)}")
        return self.ask_each(job, {client: arguments for client in clients})

    def ask_each(self, job: Callable[..., Any], messages: Mapping[int, dict[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Send each client a message of its own."""
        what = job_of(self.algorithm, job.__name__)
        orders: dict[int, Order] = {}
        sent: dict[int, Any] = {}
        made: dict[int, tuple[Any, Any]] = {}  # one message per distinct arguments, so that a broadcast is encoded once
        for client, arguments in messages.items():
            if client not in self._known:
                raise FederationError(f"round {self.t}, job '{what.name}': there is no client {client}")
            if client in self._busy:
                raise FederationError(
                    f"round {self.t}, job '{what.name}': client {client} still owes an answer; take it first"
                )
            if id(arguments) not in made:
                made[id(arguments)] = arguments, self._arguments(what, arguments)
            sent[client] = made[id(arguments)][1]
            base, durable = self.snapshots.get(client), self.durable.get(client)
            orders[client] = Order(what.name, self.t, self.federated, self._call, client, base, durable)
        self._busy |= orders.keys()
        self._call += 1
        return self._answers(what, set(orders), self._dispatch(what, orders, sent))

    def pool(self) -> Shard:
        """All data in one place, for the centralised baseline; only a simulation can do that."""
        raise FederationError(f"{self.algorithm.name} needs all data in one place, which a real federation never has")

    @property
    def evaluated(self) -> bool:
        """Whether clients are being looked at rather than trained."""
        return self._column == EVALUATION

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Asks within are charged to the evaluation column and keyed apart from training."""
        before = self.t, self._call
        self._column, self.t, self._call = EVALUATION, EVALUATION_T, 0
        try:
            yield
        finally:
            self._column, (self.t, self._call) = TRAINING, before

    @abstractmethod
    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        """Carry out the orders; yields (client, reply, the snapshot it wrote) in the order given, for those who answer."""

    def _answers(
        self, job: Job, asked: set[int], arriving: Iterator[tuple[int, Any, str | None]]
    ) -> Iterator[tuple[int, Any]]:
        for client, reply, snapshot in arriving:
            self._busy.discard(client)
            if self.evaluated:
                if snapshot != self.snapshots.get(client):
                    raise FederationError(f"job '{job.name}': client {client} changed its state while being evaluated")
            else:
                if snapshot is not None:
                    self.snapshots[client] = snapshot
                self.told(getattr(reply, "loss", None), getattr(reply, "weight", 1.0))
                self.on_reply(client, reply)
            yield client, reply
        self._busy -= asked  # nobody waits any longer for those who stayed silent

    def told(self, loss: float | None, weight: float) -> None:
        """Note a loss for the display and the round's line; replies with `loss` and `weight` are noted by themselves."""
        if loss is not None:
            self.losses.append((loss, weight))

    def carry(self, direction: str, edge: int, what: T) -> T:
        """Move a message between an edge and the cloud, which both are the server's: charged, and as it would arrive."""
        self.ledger.charge(Account(self._column, EDGE_CLOUD, direction, edge), what)
        return through_wire(what, self.wire)

    def note(self, **values: Any) -> None:
        """Have numbers, text or lists of them written into the round's line."""
        self.noted |= values

    def _charge(self, direction: str, client: int, what: Any, wire_bytes: int = 0) -> None:
        self.ledger.charge(Account(self._column, self.link, direction, client), what, wire_bytes)

    def _arguments(self, job: Job, arguments: dict[str, Any]) -> Any:
        try:
            return job.arguments(**arguments)
        except TypeError as error:
            raise FederationError(f"round {self.t}, job '{job.name}': {error}") from None

    def _address(self, job: str, call: int, client: int) -> Stream:
        return stream(self.seed, self.t, job, call, client, "")
