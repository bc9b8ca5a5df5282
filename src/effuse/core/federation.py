"""A federation as the server program sees it: clients that it can ask, and a workbench of its own."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

from effuse.core.aggregate import Average, Groups, Reduced, Reducer, reduced_fields
from effuse.core.algorithm import Algorithm, Job, job_of
from effuse.core.capabilities import Hierarchical
from effuse.core.data import Shard
from effuse.core.errors import FederationError, ModelError, RecipeError, located
from effuse.core.ledger import CLIENT_EDGE, CLIENT_SERVER, EDGE_CLOUD, EVALUATION, TRAINING, Account, Ledger
from effuse.core.message import message
from effuse.core.once import Message, Once, Received
from effuse.core.rng import Stream, stream
from effuse.core.round_log import RoundLog
from effuse.core.visit import through_wire
from effuse.core.watch import Seen, Watch
from effuse.core.workbench import SERVER, Workbench

T = TypeVar("T")
G = TypeVar("G")
Cohort = Sequence[int] | Mapping[int, Message]
EVALUATION_T = -2  # the same in every round, so that its cadence cannot change training
SETUP_T = -1


@message(name="order")
class Order:
    """What goes with every job: the address of its random numbers and the client state it starts from."""

    job: str
    t: int
    federated: int
    call: int
    client: int
    base: str | None  # the snapshot of the client's state that the server last accepted
    # the snapshot that the last checkpoint names, which must not be deleted; an order is as long whether there is one or not
    durable: str


class Federation(ABC):
    """Sends jobs to clients, collects their replies and records the traffic; an engine carries the messages."""

    watching: ClassVar[bool] = False  # whether clients' updates are measured: where clients are not the operator's own
    rehearsing: ClassVar[bool] = False  # tensors have shapes only; a choice that depends on values takes the longest way

    def __init__(self, algorithm: Algorithm, clients: Sequence[int], workbench: Workbench, seed: int, wire: str) -> None:
        self.algorithm = algorithm
        self.clients = list(clients)
        self.present = self.clients  # those that may be sampled
        self.at_a_time: int | None = None  # how many clients of this process work in parallel; None for remote clients
        self._known = set(self.clients)
        self.workbench = workbench
        self.ledger = Ledger(wire)
        self.seed = seed
        self.wire = wire
        self.t = SETUP_T
        self.federated = 0
        self.snapshots: dict[int, str] = {}  # accepted client states
        self.durable: dict[int, str] = {}  # those that a checkpoint names
        self.received = Received()
        self.held = 0  # the most bytes of replies that a reduction has held at once
        self.log = RoundLog()  # of this round
        self.memo: dict[str, Any] = {}  # what a server program computes once per process; not saved
        self.on_reply: Callable[[int, Any], None] = lambda client, reply: None
        self.on_wait: Callable[[Sequence[int], float], None] = lambda clients, until: None
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
        """The link between clients and the server, or its edges."""
        return CLIENT_EDGE if isinstance(self.algorithm, Hierarchical) else CLIENT_SERVER

    def begin(self, t: int, federated: int) -> None:
        """Open a round."""
        self.t, self.federated, self.log, self._call = t, federated, RoundLog(), 0
        self.workbench.begin(self._address("round", 0, SERVER), federated)

    def close(self) -> None:
        """End a round; an answer that was never consumed is an error."""
        if self._busy:
            waiting = ", ".join(map(str, sorted(self._busy)))
            raise FederationError(f"round {self.t + 1}: answers of clients {waiting} were never taken; consume every ask")

    def restore(self, snapshots: Mapping[int, str], received: Mapping[str, Sequence[int]]) -> None:
        """Continue from the client states and receipts that a checkpoint names."""
        self.snapshots, self.durable = dict(snapshots), dict(snapshots)
        self.received = Received({name: set(clients) for name, clients in received.items()})

    def settle(self) -> None:
        """Flush client states to disk before a checkpoint names them; remote sites do so themselves."""

    def stop(self) -> None:
        """Stop all work for this run, which has ended or failed."""

    def sample(self, cohort: int | float | None) -> list[int]:
        """Draw a cohort without replacement, in id order: a count, a fraction, or all clients."""
        total = len(self.clients)
        n = cohort_size(cohort, total)
        if not 1 <= n <= total:
            place = f"round {self.t + 1}: a cohort of {n}"
            raise FederationError(f"{place} cannot be drawn from {total} clients; set algorithm.cohort")
        if n >= len(self.present):
            return list(self.present)
        # keyed by federated round, so that methods with and without a warm-up are compared on the same cohorts
        chosen = self.workbench.by_federated_round("sample").numpy().choice(len(self.present), n, replace=False)
        return sorted(self.present[i] for i in chosen)

    def ask(
        self, job: Callable[..., Any], clients: Sequence[int], *, once: Once = None, **arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Send one message to several clients. Answers come lazily, in cohort order; a silent client gives none.

        `once` holds arguments that are added to these, or replace them, until the client's reply to a message with them is
        accepted. They are the same for all, or {client: arguments}.
        """
        return self._sent(job, self._one_each(job, clients), once, arguments)[1]

    def ask_each(
        self, job: Callable[..., Any], messages: Mapping[int, Message], *, once: Once = None, **arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        """Send each client its own message; `arguments` are added to all of them."""
        return self._sent(job, messages, once, arguments)[1]

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
        """Ask a cohort, or each client by its own message, and reduce the declared fields of the replies as they arrive.

        `weight` replaces the replies' own weights. A reply of weight zero is accepted but not added. `group` assigns clients
        to groups and gives one result per group. `start` is an earlier result, or one per group, that means continue from.
        """
        messages = to if isinstance(to, Mapping) else self._one_each(job, to)
        fields = reduced_fields(job_of(self.algorithm, job.__name__).returns)
        where = f"round {self.t + 1}, job '{job.__name__}'"
        if not fields:
            raise FederationError(f"{where}: no field of its reply says how it is reduced; use Annotated[Model, by_weight]")
        for what, given in (("weight", weight), ("group", group)):
            if given is not None and (missing := messages.keys() - given.keys()):
                raise FederationError(f"{where}: {what} has no entry for client {min(missing)}")
        group_of = dict.fromkeys(messages) if group is None else {k: group[k] for k in messages}
        with located(where):
            groups = Groups(by, fields, group_of, {None: start} if group is None else start or {})
        sent, answers = self._sent(job, messages, once, arguments)
        watch = Watch() if self.watching else None
        for client, reply in answers:
            with self.using(client), located(where):
                groups.add(client, reply, None if weight is None else weight[client], sent[client], self.wire, watch)
            del reply  # free it before the next one is made
        self.held = max(self.held, groups.nbytes)
        with located(where):
            results = groups.results()
        if watch is not None:
            self.observed(where, watch.results())
        if group is not None:
            return results
        if not any(reduced.weight for reduced in results.values()):
            raise ModelError("there is nothing to average: no client answered")
        return results[None]

    def observed(self, where: str, seen: dict[int, Seen]) -> None:
        """Record what was seen of each client's update."""
        self.log.updates |= seen

    @contextlib.contextmanager
    def using(self, client: int) -> Iterator[None]:
        """Use a client's reply: if that fails, a federation over a network rejects it and goes on without the client."""
        try:
            yield
        except Exception as error:
            self.reject(client, error)
            self.log.silent.add(client)

    def reject(self, client: int, error: Exception) -> None:
        """A reply cannot be used. On one machine that is a fault, and ends the run."""
        raise error

    def has(self, name: str) -> set[int]:
        """The clients that have received the argument of that name, which was sent once."""
        return set(self.received.get(name, ()))

    def forget(self, name: str, clients: Sequence[int] | None = None) -> None:
        """Send that argument once more, to these clients or to all: it has changed, or they have lost it."""
        self.received.discard(name, clients)

    def _one_each(self, job: Callable[..., Any], clients: Sequence[int]) -> dict[int, Message]:
        if len(set(clients)) != len(clients):
            raise FederationError(f"round {self.t + 1}, job '{job.__name__}': a client is asked twice in {list(clients)}")
        return dict.fromkeys(clients, {})

    def _sent(
        self, job: Callable[..., Any], messages: Mapping[int, Message], once: Once, arguments: dict[str, Any]
    ) -> tuple[dict[int, Any], Iterator[tuple[int, Any]]]:
        """The message to each client, and the answers."""
        what = job_of(self.algorithm, job.__name__)
        orders: dict[int, Order] = {}
        sent: dict[int, Any] = {}
        made: dict[Any, Any] = {}  # one message for equal arguments, so that it is encoded once
        carried: dict[int, set[str]] = {}  # arguments sent once; received when the reply is accepted
        for client, own in messages.items():
            if client not in self._known:
                raise FederationError(f"round {self.t + 1}, job '{what.name}': there is no client {client}")
            if client in self._busy:
                place = f"round {self.t + 1}, job '{what.name}': client {client}"
                raise FederationError(f"{place} still owes an answer; take it first")
            missing = self.received.missing(once, client)
            values = {**arguments, **own, **missing}
            key = frozenset((name, _identity(value)) for name, value in values.items())
            if key not in made:
                made[key] = self._arguments(what, values)
            sent[client], carried[client] = made[key], set(missing)
            base, durable = self.snapshots.get(client), self.durable.get(client, "").ljust(16)
            orders[client] = Order(what.name, self.t, self.federated, self._call, client, base, durable)
        self._busy |= orders.keys()
        self._call += 1
        return sent, self._answers(what, carried, self._dispatch(what, orders, sent))

    def pool(self) -> Shard:
        """The data of all clients together, for the centralised baseline; only a simulation has it."""
        raise FederationError(f"{self.algorithm.name} needs all data in one place, which a real federation never has")

    def unprotected_pool(self, purpose: str) -> Shard:
        """The pool, for what uses it without noise; refused where a budget protects it."""
        pool = self.pool()
        if pool.dataset.private:
            raise RecipeError(f"{purpose} real images without privacy, and the recipe has a budget; leave out one of both")
        return pool

    @property
    def evaluated(self) -> bool:
        """Whether clients are being evaluated rather than trained."""
        return self._column == EVALUATION

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Charge what is asked within to the evaluation column, with its own random numbers."""
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
        """Carry out the orders; yields (client, reply, the snapshot it wrote) in their order, for clients that answer."""

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
                self.received.record(carried[client], client)
                self.report_loss(loss := getattr(reply, "loss", None), getattr(reply, "weight", 1.0))
                if loss is not None:
                    self.log.reported[client] = loss
                self.on_reply(client, reply)
            yield client, reply
            del reply  # free it before the next one is made
        if not self.evaluated:
            self.log.silent |= self._busy & carried.keys()
        self._busy -= carried.keys()  # silent clients owe no answer any more

    def spent(self, client: int, seconds: float) -> None:
        """Record a client's time, unless it is being evaluated."""
        if not self.evaluated:
            self.log.seconds[client] = self.log.seconds.get(client, 0.0) + seconds

    def report_loss(self, loss: float | None, weight: float) -> None:
        """Record a loss for the display and the round's line; that of a reply with a `loss` is recorded automatically."""
        if loss is not None:
            self.log.losses.append((loss, weight))

    def carry(self, direction: str, edge: int, what: T) -> T:
        """Charge a message between an edge and the cloud, both part of the server, and return it as it would arrive."""
        self.ledger.charge(Account(self._column, EDGE_CLOUD, direction, edge), what)
        return through_wire(what, self.wire)

    def note(self, **values: Any) -> None:
        """Write numbers, text or lists of them into the round's line."""
        self.log.noted |= values

    def _charge(self, direction: str, client: int, what: Any, wire_bytes: int = 0) -> None:
        self.ledger.charge(Account(self._column, self.link, direction, client), what, wire_bytes)

    def _discard(self, client: int, wire_bytes: int) -> None:
        """Charge an upload that is not used."""
        self.ledger.discard(Account(self._column, self.link, "up", client), wire_bytes)

    def _arguments(self, job: Job, arguments: dict[str, Any]) -> Any:
        try:
            return job.arguments(**arguments)
        except TypeError as error:
            raise FederationError(f"round {self.t + 1}, job '{job.name}': {error}") from None

    def _address(self, job: str, call: int, client: int) -> Stream:
        return stream(self.seed, self.t, job, call, client, "")


def cohort_size(cohort: int | float | None, clients: int) -> int:
    """The number of clients in a cohort, given as a count, a fraction, or None for all."""
    return clients if cohort is None else max(1, round(cohort * clients)) if isinstance(cohort, float) else cohort


def _identity(value: Any) -> Any:
    """A key that is equal for plain values with the same repr; other values are compared by identity."""
    plain = (str, int, float, type(None))
    comparable = isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(item, plain) for item in value))
    return repr(value) if comparable else id(value)
