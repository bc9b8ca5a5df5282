"""A federation as the server program sees it: clients that can be asked, and a workbench of its own."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

from effuse.core.aggregate import Average, Reduced, Reducer, reduced_fields
from effuse.core.algorithm import Algorithm, Job, job_of
from effuse.core.capabilities import Hierarchical
from effuse.core.data import Shard
from effuse.core.errors import FederationError, ModelError
from effuse.core.ledger import CLIENT_EDGE, CLIENT_SERVER, EDGE_CLOUD, EVALUATION, TRAINING, Account, Ledger
from effuse.core.message import message
from effuse.core.rng import Stream, stream
from effuse.core.visit import through_wire
from effuse.core.workbench import SERVER, Workbench

T = TypeVar("T")
G = TypeVar("G")
Message = Mapping[str, Any]  # arguments of a job by their names
Cohort = Sequence[int] | Mapping[int, Message]
Once = Message | Mapping[int, Message] | None
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
        self.received: dict[str, set[int]] = {}  # what was sent once: the clients that have it
        self.held = 0  # the most bytes of replies that a reduction has held at once
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

    def restore(self, snapshots: Mapping[int, str], received: Mapping[str, Sequence[int]]) -> None:
        """Go on from what a checkpoint names."""
        self.snapshots, self.durable = dict(snapshots), dict(snapshots)
        self.received = {name: set(clients) for name, clients in received.items()}

    def settle(self) -> None:
        """Before a checkpoint names them, make client states outlive a power cut; sites elsewhere do so themselves."""

    def stop(self) -> None:
        """The run is over, one way or another: nobody is to go on working for it."""

    def sample(self, cohort: int | float | None) -> list[int]:
        """A cohort without repetition, in id order: a count, a fraction, or everyone."""
        total = len(self.clients)
        n = cohort_size(cohort, total)
        if not 1 <= n <= total:
            raise FederationError(
                f"round {self.t}: a cohort of {n} cannot be drawn from {total} clients; set algorithm.cohort"
            )
        if n >= len(self.present):
            return list(self.present)
        # whatever came before federation: the methods of a comparison meet the same cohorts
        chosen = self.workbench.by_federated_round("sample").numpy().choice(len(self.present), n, replace=False)
        return sorted(self.present[i] for i in chosen)

    def ask(
        self, job: Callable[..., Any], clients: Sequence[int], *, once: Once = None, **arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Send one message to several clients; answers come lazily, in cohort order, and a silent client's not at all.

        `once` holds arguments that replace these, or are added, until a client's reply to a message with them is accepted: the
        same for all, or {client: arguments}.
        """
        return self._asked(job, self._one_each(job, clients), once, arguments)[1]

    def ask_each(
        self, job: Callable[..., Any], messages: Mapping[int, Message], *, once: Once = None, **arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Send each client a message of its own, with the arguments that all get."""
        return self._asked(job, messages, once, arguments)[1]

    @overload
    def mean(self, job: Callable[..., Any], to: Cohort, *, group: None = None, **rest: Any) -> Reduced: ...
    @overload
    def mean(self, job: Callable[..., Any], to: Cohort, *, group: Mapping[int, G], **rest: Any) -> dict[G, Reduced]: ...
    def mean(
        self,
        job: Callable[..., Any],
        to: Cohort,
        *,
        by: Reducer = Average(),
        weight: Mapping[int, float] | None = None,
        group: Mapping[int, Any] | None = None,
        start: Any = None,
        once: Once = None,
        **arguments: Any,
    ) -> Any:
        """Ask a cohort, or each client by a message of its own, and reduce the declared fields of the replies as they come.

        `weight` is the server's own rule in place of the replies' weights; a client of weight nought is heard and not added.
        `group` gives a result for each group of clients. `start` is the result, or one for each group, that means go on from.
        """
        messages = to if isinstance(to, Mapping) else self._one_each(job, to)
        fields, where = reduced_fields(job_of(self.algorithm, job.__name__).returns), f"round {self.t}, job '{job.__name__}'"
        if not fields:
            raise FederationError(
                f"{where}: no field of its reply says how it is reduced; write Annotated[Model, by_weight]"
            )
        for what, given in (("weight", weight), ("group", group)):
            if given is not None and (missing := messages.keys() - given.keys()):
                raise FederationError(f"{where}: {what} says nothing of client {min(missing)}")
        of = dict.fromkeys(messages) if group is None else {k: group[k] for k in messages}
        starts = {None: start} if group is None else start or {}
        with _told(where):
            sums = {g: by.begin(fields, starts.get(g)) for g in dict.fromkeys(of.values())}
        heard: dict[Any, list[int]] = {g: [] for g in sums}
        sent, answers = self._asked(job, messages, once, arguments)
        for client, reply in answers:
            g, w = of[client], getattr(reply, "weight", 1.0) if weight is None else weight[client]
            heard[g].append(client)
            if weight is None or w:
                with _told(where):
                    values = {name: getattr(reply, name) for name in fields}
                    sums[g].add(client, by.prepared(values, sent[client], self.wire), w)
                    del values  # or it would live on while the next reply is made
            del reply
        self.held = max(self.held, sum(s.nbytes for s in sums.values()))
        with _told(where):
            found = {g: Reduced(s.value(), s.weight, tuple(heard[g])) for g, s in sums.items()}
        if group is not None:
            return found
        if not any(reduced.weight for reduced in found.values()):
            raise ModelError("there is nothing to average: no client answered")
        return found[None]

    def has(self, name: str) -> set[int]:
        """The clients that have received the argument of that name which `once` sent."""
        return set(self.received.get(name, ()))

    def _one_each(self, job: Callable[..., Any], clients: Sequence[int]) -> dict[int, Message]:
        if len(set(clients)) != len(clients):
            raise FederationError(f"round {self.t}, job '{job.__name__}': a client is asked twice in {list(clients)}")
        return dict.fromkeys(clients, {})

    def _asked(
        self, job: Callable[..., Any], messages: Mapping[int, Message], once: Once, arguments: dict[str, Any]
    ) -> tuple[dict[int, Any], Iterator[tuple[int, Any]]]:
        """The messages as they are sent, and the answers."""
        what = job_of(self.algorithm, job.__name__)
        orders: dict[int, Order] = {}
        sent: dict[int, Any] = {}
        made: dict[Any, Any] = {}  # one message for equal arguments, so that a broadcast is encoded once
        carried: dict[int, set[str]] = {}  # what was sent once, and is received when the reply is accepted
        for client, own in messages.items():
            if client not in self._known:
                raise FederationError(f"round {self.t}, job '{what.name}': there is no client {client}")
            if client in self._busy:
                raise FederationError(
                    f"round {self.t}, job '{what.name}': client {client} still owes an answer; take it first"
                )
            late = {name: value for name, value in _of(once, client).items() if client not in self.received.get(name, ())}
            values = {**arguments, **own, **late}
            key = frozenset((name, _identity(value)) for name, value in values.items())
            if key not in made:
                made[key] = self._arguments(what, values)
            sent[client], carried[client] = made[key], set(late)
            base, durable = self.snapshots.get(client), self.durable.get(client)
            orders[client] = Order(what.name, self.t, self.federated, self._call, client, base, durable)
        self._busy |= orders.keys()
        self._call += 1
        return sent, self._answers(what, carried, self._dispatch(what, orders, sent))

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
        self, job: Job, carried: dict[int, set[str]], arriving: Iterator[tuple[int, Any, str | None]]
    ) -> Iterator[tuple[int, Any]]:
        for client, reply, snapshot in arriving:
            self._busy.discard(client)
            if self.evaluated:
                if snapshot != self.snapshots.get(client):
                    raise FederationError(f"job '{job.name}': client {client} changed its state while being evaluated")
            else:
                if snapshot is not None:
                    self.snapshots[client] = snapshot
                for name in carried[client]:
                    self.received.setdefault(name, set()).add(client)
                self.report_loss(getattr(reply, "loss", None), getattr(reply, "weight", 1.0))
                self.on_reply(client, reply)
            yield client, reply
            del reply  # or it would live on while the next one is made
        self._busy -= carried.keys()  # nobody waits any longer for those who stayed silent

    def report_loss(self, loss: float | None, weight: float) -> None:
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


def cohort_size(cohort: int | float | None, clients: int) -> int:
    """How many clients a cohort has: a count, a fraction of them, or all."""
    return clients if cohort is None else max(1, round(cohort * clients)) if isinstance(cohort, float) else cohort


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Errors within name their place."""
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{where}: {error}") from None


def _of(once: Once, client: int) -> Message:
    """What a client is sent once: the same as all, or what is listed for it."""
    if once and all(isinstance(key, int) for key in once):
        return once.get(client, {})  # type: ignore[call-overload]
    return once or {}  # type: ignore[return-value]


def _identity(value: Any) -> Any:
    """What is equal for values that are written alike; others are told apart as objects."""
    plain = (str, int, float, type(None))
    written = isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(item, plain) for item in value))
    return repr(value) if written else id(value)
