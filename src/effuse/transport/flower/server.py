"""The server's side: orders to clients wherever they are, answers in cohort order, a deadline and a quorum."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Self

from effuse.core.algorithm import Job
from effuse.core.errors import EffuseError, FederationError, QuorumError, WireError
from effuse.core.federation import Federation, Order
from effuse.core.visit import placed
from effuse.core.wire import decode, encode
from effuse.core.workbench import Workbench
from effuse.transport.context import EngineContext
from effuse.transport.flower.expectation import Expectation
from effuse.transport.flower.inbox import Inbox
from effuse.transport.flower.messages import (
    ANSWER,
    ENROLMENT,
    FAREWELL,
    INVITATION,
    ORDER,
    REFUSAL,
    UNDELIVERED,
    Channel,
    Enrolment,
    Invitation,
    Lost,
    Packet,
    Refusal,
)
from effuse.transport.flower.terms import Connection, OpenOrders, Terms
from effuse.transport.worker import Receipt

POLL = 0.2  # seconds between looks at the post while nothing comes
ROLL_CALL = 1.0  # seconds between looks at who is connected while somebody is missing
KNOCK = 10.0  # seconds after which a silent client is asked whether it still works on its order
PARTING = 5.0  # seconds that sites have to hear that the run is over
SOON = 60.0  # seconds after which a small letter that nobody took, or an answer that came too late, is forgotten
SMALL = 64 << 10  # bytes that a letter about enrolment may have


class Flower(Federation):
    """Clients behind a post: known by their own ids, asked again when they come back, left out when they stay silent."""

    def __init__(self, stage: EngineContext, post: Channel, terms: Terms, name: str = "") -> None:
        recipe = stage.recipe
        bench = Workbench(stage.machines[0], recipe.task, recipe.rounds)
        super().__init__(recipe.algorithm, range(recipe.clients), bench, recipe.seed, recipe.wire)
        self.present = [k for k in self.clients if k not in terms.shut_out]
        self.post, self.terms, self._tell = post, terms, stage.say
        self.hello = Invitation(name, recipe.saved(), stage.train.classes, "", "")
        self.seats: dict[int, Connection] = {}
        self._log = stage.folder / "federation.log"
        self._spool = Inbox(stage.folder / "spool")
        self._expectation = Expectation(recipe, len(stage.train.classes), self.say)
        self._greeted: dict[int, float] = {}  # node -> when it was last sent the terms
        self._greetings: dict[str, int] = {}  # ticket -> node
        self._declined: dict[int, str] = {}  # node -> why
        self._late: dict[str, str] = {}  # ticket -> what to say when it is answered
        self._looked = 0.0

    def __enter__(self) -> Self:
        self._spool.clear()
        self.post.open()
        try:
            self.gather()
        except BaseException:
            self.post.close()
            raise
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                self._part()
        finally:
            self.post.close()
            self._spool.clear()

    def _part(self) -> None:
        """Tell the sites that the run is over, and give them a moment to hear it."""
        with contextlib.suppress(Lost):
            tickets = {self.post.send(seat.node, Packet(FAREWELL), SOON) for seat in self.seats.values()}
            until = time.monotonic() + PARTING
            while tickets and time.monotonic() < until:
                tickets -= {ticket for ticket, _ in self.post.collect(list(tickets), 1.0)}
                time.sleep(POLL if tickets else 0)

    def gather(self) -> None:
        """Wait for every client; after the deadline a quorum of them is enough."""
        began = said = time.monotonic()
        self.say(f"manifest {self.hello.name}@{self.hello.digest}; waiting for {len(self.present)} clients")
        if self.terms.shut_out:
            self.say(f"shut out, for want of a key: {_listed(sorted(self.terms.shut_out))}")
        while missing := [k for k in self.present if k not in self.seats]:
            now = time.monotonic()
            enough = self.terms.quorum is not None and len(self.seats) >= self.terms.quorum
            if enough and now - began > self.terms.deadline:
                self.say(f"beginning without clients {_listed(missing)}")
                return
            if now - said > 30:
                said = now
                self.say(f"connected: {_listed(sorted(self.seats)) or 'nobody'}; waiting for {_listed(missing)}")
            self._look(None)

    def say(self, words: str) -> None:
        """Tell whoever watches, and the run's log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with open(self._log, "a") as file:
            file.write(f"{stamp} {words}\n")
        self._tell(words)

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        orders = {k: order for k, order in orders.items() if k not in self.terms.shut_out}  # an algorithm may remember them
        for k in list(orders)[:1]:  # a job that fails by itself is heard of before anybody is asked to do it
            self._expectation.of(job, messages[k], resumed=any(o.base for o in orders.values()))
        bodies: dict[int, bytes] = {}  # a broadcast is encoded once, and stored and sent once by the transport
        for message in (messages[k] for k in orders):
            if id(message) not in bodies:
                bodies[id(message)] = encode(message, job.arguments, self.wire)
        letters = {k: Packet(ORDER, encode(o, Order), bodies[id(messages[k])]) for k, o in orders.items()}
        errand = OpenOrders(job, orders, letters, self.terms.deadline)
        with contextlib.suppress(Lost):  # the next look meets the same and mends it
            self._send(errand, messages)
        return self._answered(errand, messages)

    def _answered(self, errand: OpenOrders, messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        """Answers in cohort order; whoever is not there at the deadline, or sends what cannot be right, is left out."""
        answered = 0
        device = self.workbench.machine.device
        try:
            for client, order in errand.orders.items():
                errand.turn = client
                while client in errand.waiting and errand.left > 0:
                    self._look(errand, messages)
                if client in errand.waiting:
                    with contextlib.suppress(Lost):
                        self._take(errand)  # what came while the server was busy is in time
                if client not in errand.arrived:
                    continue
                letter = errand.held or self._spool.take(_place(order))
                errand.held = None
                try:
                    reply, snapshot = self._read(errand, client, letter, messages[client])
                except EffuseError as error:
                    self._reject(errand, client, str(error))
                    continue
                self._charge("up", client, reply, letter.size)
                del letter
                answered += 1
                yield client, placed(reply, device), snapshot
                del reply
        finally:
            for ticket, client in errand.tickets.items():
                which, why = (
                    ("answer", "came past its deadline")
                    if client in errand.waiting
                    else ("second answer", "is one too many")
                )
                self._late[ticket] = f"client {client}'s {which} to {self._where(errand)} {why} and is discarded"
        self._check_quorum(errand, answered)

    def _check_quorum(self, errand: OpenOrders, answered: int) -> None:
        asked, silent = len(errand.orders), errand.waiting
        # as many may stay silent as the quorum spares of all clients, however few of them this job was for
        spared = 0 if self.terms.quorum is None else len(self.present) - self.terms.quorum
        needed = min(asked, max(1, asked - spared))
        told = f"; silent: {_listed(silent)}" if silent else ""
        if errand.rejected:
            told += "; rejected: " + ", ".join(f"{k} ({why})" for k, why in errand.rejected.items())
        if answered < needed:
            raise QuorumError(
                f"{self._where(errand)}: {answered} of {asked} replied, quorum {needed}{told}; lower quorum or raise deadline"
            )
        if silent:
            self.say(f"{self._where(errand)}: going on with {answered} of {asked}{told}")

    def _read(self, errand: OpenOrders, client: int, letter: Packet, message: Any) -> tuple[Any, str | None]:
        """The reply in an answer, if it is one that this client could have meant for this order."""
        receipt = decode(letter.head, Receipt, SMALL)
        if receipt.client != client:
            raise FederationError(f"the answer says that it is client {receipt.client}'s")
        if self.evaluated and receipt.snapshot != self.snapshots.get(client):
            raise FederationError("the client changed its state while being evaluated")
        expected = self._expectation.of(errand.job, message)
        reply = decode(letter.body, errand.job.returns, expected.limit)
        expected.check(reply)
        if not (weight := getattr(reply, "weight", 1.0)) > 0:
            raise FederationError(f"its weight is {weight}; weights are positive")
        return reply, receipt.snapshot

    def _look(self, errand: OpenOrders | None, messages: dict[int, Any] | None = None) -> None:
        """Take what is there, greet who is new, send what can be sent; sleep if there was nothing to do."""
        try:
            came = self._take(errand)
            now = time.monotonic()
            if now - self._looked > ROLL_CALL:
                self._looked = now
                self._greet(errand)
            if errand is not None:
                self._send(errand, messages or {})
        except Lost as lost:
            self.say(f"the connection is lost ({lost}); starting it again")
            self._forget()
            if errand is not None:
                errand.seats.clear()
                errand.tickets.clear()
            self.post.open()
            return
        if not came:
            time.sleep(POLL)

    def _take(self, errand: OpenOrders | None) -> bool:
        """Fetch what has come; answers wait for their turn on disk."""
        waiting = set(errand.waiting) if errand else set()
        mine = [ticket for ticket, client in errand.tickets.items() if client in waiting] if errand else []
        tickets = [*mine, *self._greetings, *self._late]
        came = False
        patience = max(1.0, errand.left) if errand else self.terms.deadline
        for ticket, letter in self.post.collect(tickets, patience) if tickets else ():
            came = True
            if letter.kind == UNDELIVERED:
                self._vacate(ticket, errand)
            elif ticket in self._greetings:
                self._enrol(self._greetings.pop(ticket), letter)
            elif ticket in self._late:
                self.say(self._late.pop(ticket))
            elif errand is not None and (client := errand.tickets.pop(ticket)) in errand.waiting:
                self._arrive(errand, client, letter)
        return came

    def _vacate(self, ticket: str, errand: OpenOrders | None) -> None:
        """A letter found nobody: its client has no seat until it is back, and then its order goes out again."""
        self._late.pop(ticket, None)
        if ticket in self._greetings:
            self._greeted.pop(self._greetings.pop(ticket), None)
        elif errand is not None and (client := errand.tickets.pop(ticket, None)) is not None:
            if errand.seats.pop(client, None) == self.seats.get(client):
                self.seats.pop(client, None)
                self.say(f"client {client} is gone")

    def _arrive(self, errand: OpenOrders, client: int, letter: Packet) -> None:
        if letter.kind == ANSWER:
            if client == errand.turn:
                errand.held = letter
            else:
                self._spool.put(_place(errand.orders[client]), letter)
            errand.arrived.add(client)
        elif letter.kind == REFUSAL:
            self._reject(errand, client, _why(letter))
        else:
            self._reject(errand, client, f"a message of the unknown type '{letter.kind[:40]}'")

    def _reject(self, errand: OpenOrders, client: int, why: str) -> None:
        errand.arrived.discard(client)
        errand.rejected[client] = why
        self.say(f"{self._where(errand)}: client {client}'s answer is rejected: {why}")

    def _send(self, errand: OpenOrders, messages: dict[int, Any]) -> None:
        """Send orders to those who have not got theirs, or have begun reset_for since."""
        for client in errand.waiting:
            seat = self.seats.get(client)
            if seat is None or errand.seats.get(client) == seat:
                continue
            letter = errand.letters[client]
            # a late answer is still heard of for a while; after that the transport need not keep it
            errand.tickets[self.post.send(seat.node, letter, max(0.0, errand.left) + SOON)] = client
            errand.seats[client] = seat
            self._charge("down", client, messages[client], letter.size)

    def _greet(self, errand: OpenOrders | None) -> None:
        """Send the terms to nodes that are new, and from time to time to those that are silent: they may have begun reset_for."""
        there, now = self.post.nodes(), time.monotonic()
        seated = {seat.node for seat in self.seats.values()}
        silent = {self.seats[k].node for k in errand.waiting if k in self.seats} if errand else set()
        for node in there:
            since = now - self._greeted.get(node, -KNOCK)
            if since >= KNOCK and (node not in seated or node in silent):
                self._greeted[node] = now
                hello = self.post.signed(dataclasses.replace(self.hello, owner=self.post.owner(node)))
                letter = Packet(INVITATION, encode(hello, Invitation))
                self._greetings[self.post.send(node, letter, SOON)] = node

    def _enrol(self, node: int, letter: Packet) -> None:
        """Give a client its seat, if it is who it says it is."""
        if letter.kind != ENROLMENT:
            why = _why(letter) if letter.kind == REFUSAL else f"a message of the unknown type '{letter.kind[:40]}'"
            if self._declined.get(node) != why:  # it will be asked again, and not be told of again
                self._declined[node] = why
                self.say(f"node {node} declines: {why}")
            return
        try:
            enrolled = decode(letter.head, Enrolment, SMALL)
        except WireError as error:
            self.say(f"node {node} enrols with what cannot be read: {error}")
            return
        client, owner = enrolled.client, self.post.owner(node)
        if client not in self._known:
            self._turn_away(node, f"it says that it is client {client}, but clients are 0 to {len(self.clients) - 1}")
        elif owner is not None and owner != client:
            self._turn_away(node, f"it says that it is client {client}, but it holds the key of client {owner}")
        else:
            seat = Connection(node, enrolled.session)
            if self.seats.get(client) != seat:
                self.say(f"client {client} is {'back' if client in self.seats else 'connected'}")
            self.seats[client] = seat

    def _turn_away(self, node: int, why: str) -> None:
        """Say so on both sides: whoever started that site cannot see our log."""
        self.say(f"node {node} is turned away: {why}")
        self.post.send(node, Packet(REFUSAL, encode(Refusal(why), Refusal)), SOON)

    def _forget(self) -> None:
        self.seats.clear()
        self._greeted.clear()
        self._greetings.clear()
        self._late.clear()

    def _where(self, errand: OpenOrders) -> str:
        return f"round {next(iter(errand.orders.values())).t}, job '{errand.job.name}'"


def _why(letter: Packet) -> str:
    with contextlib.suppress(WireError):
        return " ".join(decode(letter.head, Refusal, SMALL).why.split())[:400]
    return "a refusal that cannot be read"


def _place(order: Order) -> str:
    return f"{order.t}_{order.call}_{order.client}"


def _listed(clients: list[int]) -> str:
    return ", ".join(map(str, clients))
