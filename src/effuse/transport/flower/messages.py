"""What server and sites write to each other, and the seam below which a transport carries it."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from effuse.core.errors import EffuseError
from effuse.core.message import message

INVITATION, ORDER, FAREWELL = "hello", "order", "farewell"  # from the server
ENROLMENT, ANSWER, REFUSAL = "enrolled", "answer", "refusal"  # from a site
UNDELIVERED = "undelivered"  # from the transport: the site is gone, or went before it answered


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
    """The server's terms: the manifest, and proof that whoever sends it holds the server's key."""

    name: str
    recipe: dict[str, str]  # resolved, every value in the closed grammar
    classes: tuple[str, ...]  # what the labels mean, in order
    certificate: str  # the server's, PEM; empty without keys
    signature: str  # of the Flower run, the manifest's hash and the owner, hex
    owner: int | None = None  # the client whose key its receiver holds; None without keys

    @property
    def digest(self) -> str:
        """The manifest's hash, which a site pins."""
        blob = json.dumps([self.recipe, self.classes], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(blob.encode()).hexdigest()


@message(name="enrolment")
class Enrolment:
    """A site accepts; a new session means that whatever it was doing before is lost."""

    client: int
    session: str


@message(name="refusal")
class Refusal:
    """A site declines or fails, in one sentence."""

    why: str


class Lost(EffuseError):
    """The connection broke, and with it everything under way."""


class Channel(ABC):
    """The server's transport: letters to nodes, and their replies."""

    @abstractmethod
    def open(self) -> None:
        """Start, or start again after `Lost`; tickets from before are worthless."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    def nodes(self) -> set[int]:
        """Who is connected."""

    @abstractmethod
    def owner(self, node: int) -> int | None:
        """The client whose key this node has proved to hold; None where there are no keys."""

    @abstractmethod
    def signed(self, hello: Invitation) -> Invitation:
        """The same terms with this server's proof."""

    @abstractmethod
    def send(self, node: int, letter: Packet, life: float) -> str:
        """Send a letter that may be forgotten after `life` seconds; the ticket fetches its reply."""

    @abstractmethod
    def collect(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        """Replies that are there, one in memory at a time; one still uploading may take `patience` seconds."""
