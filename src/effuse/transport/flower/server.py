"""The server's side: orders to clients at their sites, answers in cohort order, a deadline and a quorum."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, Self

import torch

from effuse.core.algorithm import Job
from effuse.core.errors import shown
from effuse.core.federation import Federation, Order
from effuse.core.files import writing
from effuse.core.visit import placed
from effuse.core.watch import Seen, conspicuous, described
from effuse.core.wire import encode
from effuse.core.workbench import Workbench
from effuse.transport.context import EngineContext
from effuse.transport.flower.answers import Answers, in_words
from effuse.transport.flower.bounds import most_images
from effuse.transport.flower.enrolment import Roster
from effuse.transport.flower.expectation import Expectation
from effuse.transport.flower.inbox import Inbox, file_name
from effuse.transport.flower.messages import (
    ANSWER,
    FAREWELL,
    HEAD_LIMIT,
    ORDER,
    REFUSAL,
    UNDELIVERED,
    Channel,
    Invitation,
    Lost,
    Packet,
    reason_of,
    unknown_kind,
)
from effuse.transport.flower.terms import KEEP, OpenOrders, Terms, joined

POLL = 0.2  # seconds between polls of the channel while nothing comes
LIST_NODES = 1.0  # seconds between queries for the connected nodes
PROGRESS = 30.0  # seconds between reports while clients are missing
FAREWELL_WAIT = 5.0  # seconds that sites have to fetch the farewell


class Flower(Federation):
    """Clients behind a channel: an order is sent again when its client reconnects, and a silent client is left out."""

    watching = True

    def __init__(self, context: EngineContext, channel: Channel, terms: Terms, name: str = "") -> None:
        recipe = context.recipe
        bench = Workbench(context.machines[0], recipe.task, recipe.rounds)
        super().__init__(recipe.algorithm, range(recipe.clients), bench, recipe.seed, recipe.wire)
        self.present = [k for k in self.clients if k not in terms.shut_out]
        self.channel, self.terms, self._show = channel, terms, context.say
        self.invitation = Invitation(name, recipe.portable.saved(), context.train.classes, "", "")
        self.roster = Roster(channel, self.invitation, recipe.clients, self.report)
        self._log = context.folder / "federation.log"
        self._inbox = Inbox(context.folder / "inbox")
        expectation = Expectation(recipe, len(context.train.classes), self.report)
        self._reader = Answers(expectation, most_images(terms.images, len(context.train)))
        self._asking: OpenOrders | None = None  # the orders whose answer is being used
        self._late: dict[str, tuple[int, str]] = {}  # ticket -> its client, and what to report when it is answered
        self._listed = 0.0  # when the connected nodes were last queried

    def __enter__(self) -> Self:
        self._inbox.clear()
        self.channel.open()
        try:
            self.gather()
        except BaseException:
            self.channel.close()
            raise
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                self._farewell()
        finally:
            self.channel.close()
            self._inbox.clear()

    def _farewell(self) -> None:
        """Tell the sites that the run is over, and wait a moment until they have fetched it."""
        with contextlib.suppress(Lost):
            nodes = [connection.node for connection in self.roster.connections.values()]
            tickets = {self.channel.send(node, Packet(FAREWELL), KEEP) for node in nodes}
            until = time.monotonic() + FAREWELL_WAIT
            while tickets and time.monotonic() < until:
                tickets -= {ticket for ticket, _ in self.channel.collect(list(tickets), 1.0)}
                time.sleep(POLL if tickets else 0)

    def gather(self) -> None:
        """Wait for every client; after the deadline a quorum of them is enough."""
        connected = self.roster.connections
        began = reported = time.monotonic()
        self.report(f"manifest {self.invitation.name}@{self.invitation.digest}; waiting for {len(self.present)} clients")
        if self.terms.shut_out:
            self.report(f"shut out, because they have no key: {joined(sorted(self.terms.shut_out))}")
        while missing := [k for k in self.present if k not in connected]:
            now = time.monotonic()
            self.on_wait(missing, math.inf if self.terms.quorum is None else began + self.terms.deadline)
            enough = self.terms.quorum is not None and len(connected) >= self.terms.quorum
            if enough and now - began > self.terms.deadline:
                self.report(f"starting without clients {joined(missing)}")
                return
            if now - reported > PROGRESS:
                reported = now
                self.report(f"connected: {joined(sorted(connected)) or 'none'}; waiting for {joined(missing)}")
            self._step(None)
        self.on_wait((), math.inf)

    def report(self, words: str) -> None:
        """Show a sentence to the operator, and write it to the run's log."""
        self._write(words)
        self._show(words)

    def _write(self, words: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with writing(self._log), open(self._log, "a") as file:
            file.write(f"{stamp} {words}\n")

    def observed(self, where: str, seen: dict[int, Seen]) -> None:
        super().observed(where, seen)
        self._write(f"{where}: {described(seen)}")
        for client, why in conspicuous(seen).items():
            self.report(f"{where}: look at client {client}: {why}")

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        # an algorithm may still ask clients that were shut out since
        orders = {k: order for k, order in orders.items() if k not in self.terms.shut_out}
        resumed = any(o.base for o in orders.values())
        sent = {id(messages[k]): messages[k] for k in orders}
        # a job that is faulty in itself fails here, before an order goes out
        limits = [self._reader.expected(job, message, resumed).limit for message in sent.values()]
        self.channel.limit = max(limits, default=0) + 2 * HEAD_LIMIT
        bodies: dict[int, bytes] = {}  # a broadcast is encoded once, and stored and sent once by the transport
        for message in (messages[k] for k in orders):
            if id(message) not in bodies:
                bodies[id(message)] = encode(message, job.arguments, self.wire)
        packets = {k: Packet(ORDER, encode(o, Order), bodies[id(messages[k])]) for k, o in orders.items()}
        pending = OpenOrders(job, orders, packets, self.terms.deadline)
        with contextlib.suppress(Lost):  # the next step meets the same error and opens the channel again
            self._send(pending, messages)
        return self._answers_to(pending, messages)

    def _answers_to(self, pending: OpenOrders, messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        """Answers in cohort order; a client without a valid answer at the deadline is left out."""
        device = self.workbench.machine.device
        try:
            for client, order in pending.orders.items():
                pending.next = client
                while client in pending.waiting and self._waits(pending):
                    self._tell(pending)
                    self._step(pending, messages)
                self.on_wait((), math.inf)
                if client in pending.waiting:
                    with contextlib.suppress(Lost):
                        self._collect(pending)  # an answer that came while the server was busy is in time
                if client not in pending.arrived:
                    continue
                packet = pending.next_answer or self._inbox.take(file_name(order))
                pending.next_answer = None
                try:
                    reply, receipt = self._reader.read(pending.job, order, packet, messages[client], self.evaluated)
                except Exception as error:  # whatever a client sends, it costs no more than its own answer
                    self._discard(client, packet.size)
                    self._reject(pending, client, in_words(error))
                    continue
                self._charge("up", client, reply, packet.size)
                del packet
                self._asking = pending
                yield client, placed(reply, device), receipt.snapshot
                del reply
        finally:
            for ticket, client in pending.tickets.items():
                late = client in pending.waiting
                which, why = ("answer", "came after the deadline") if late else ("second answer", "is not needed")
                self._late[ticket] = client, f"client {client}'s {which} to {pending} {why} and is discarded"
        if words := pending.result(self._spared):
            self.report(words)

    def reject(self, client: int, error: Exception) -> None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or self._asking is None:
            raise error  # the server's own trouble
        self._reject(self._asking, client, in_words(error))

    def _waits(self, pending: OpenOrders) -> bool:
        """Whether to wait on: not past the deadline, nor only for clients that are gone and can be spared."""
        now, gone = time.monotonic(), self.roster.gone
        all_gone = all(k in gone and now - gone[k] >= self.terms.grace for k in pending.waiting)
        spared = all_gone and len(pending.arrived) >= pending.needed(self._spared)
        return pending.seconds_left > 0 and not spared

    def _tell(self, pending: OpenOrders) -> None:
        """Show for whom the server waits, and write it to the log once a job."""
        self.on_wait(pending.waiting, pending.until)
        if not pending.told and time.monotonic() - pending.began > PROGRESS:
            pending.told = True
            end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + pending.seconds_left))
            self.report(f"{pending}: waiting for {joined(pending.waiting)} until {end}")

    @property
    def _spared(self) -> int:
        """How many clients may be silent."""
        return 0 if self.terms.quorum is None else len(self.present) - self.terms.quorum

    def _step(self, pending: OpenOrders | None, messages: dict[int, Any] | None = None) -> None:
        """Collect replies, invite nodes and send orders; sleep if there was nothing to collect."""
        try:
            collected = self._collect(pending)
            now = time.monotonic()
            if now - self._listed > LIST_NODES:
                self._listed = now
                self.roster.invite(pending.waiting if pending is not None else ())
                for address in self.channel.turned_away():
                    self.report(f"a node at {shown(address, 60)} is turned away: its key is unknown, shut out or in use")
            if pending is not None:
                self._send(pending, messages or {})
        except Lost as lost:
            self.report(f"the connection is lost ({lost}); starting it again")
            self.roster.clear()
            self._late.clear()
            if pending is not None:
                pending.sent_to.clear()
                pending.tickets.clear()
            self.channel.open()
            return
        if not collected:
            time.sleep(POLL)

    def _collect(self, pending: OpenOrders | None) -> bool:
        """Fetch the replies that have come; an answer that is not next waits on disk."""
        waiting = set(pending.waiting) if pending else set()
        awaited = [ticket for ticket, client in pending.tickets.items() if client in waiting] if pending else []
        tickets = [*awaited, *self.roster.tickets, *self._late]
        collected = False
        patience = max(1.0, pending.seconds_left) if pending else self.terms.deadline
        for ticket, packet in self.channel.collect(tickets, patience) if tickets else ():
            collected = True
            if packet.kind == UNDELIVERED:
                self._undelivered(ticket, pending)
            elif ticket in self.roster.tickets:
                self.roster.receive(ticket, packet)
            elif ticket in self._late:
                late, words = self._late.pop(ticket)
                self._discard(late, packet.size)
                self.report(words)
            # a second reply to one order has no ticket left
            elif pending is not None and (client := pending.tickets.pop(ticket, -1)) in pending.waiting:
                self._receive(pending, client, packet)
        return collected

    def _undelivered(self, ticket: str, pending: OpenOrders | None) -> None:
        """A packet did not reach its node: the client is disconnected, and is sent its order again when it is back."""
        self._late.pop(ticket, None)
        if ticket in self.roster.tickets:
            self.roster.undelivered(ticket)
        elif pending is not None and (client := pending.tickets.pop(ticket, None)) is not None:
            connection = pending.sent_to.pop(client, None)
            if connection == self.roster.connections.get(client):
                self.roster.disconnect(client)

    def _receive(self, pending: OpenOrders, client: int, packet: Packet) -> None:
        if packet.kind == ANSWER:
            if client == pending.next:
                pending.next_answer = packet
            else:
                self._inbox.put(file_name(pending.orders[client]), packet)
            pending.arrived.add(client)
            self.spent(client, time.monotonic() - pending.began)
        else:
            self._discard(client, packet.size)
            self._reject(pending, client, reason_of(packet) if packet.kind == REFUSAL else unknown_kind(packet))

    def _reject(self, pending: OpenOrders, client: int, why: str) -> None:
        pending.arrived.discard(client)
        pending.rejected[client] = why
        self.report(f"{pending}: client {client}'s answer is rejected: {why}")

    def _send(self, pending: OpenOrders, messages: dict[int, Any]) -> None:
        """Send orders to clients that do not have theirs, or have restarted since they got it."""
        connected = {k: found for k in pending.waiting if (found := self.roster.connections.get(k)) is not None}
        due = {k: connection for k, connection in connected.items() if pending.sent_to.get(k) != connection}
        packets = [(connection.node, pending.packets[k]) for k, connection in due.items()]
        # the transport keeps it a little longer than the deadline, so that a late answer can be reported
        tickets = self.channel.send_all(packets, max(0.0, pending.seconds_left) + KEEP)
        for (client, connection), ticket in zip(due.items(), tickets, strict=True):
            pending.tickets[ticket] = client
            pending.sent_to[client] = connection
            self._charge("down", client, messages[client], pending.packets[client].size)
