"""A site's end of Flower: outbound requests only, no listening port, and no code that anybody sends is ever run."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from effuse.core.errors import FederationError
from effuse.core.wire import decode, encode
from effuse.transport.flower.codec import Ends, content_of, letter_of, pull, push
from effuse.transport.flower.keys import ClientKeys
from effuse.transport.flower.messages import (
    ANSWER,
    ENROLMENT,
    FAREWELL,
    INVITATION,
    ORDER,
    REFUSAL,
    Enrolment,
    Invitation,
    Packet,
    Refusal,
)
from effuse.transport.flower.site import Site, told
from effuse.transport.flower.trouble import Disconnected, TurnedAway, clocks_apart, code_of, in_short

POLL, SLOWEST = 0.2, 3.0  # seconds between looks for a letter
IDLE_SHARE = 0.05  # of the time since the last letter: who waits long looks less often, and rounds get hardly longer
HEARTBEAT = 4.0  # seconds between signs of life; after two of Flower's shortest intervals without one a node counts as gone
AGAIN = 1.0  # seconds before a lost connection is tried again
REFUSED = 30.0  # seconds of being refused after which it is meant
STARTING = 5.0  # seconds of not being known after which it is meant: a server that starts learns its keys in a tenth of one
DOWNLOAD = 3600.0  # seconds that a letter may take to come


class SiteClient:
    """Keeps a site connected: letters in, replies out, while a thread of its own does the work."""

    def __init__(self, site: Site, address: str, keys: ClientKeys | None) -> None:
        self.site, self.address, self.keys = site, address, keys
        # without keys a node is whoever it says; one identity for as long as we run, so that a reply finds its way after a break
        self.private = keys.private if keys is not None else ec.generate_private_key(ec.SECP384R1())
        self.public = public_key_to_bytes(self.private.public_key())
        self._orders: queue.Queue[tuple[Message, Packet]] = queue.Queue()
        self._replies: queue.Queue[tuple[Message, Packet]] = queue.Queue()
        self._early: list[tuple[int, Message, Packet]] = []  # orders that came before the terms
        self._vouched: set[int] = set()  # Flower runs whose terms we accepted
        self._failing: dict[bool, float] = {}  # since when we are refused: as unknown, and otherwise
        self._reason = ""  # why there was no connection, as it was said last
        self._dry = self._over = False
        self._seen: Invitation | None = None

    def run(self) -> None:
        """Serve until the run is over."""
        threading.Thread(target=self._work, daemon=True).start()
        while not self._over:
            self._try(lambda: self._over and self._replies.empty())
        self.site.say("the server says that the run is over")

    def peek(self) -> Invitation:
        """The server's terms, declined."""
        self._dry = True
        while self._seen is None:
            self._try(lambda: self._seen is not None and self._replies.empty())
        if self._seen.owner not in (None, self.site.client):  # who joins in earnest is turned away by the server
            ours, theirs = self.site.client, self._seen.owner
            remedy = f"give --client-id {theirs}, or ask the server's operator for the keys of client {ours}"
            raise FederationError(f"--keys holds the key of client {theirs}, not of client {ours}; {remedy}")
        return self._seen

    def _try(self, enough: Callable[[], bool]) -> None:
        try:
            self._converse(enough)
        except Disconnected as gone:
            if str(gone) != self._reason:  # once, and not every second of a night
                self.site.say(f"no connection to {self.address} ({gone}); trying again {gone.until}")
            self._reason = str(gone)
            time.sleep(AGAIN)

    def _converse(self, enough: Callable[[], bool]) -> None:
        """One connection, from activation to its break, or until it is enough."""
        with self._connected() as client:
            node = self._activated(client)
            ends = Ends(client, node)
            self._reason = ""
            self.site.say(f"connected to {self.address} as client {self.site.client}")
            resting = threading.Event()
            lost = threading.Event()
            threading.Thread(target=_beat, args=(client, node, resting, lost), daemon=True).start()
            last, pause = time.monotonic(), 0.0
            try:
                while not enough():
                    if lost.is_set():
                        raise Disconnected("the server no longer knows this node")
                    busy = self._reply(ends, pause)
                    busy |= self._receive(ends)
                    last = time.monotonic() if busy else last
                    pause = 0.0 if busy else min(SLOWEST, max(POLL, IDLE_SHARE * (time.monotonic() - last)))
            except (httpx.HTTPError, ObjectPullError, ObjectPushError) as error:
                raise Disconnected(in_short(error)) from None
            finally:
                resting.set()
                with contextlib.suppress(httpx.HTTPError, RuntimeError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _connected(self) -> Any:
        root = None if self.keys is None else self.keys.ca.read_bytes()
        signing = NodeAuthHttpInterceptor(self.private, self.private.public_key())
        component = RuntimeVersionHttpInterceptor(component_name="effuse")
        return FleetHttpClient.from_server_address(self.address, self.keys is None, root, [component, signing])

    def _activated(self, client: Any) -> Node:
        try:
            if self.keys is None:
                with contextlib.suppress(httpx.HTTPStatusError):  # it is known already, after a break
                    client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public))
            request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
            node = Node(node_id=client.ActivateNode(request).node_id)
        except httpx.HTTPError as error:
            self._deactivate(client)
            raise self._judged(client, error) from None
        self._failing.clear()
        (self.site.folder / "node").write_text(str(node.node_id))
        return node

    def _deactivate(self, client: Any) -> None:
        """A node that was killed counts as there for a while, and cannot be activated: take it down in its own name."""
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=int((self.site.folder / "node").read_text())))

    def _judged(self, client: Any, error: httpx.HTTPError) -> Disconnected:
        """Why there is no connection; gives up where trying again is in vain: a server that is not ours, or does not want us."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise FederationError(
                f"{self.address} does not show a certificate of this federation; check the address and the ca.crt in --keys"
            ) from None
        if (
            code_of(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
        ):  # said of a strange key, and of one whose node is there
            error = self._asked_about_the_key(client)
        if not isinstance(error, (httpx.HTTPStatusError, httpx.RemoteProtocolError, httpx.ReadError)):
            self._failing.clear()  # nobody there yet: wait for the server
            return Disconnected(in_short(error))
        unknown, why = code_of(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, in_short(error)
        remedy = "ask the operator for this client's keys, or end another process that takes part with them"
        if unknown:
            why = "the server does not know this key"
            remedy = f"ask its operator whether client {self.site.client} was shut out, or for the keys that are in use"
        elif code_of(error) == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            why = "another process takes part with this key, or did so until a moment ago"
        if self.keys is None:
            remedy = "join with the --keys that the operator sent"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            why = "the server does not accept this site's signature"
            remedy = f"{clocks_apart(error.response)}set the clocks right, a request is good for five minutes"
        since = self._failing.setdefault(unknown, time.monotonic())
        if time.monotonic() - since > (STARTING if unknown else REFUSED):
            raise FederationError(f"{why if unknown else f'{self.address} refuses this node ({why})'}; {remedy}") from None
        return TurnedAway(why)

    def _asked_about_the_key(self, client: Any) -> httpx.HTTPError:
        """What is wrong with an activation whose interval is none: that, where the key is known, and otherwise the key."""
        try:
            client.ActivateNode(ActivateNodeRequest(public_key=self.public))
        except httpx.HTTPError as told:
            return told
        return httpx.ReadError("an activation without an interval was granted")  # by a Flower that we do not know

    def _receive(self, ends: Ends) -> bool:
        """Take one letter, if there is one: terms are answered here, orders go to the worker."""
        pulled = ends.client.PullMessages(PullMessagesRequest(node=ends.node))
        if not pulled.messages_list:
            return False
        run = message_from_proto(pulled.messages_list[0]).metadata.run_id
        message = pull(ends, run, pulled.message_object_trees[0], DOWNLOAD)
        letter = letter_of(message)
        if letter.kind == INVITATION:
            self._replies.put((message, self._answered(lambda: self._terms(letter, run))))
        elif letter.kind == ORDER and run in self._vouched:
            self._order(message, letter)
        elif letter.kind == ORDER and not self._vouched and not self._dry:
            self._early.append((run, message, letter))  # meant for the process that was here before us; the terms follow
        elif letter.kind == FAREWELL and run in self._vouched:
            self._over = True
            self._replies.put((message, Packet(ANSWER)))
        elif letter.kind == REFUSAL and run in self._vouched:
            raise FederationError(f"{self.address} refuses this site: {decode(letter.head, Refusal).why}")
        else:
            self._replies.put((message, _refusal(f"this site does not take '{letter.kind[:40]}' letters from you")))
        return True

    def _order(self, message: Message, letter: Packet) -> None:
        self.site.say(f"{told(letter.head)}: received {letter.size:,} bytes")
        self._orders.put((message, letter))

    def _terms(self, letter: Packet, run: int) -> Packet:
        hello = decode(letter.head, Invitation)
        if self.keys is not None:
            self.keys.verify(hello, run)
        if self._dry:
            self._seen = hello
            return _refusal(f"client {self.site.client} is making a dry run")
        enrolled = self.site.enrol(hello)
        self._vouched.add(run)
        for ours, message, order in self._early:
            if ours == run:
                self._order(message, order)
        self._early.clear()
        return Packet(ENROLMENT, encode(enrolled, Enrolment))

    def _work(self) -> None:
        while True:
            message, letter = self._orders.get()
            self._replies.put(
                (message, self._answered(lambda: Packet(ANSWER, *self.site.perform(letter.head, letter.body))))
            )

    def _answered(self, make: Callable[[], Packet]) -> Packet:
        """A letter, or the refusal that what went wrong makes of it."""
        try:
            return make()
        except Exception as error:  # a site outlives a job that fails; its own log has the whole of it
            return _refusal(self.site.failed(error))

    def _reply(self, ends: Ends, pause: float) -> bool:
        """Send one reply, if there is one within the pause."""
        try:
            message, letter = self._replies.get(timeout=pause) if pause else self._replies.get_nowait()
        except queue.Empty:
            return False
        run = message.metadata.run_id

        def request(proto: Any, tree: ObjectTree) -> Any:
            return PushMessagesRequest(
                node=ends.node, messages_list=[proto], message_object_trees=[tree], clientapp_runtime_list=[0.0]
            )

        try:
            push(ends, run, Message(content_of(letter), reply_to=message), request)
        except httpx.HTTPStatusError as error:
            self.site.say(f"a reply is dropped: its run is over ({in_short(error)})")
            return True
        except (httpx.HTTPError, ObjectPushError):
            self._replies.put((message, letter))  # after the break
            raise
        if letter.kind == ANSWER and letter.body:
            self.site.say(f"sent {letter.size:,} bytes")
        return True


def _refusal(why: str) -> Packet:
    return Packet(REFUSAL, encode(Refusal(why[:1000]), Refusal))


def _beat(client: Any, node: Node, resting: threading.Event, lost: threading.Event) -> None:
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
    while not resting.wait(HEARTBEAT):
        try:
            if not client.SendNodeHeartbeat(request).success:
                lost.set()
        except httpx.HTTPStatusError:
            lost.set()
        except (httpx.HTTPError, RuntimeError):
            pass  # the conversation itself notices
