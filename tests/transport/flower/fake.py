"""A channel in this process: real sites and real packets, no network; any site can be made to misbehave."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from effuse.core.recipe import Recipe
from effuse.core.wire import decode, encode
from effuse.runs import driver
from effuse.transport.context import EngineContext
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.messages import (
    ANSWER,
    ENROLMENT,
    INVITATION,
    ORDER,
    REFUSAL,
    Channel,
    Enrolment,
    Invitation,
    Lost,
    Packet,
    Refusal,
    refusal,
)
from effuse.transport.flower.server import Flower
from effuse.transport.flower.site import Site
from effuse.transport.flower.terms import Terms

# (client, number of its answer, the answer) -> the answer that is sent; None: it is lost
Fault = Callable[[int, int, Packet], Packet | None]


EVERYONE = Terms()
TWO_OF_THREE = Terms(quorum=2, deadline=0.3)


class FakeChannel(Channel):
    """Nodes are numbered 100, 101, ...; the site of node n does its work when its reply is collected."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.folder = folder
        self.sites = {100 + k: self.site(k) for k in range(clients)}
        self.away: dict[int, Site] = {}
        self.packets: dict[str, tuple[int, Packet]] = {}
        self.answers: dict[int, int] = dict.fromkeys(range(clients), 0)
        self.fault: Fault = lambda client, n, packet: packet
        self.orders: list[int] = []  # clients, as orders went out
        self.owners: dict[int, int] | None = None
        self.breaks = 0  # orders after which the connection breaks, until it is opened again
        self.broken = False
        self.opened = 0
        self.held: list[tuple[str, Packet]] = []  # (ticket, reply) that are collected later
        self.sent = 0
        self.refused: dict[int, str] = {}  # client -> why the server refused it

    def site(self, client: int) -> Site:
        return Site(self.folder / str(client), client, None, Consent(), "cpu", lambda words: None)

    def restart(self, client: int) -> None:
        """The process at a site dies and is started again; the node keeps its key."""
        self.sites[100 + client] = self.site(client)
        self.packets = {t: (n, packet) for t, (n, packet) in self.packets.items() if n != 100 + client}

    def leave(self, client: int) -> None:
        """A site goes without a word."""
        self.packets = {t: (n, packet) for t, (n, packet) in self.packets.items() if n != 100 + client}
        self.away[100 + client] = self.sites.pop(100 + client)

    def come_back(self, client: int) -> None:
        self.away.pop(100 + client)
        self.sites[100 + client] = self.site(client)

    def open(self) -> None:
        self.opened += 1
        self.broken = False
        self.packets.clear()

    def close(self) -> None:
        pass

    def check(self) -> None:
        if self.broken:
            raise Lost("the cable was pulled")

    def nodes(self) -> set[int]:
        self.check()
        return set(self.sites)

    def owner(self, node: int) -> int | None:
        return self.owners and self.owners[node]

    def signed(self, invitation: Invitation) -> Invitation:
        return invitation

    def send(self, node: int, packet: Packet, life: float) -> str:
        if packet.kind == ORDER:
            self.orders.append(node - 100)
            if self.breaks and len(self.orders) == self.breaks:
                self.breaks, self.broken = 0, True
        if packet.kind == REFUSAL:  # the server collects no reply to it
            self.refused[node - 100] = decode(packet.head, Refusal).why
        self.check()
        ticket = str(self.sent)
        self.sent += 1
        self.packets[ticket] = node, packet
        return ticket

    def collect(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        self.check()
        for ticket, packet in [h for h in self.held if h[0] in tickets]:
            self.held.remove((ticket, packet))
            yield ticket, packet
        for ticket in tickets:
            if ticket in self.packets:
                node, packet = self.packets.pop(ticket)
                reply = None if node in self.away else self.reply(node, packet)
                if reply is not None:
                    yield ticket, reply

    def reply(self, node: int, packet: Packet) -> Packet | None:
        client = node - 100
        try:
            if packet.kind == INVITATION:
                return Packet(ENROLMENT, encode(self.sites[node].enrol(decode(packet.head, Invitation)), Enrolment))
            if packet.kind != ORDER:
                return Packet(ANSWER)
            answer = Packet(ANSWER, *self.sites[node].perform(packet.head, packet.body))
        except Exception as error:  # a real site survives a job that fails, too
            answer = refusal(self.sites[node].disclosed(error))
        self.answers[client] += 1
        return self.fault(client, self.answers[client], answer)


def over(channel: FakeChannel, terms: Terms) -> Callable[[EngineContext], Flower]:
    """An engine over a fake channel."""
    return lambda context: Flower(context, channel, terms, "toy")


def nan(answer: Packet) -> Packet:
    """The answer with a NaN over its last number; effuse itself refuses to encode one."""
    return answer._replace(body=answer.body[:-4] + bytes.fromhex("0000c07f"))


def log_of(folder: Path) -> str:
    """What the server of a run reported."""
    return (folder / "federation.log").read_text()


def run_over(channel: FakeChannel, recipe: Recipe, out: Path, terms: Terms = EVERYONE) -> dict:
    """A run with the sites of a fake channel."""
    return driver.run(recipe, out, name="toy", served=over(channel, terms))
