"""The messages between server and sites, and the interface of the transport below them."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from effuse.core.errors import EffuseError, WireError, shown
from effuse.core.message import message
from effuse.core.recipe import manifest_digest
from effuse.core.wire import decode, encode

INVITATION, ORDER, FAREWELL = "hello", "order", "farewell"  # from the server
ENROLMENT, ANSWER, REFUSAL = "enrolled", "answer", "refusal"  # from a site; the server refuses a site, too
UNDELIVERED = "undelivered"  # from the transport: the site is gone, or went before it answered
HEAD_LIMIT = 64 << 10  # bytes that a site's enrolment, receipt or refusal may have
REASON_LIMIT, SHOWN_LIMIT = 1000, 400  # characters of a refusal: that are sent, and that are reported


class Packet(NamedTuple):
    """One message on its way: a small head, and a body that a transport may store once for many receivers."""

    kind: str
    head: bytes = b""
    body: bytes = b""

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


@message(name="terms")
class Invitation:
    """The server's terms: the manifest, and proof that its sender holds the server's key."""

    name: str
    recipe: dict[str, str]  # resolved, every value in the closed grammar
    classes: tuple[str, ...]  # what the labels mean, in order
    certificate: str  # the server's, PEM; empty without keys
    signature: str  # of the Flower run, the manifest's hash and the owner, hex
    owner: int | None = None  # the client whose key its receiver holds; None without keys

    @property
    def digest(self) -> str:
        """The manifest's hash, which a site pins."""
        return manifest_digest(self.recipe, self.classes)


@message(name="enrolment")
class Enrolment:
    """A site accepts the terms; a new session means that its process was restarted and its orders are lost."""

    client: int
    session: str


@message(name="refusal")
class Refusal:
    """One side declines or fails, in one sentence."""

    why: str


def refusal(why: str) -> Packet:
    """A refusal that is ready to be sent."""
    return Packet(REFUSAL, encode(Refusal(why[:REASON_LIMIT]), Refusal))


def reason_of(packet: Packet) -> str:
    """The sentence of a refusal, in one line of limited length."""
    with contextlib.suppress(WireError):
        return shown(" ".join(decode(packet.head, Refusal, HEAD_LIMIT).why.split()), SHOWN_LIMIT)
    return "a refusal that cannot be read"


def unknown_kind(packet: Packet) -> str:
    return f"a message of the unknown type '{shown(packet.kind, 40)}'"


class Lost(EffuseError):
    """The connection broke, and everything under way is lost with it."""


class Channel(ABC):
    """The server's transport: packets to nodes, and their replies."""

    limit: int | None = None  # bytes that a reply may have, where it is known; a larger one becomes a refusal

    @abstractmethod
    def open(self) -> None:
        """Start, or start again after `Lost`; tickets from before are no longer valid."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    @abstractmethod
    def nodes(self) -> set[int]:
        """The nodes that are connected."""

    def turned_away(self) -> list[str]:
        """The addresses of nodes that were turned away since the last call."""
        return []

    @abstractmethod
    def owner(self, node: int) -> int | None:
        """The client whose key this node has proved to hold; None where there are no keys."""

    @abstractmethod
    def signed(self, invitation: Invitation) -> Invitation:
        """The same terms with this server's signature."""

    @abstractmethod
    def send(self, node: int, packet: Packet, life: float) -> str:
        """Send a packet that may be discarded after `life` seconds; the ticket fetches its reply."""

    def send_all(self, packets: Sequence[tuple[int, Packet]], life: float) -> Iterator[str]:
        """Send packets to their nodes; their tickets, each when its packet was sent."""
        return (self.send(node, packet, life) for node, packet in packets)

    @abstractmethod
    def collect(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        """The replies that have come, one in memory at a time; one that is still uploading may take `patience` seconds."""
