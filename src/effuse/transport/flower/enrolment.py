"""Which node speaks for which client: nodes are sent the terms, and enrol if they may."""

import dataclasses
import time
from collections.abc import Callable, Iterable

from effuse.core.errors import WireError
from effuse.core.wire import decode, encode
from effuse.transport.flower.messages import (
    ENROLMENT,
    HEAD_LIMIT,
    INVITATION,
    REFUSAL,
    Channel,
    Enrolment,
    Invitation,
    Packet,
    reason_of,
    refusal,
    unknown_kind,
)
from effuse.transport.flower.terms import KEEP, Connection

INVITE_AGAIN = 10.0  # seconds after which a node without an enrolment, or a silent client, is sent the terms again


class Roster:
    """The clients that are connected, and how each is reached."""

    def __init__(self, channel: Channel, invitation: Invitation, clients: int, report: Callable[[str], None]) -> None:
        self.channel, self.invitation, self.clients, self.report = channel, invitation, clients, report
        self.connections: dict[int, Connection] = {}
        self.gone: dict[int, float] = {}  # client without a connected node -> since when
        self.tickets: dict[str, int] = {}  # of invitations without a reply -> node
        self._invited: dict[int, float] = {}  # node -> when it was last sent the terms
        self._declined: dict[int, str] = {}  # node -> the reason it gave last

    def invite(self, awaited: Iterable[int]) -> None:
        """Send the terms to nodes that have not enrolled, and again to awaited clients, since they may have restarted."""
        nodes, now = self.channel.nodes(), time.monotonic()
        enrolled = {connection.node for connection in self.connections.values()}
        for k in range(self.clients):
            if k in self.connections and self.connections[k].node in nodes:
                self.gone.pop(k, None)
            else:
                self.gone.setdefault(k, now)
        silent = {self.connections[k].node for k in awaited if k in self.connections}
        for node in nodes:
            since = now - self._invited.get(node, -INVITE_AGAIN)
            if since >= INVITE_AGAIN and (node not in enrolled or node in silent):
                self._invited[node] = now
                terms = self.channel.signed(dataclasses.replace(self.invitation, owner=self.channel.owner(node)))
                self.tickets[self.channel.send(node, Packet(INVITATION, encode(terms, Invitation)), KEEP)] = node

    def receive(self, ticket: str, packet: Packet) -> None:
        """Enrol the client whose node replied to an invitation, unless it declines or is not who it claims to be."""
        node = self.tickets.pop(ticket)
        if packet.kind != ENROLMENT:
            why = reason_of(packet) if packet.kind == REFUSAL else unknown_kind(packet)
            if self._declined.get(node) != why:  # it is invited again; the same reason is not reported again
                self._declined[node] = why
                self.report(f"node {node} declines: {why}")
            return
        try:
            enrolment = decode(packet.head, Enrolment, HEAD_LIMIT)
        except WireError as error:
            self.report(f"node {node}: its enrolment cannot be read: {error}")
            return
        client, owner = enrolment.client, self.channel.owner(node)
        if client not in range(self.clients):
            self._refuse(node, f"it claims to be client {client}, but clients are 0 to {self.clients - 1}")
        elif owner is not None and owner != client:
            self._refuse(node, f"it claims to be client {client}, but it holds the key of client {owner}")
        else:
            connection = Connection(node, enrolment.session)
            if self.connections.get(client) != connection:
                self.report(f"client {client} is {'connected again' if client in self.connections else 'connected'}")
            self.connections[client] = connection
            self.gone.pop(client, None)

    def undelivered(self, ticket: str) -> None:
        """An invitation reached no node; the next one may be sent at once."""
        self._invited.pop(self.tickets.pop(ticket), None)

    def disconnect(self, client: int) -> None:
        """Drop the connection of a client that its order did not reach."""
        self.connections.pop(client, None)
        self.report(f"client {client} is disconnected")

    def clear(self) -> None:
        """Drop all connections: the channel is opened again."""
        self.connections.clear()
        self.gone.clear()
        self.tickets.clear()
        self._invited.clear()

    def _refuse(self, node: int, why: str) -> None:
        """Report it on both sides: the site's operator cannot see the server's log."""
        self.report(f"node {node} is refused: {why}")
        self.channel.send(node, refusal(why), KEEP)
