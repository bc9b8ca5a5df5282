"""The course of a run, as a site's own rehearsal shows it. An order that leaves it is refused before it computes."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from effuse.core.algorithm import FEDERATE, Job, job_of
from effuse.core.capabilities import Personal
from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.federation import EVALUATION_T, SETUP_T, Order
from effuse.core.files import parsed, write_atomically
from effuse.core.recipe import Recipe
from effuse.core.wire import decode, encode
from effuse.core.workbench import Client
from effuse.transport.flower.expectation import Form
from effuse.transport.refusals import hollow_model
from effuse.transport.rehearsal import Rehearsal

AGAIN, SPARE = 2, 10  # a site answers twice as many orders as the rehearsal has, and ten more
LAST = 10**9  # later than any round
CLASSIFY, CLASSIFIED = "classify", 100_000  # the job, and the most images that a site classifies for an evaluation
Handle = Callable[[bytes, bytes], tuple[bytes, bytes]]


def evaluations(recipe: Recipe) -> list[str]:
    """The jobs that evaluate models which stay at the sites."""
    return ["draw", *([CLASSIFY] if any(metric.predicts for metric in recipe.evaluate.metrics) else [])]


class Asked(NamedTuple):
    """What a rehearsed round asks of clients."""

    federated: int
    jobs: list[str]  # in the order of calls
    fresh: list[bool]  # of each call, whether a client starts without a state


class Rehearsed(Rehearsal):
    """Notes every order of a rehearsal, and what its message is made of."""

    def __init__(self, recipe: Recipe, shard: Shard) -> None:
        super().__init__(recipe, [shard] * recipe.clients)
        self.asked: dict[int, Asked] = {}  # by round
        self.forms: list[Form] = []  # of messages; what is sent once may come with another job than in the rehearsal

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        for call, order in {order.call: order for order in orders.values()}.items():
            asked = self.asked.setdefault(order.t, Asked(order.federated, [], []))
            if call == len(asked.jobs):
                asked.jobs.append(job.name)
                asked.fresh.append(any(o.base is None for o in orders.values()))
        for message in {id(message): message for message in messages.values()}.values():
            self.note_form(message)
        return super()._dispatch(job, orders, messages)

    def note_form(self, message: Any) -> None:
        if (form := Form.of(message)) not in self.forms:
            self.forms.append(form)


class Course:
    """Which orders a site carries out: those of its own rehearsal, in their order, and few of them again.

    A server that was interrupted asks again for rounds that its checkpoint does not hold. The same order has the same
    answer, so it does not count; one with another model does.
    """

    def __init__(
        self, recipe: Recipe, client: Callable[[int], Client], shard: Shard, folder: Path, run: str, carry_out: Handle
    ) -> None:
        self.recipe, self.path, self.run, self.carry_out = recipe, folder / "orders.json", run, carry_out
        self._client = client
        self.report: Callable[[str], None] = lambda words: None
        self._blind = False  # whether the algorithm cannot be rehearsed
        self._fed = Rehearsed(recipe, shard)
        self._rounds = self._rehearsed()
        self._reached, self._evaluations = SETUP_T - 1, 0
        known = parsed(self.path.read_bytes(), self.path) if self.path.exists() else {}
        known = known if isinstance(known, dict) and known.get("run") == run else {}
        self._answered = dict.fromkeys(known.get("answered", ()))  # digests of orders, oldest first
        self._durable: list[str] = known.get("durable", [])  # the states that the last two checkpoints named

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Carry out an order of the course; it is recorded before its answer leaves."""
        self._client(decode(head, Order).client)  # fails if it is another client's, before the body is read
        self.check(head, body)
        answer = self.carry_out(head, body)
        self.answered(head, body)
        return answer

    def check(self, head: bytes, body: bytes) -> None:
        """Refuse an order that the rehearsal has not, that goes back too far, or that is one too many."""
        order = decode(head, Order)
        where = f"round {order.t + 1}, job '{order.job}'"
        message = decode(body, job_of(self.recipe.algorithm, order.job).arguments)
        self._reach(order)
        if order.t == EVALUATION_T:
            self._check_evaluation(order, message, where)
        elif self._blind:
            if not SETUP_T <= order.federated < self.recipe.rounds:
                raise FederationError(f"{where}: the manifest has {self.recipe.rounds} rounds, not {order.federated + 1}")
        elif not self._has(order):
            asked = self._fed.asked.get(order.t)
            found = f"{', '.join(asked.jobs)} as federated round {asked.federated}" if asked else "nothing"
            raise FederationError(
                f"{where}, call {order.call}, federated round {order.federated}: this site's rehearsal of the manifest has "
                f"{found} there; ask the server's operator whether it runs this version of effuse"
            )
        if not self._blind:
            self._check_networks(message, where)
        self._check_base(order, where)
        planned, known = self._planned(), self._digest(head, body) in self._answered
        if order.t == EVALUATION_T and not known and self._over(planned):
            self._reach(dataclasses.replace(order, t=LAST))  # a restarted site does not know which round it follows
            planned = self._planned()
        if not known and self._over(planned):
            raise FederationError(
                f"{where}: this site has answered {len(self._answered)} orders, and up to this round the manifest has "
                f"{planned}; its operator allows as many again by deleting orders.json from the site's folder"
            )

    def answered(self, head: bytes, body: bytes) -> None:
        """Record an order before its answer leaves."""
        order = decode(head, Order)
        before = len(self._answered), list(self._durable)
        self._answered[self._digest(head, body)] = None
        if (durable := order.durable.strip()) and durable not in self._durable[-1:]:
            self._durable = [*self._durable[-1:], durable]
        if before != (len(self._answered), self._durable):
            known = {"run": self.run, "durable": self._durable, "answered": list(self._answered)}
            write_atomically(self.path, json.dumps(known).encode())

    def _has(self, order: Order) -> bool:
        """Whether the rehearsed round has this job, or a round before it, whose answer may have been lost."""
        asked = self._fed.asked.get(order.t)
        before = {job for t, other in self._fed.asked.items() if t < order.t for job in other.jobs}
        if asked is None or order.federated != asked.federated or order.job not in {*asked.jobs, *before}:
            return False
        return order.call < len(asked.jobs) + len(before)

    def _check_evaluation(self, order: Order, message: Any, where: str) -> None:
        recipe = self.recipe
        if not isinstance(recipe.algorithm, Personal) or order.job not in evaluations(recipe):
            raise FederationError(f"{where}: the manifest evaluates nothing at sites")
        if order.job == CLASSIFY:
            shape, found = recipe.model.shape, tuple(message.images.shape)
            if found[1:] != (shape.channels, shape.side, shape.side) or found[0] > CLASSIFIED:
                raise FederationError(f"{where}: images of {found} are not at most {CLASSIFIED:,} of the model's size")
        elif message.n > recipe.evaluate.samples or message.sampler not in (None, recipe.sampler):
            raise FederationError(
                f"{where}: it asks for {message.n} images by {message.sampler}, and the manifest has at most "
                f"{recipe.evaluate.samples} by {recipe.sampler}"
            )

    def _check_networks(self, message: Any, where: str) -> None:
        """Refuse networks, or sets of parameters, that no message of the rehearsal has."""
        found, forms = Form.of(message), self._fed.forms
        if strange := [arch for arch in found.archs if not any(arch in form.archs for form in forms)]:
            raise FederationError(f"{where}: it comes with the network {strange[0].name}, which the manifest has not")
        for place, names in found.params.items():
            if not any(form.params.get(place) == names for form in forms):
                raise FederationError(f"{where}: the parameters at '{place}' are not those of the manifest")

    def _check_base(self, order: Order, where: str) -> None:
        """A job starts from the client's state before it, and from none only where no two checkpoints name one."""
        if order.base is None:
            asked = self._fed.asked.get(order.t)
            begins = asked is not None and any(asked.fresh)  # as in a run that is begun anew
            if len(self._durable) == 2 and order.t != EVALUATION_T and not begins:
                raise FederationError(
                    f"{where}: it starts without the state that two checkpoints have named; if its server lost that state, "
                    "this site's operator deletes orders.json from the site's folder"
                )
            return
        try:
            t, call = map(int, order.base.rsplit("_", 1))
        except ValueError:
            raise FederationError(f"{where}: '{order.base[:40]}' is not the name of a state") from None
        if order.t != EVALUATION_T and (t, call) >= (order.t, order.call):
            raise FederationError(f"{where}: it starts from the state {order.base}, which comes after it")

    def _digest(self, head: bytes, body: bytes) -> str:
        same = encode(dataclasses.replace(decode(head, Order), durable=""), Order)  # it changes no answer
        return hashlib.blake2b(hashlib.sha256(same).digest() + body, digest_size=16).hexdigest()

    def _reach(self, order: Order) -> None:
        """Rehearse up to the round of an order; an evaluation may follow any."""
        while not self._blind and (self._reached < order.t or (order.t == EVALUATION_T and not self._evaluations)):
            try:
                if (reached := next(self._rounds, None)) is None:
                    return
            except Exception as error:
                self._blind, why = True, f"{type(error).__name__}: {error}".splitlines()[0][:200]
                self.report(
                    f"{self.recipe.algorithm.name} cannot be rehearsed, so its orders are held to the manifest's jobs and "
                    f"number of rounds alone ({why})"
                )
                return
            self._reached = reached

    def _over(self, planned: int) -> bool:
        return len(self._answered) >= AGAIN * planned + SPARE

    def _planned(self) -> int:
        """The orders of the manifest, up to the rehearsed round."""
        if self._blind:
            return self.recipe.rounds * len(self.recipe.algorithm.jobs)
        return sum(len(asked.jobs) for asked in self._fed.asked.values()) + self._evaluations

    def _rehearsed(self) -> Iterator[int]:
        """Every round, rehearsed; an evaluation is noted with the round that it follows."""
        recipe, fed, algorithm = self.recipe, self._fed, self.recipe.algorithm
        fed.begin(SETUP_T, 0)
        server, t, federated = algorithm.setup(hollow_model(recipe), fed), 0, 0
        fed.close()
        yield SETUP_T
        while not recipe.over(server, federated):
            fed.begin(t, federated)
            federates = server.phase == FEDERATE
            server = algorithm.round(server, fed)
            fed.close()
            federated += federates
            if isinstance(algorithm, Personal):
                self._evaluations += len(evaluations(recipe)) * (1 + algorithm.averages)
                message = algorithm.jobs["draw"].arguments(algorithm.deliver(server), 0, None, False)
                fed.note_form(message)
            yield t
            t += 1
