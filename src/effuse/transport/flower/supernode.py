"""A site's end of Flower: it only makes outbound requests, and never runs code that it is sent."""

import contextlib
import functools
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
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from effuse.core.errors import FederationError
from effuse.core.wire import decode, encode
from effuse.transport.flower import waiting
from effuse.transport.flower.activation import Activation
from effuse.transport.flower.codec import Endpoint, packet_of, pull, push, records_of
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
    reason_of,
    refusal,
)
from effuse.transport.flower.site import Site, described
from effuse.transport.flower.trouble import Disconnected, summary

POLL, SLOWEST_POLL = 0.2, 3.0  # seconds between questions for packets while an order is carried out
IDLE_SHARE = 0.05  # the pause between polls as a share of the time since the last packet; rounds become hardly longer
HEARTBEAT = 4.0  # seconds between heartbeats; after two of Flower's shortest intervals without one a node counts as gone
AGAIN = 1.0  # seconds before a lost connection is tried again
LOOK = 10.0  # seconds after which a dry run gives up without a connection
DOWNLOAD = 3600.0  # seconds that a download may take


class SiteClient:
    """Keeps a site connected: it fetches packets and sends replies, while a thread carries out the orders."""

    def __init__(self, site: Site, address: str, keys: ClientKeys | None) -> None:
        self.site, self.address, self.keys = site, address, keys
        # without keys a node has any identity; one for the whole process, so that a reply can be sent after a reconnection
        self.private = keys.private if keys is not None else ec.generate_private_key(ec.SECP384R1())
        self._activation = Activation(site, address, keys, public_key_to_bytes(self.private.public_key()))
        self._orders: queue.Queue[tuple[Message, Packet]] = queue.Queue()
        self._replies: queue.Queue[tuple[Message, Packet]] = queue.Queue()
        self._early_orders: list[tuple[int, Message, Packet]] = []  # orders that came before the terms
        self._accepted: set[int] = set()  # Flower runs whose terms the site accepted
        self._reason = ""  # why there was no connection, as it was reported last
        self._due = 0  # replies that are still to be sent
        self._patient = False  # whether the next question may wait at the server
        self._dry_run = self._over = False
        self._invitation: Invitation | None = None

    def run(self) -> None:
        """Carry out orders until the run is over."""
        threading.Thread(target=self._work, daemon=True).start()
        while not self._over:
            self._attempt(lambda: self._over and self._replies.empty())
        self.site.report("the server says that the run is over")

    def peek(self) -> Invitation:
        """The server's terms, which the site declines: a dry run."""
        self._dry_run, until = True, time.monotonic() + LOOK
        while self._invitation is None:
            if self._reason and time.monotonic() > until:
                raise FederationError(
                    f"no connection to {self.address} ({self._reason}); check the address, or look again later"
                )
            self._attempt(lambda: self._invitation is not None and self._replies.empty())
        if self._invitation.owner not in (None, self.site.client):  # without a dry run the server refuses
            client, owner = self.site.client, self._invitation.owner
            remedy = f"give --client-id {owner}, or ask the server's operator for the keys of client {client}"
            raise FederationError(f"--keys holds the key of client {owner}, not of client {client}; {remedy}")
        return self._invitation

    def _attempt(self, enough: Callable[[], bool]) -> None:
        try:
            self._exchange(enough)
        except Disconnected as error:
            if str(error) != self._reason:  # the same reason is reported once
                self.site.report(f"no connection to {self.address} ({error}); trying again {error.until}")
            self._reason = str(error)
            time.sleep(AGAIN)

    def _exchange(self, enough: Callable[[], bool]) -> None:
        """Use one connection, from activation until it breaks or until it is enough."""
        with self._connected() as client:
            node = self._activation.made(client)
            endpoint = Endpoint(client, node)
            self._reason = ""
            self.site.report(f"connected to {self.address} as client {self.site.client}")
            stopped = threading.Event()
            lost = threading.Event()
            threading.Thread(target=_send_heartbeats, args=(client, node, stopped, lost), daemon=True).start()
            last, pause = time.monotonic(), 0.0
            try:
                while not enough():
                    if lost.is_set():
                        raise Disconnected("the server no longer knows this node")
                    busy = self._reply(endpoint, pause)
                    asked, self._patient = time.monotonic(), not self._due and not enough()
                    busy |= self._receive(endpoint)
                    now = time.monotonic()
                    last = now if busy else last
                    pause = POLL if self._due else 0.0
                    if not busy and now - asked < POLL:  # no answer was waited for
                        pause = min(SLOWEST_POLL, max(POLL, IDLE_SHARE * (now - last)))
            except (httpx.HTTPError, ObjectPullError, ObjectPushError) as error:
                raise Disconnected(summary(error)) from None
            finally:
                stopped.set()
                with contextlib.suppress(httpx.HTTPError, RuntimeError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _connected(self) -> Any:
        root = None if self.keys is None else self.keys.ca.read_bytes()
        signing = NodeAuthHttpInterceptor(self.private, self.private.public_key())
        component = RuntimeVersionHttpInterceptor(component_name="effuse")
        return FleetHttpClient.from_server_address(self.address, self.keys is None, root, [component, signing, self])

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Any:
        """Let a question wait at the server while there is nothing else to do."""
        if self._patient and isinstance(context.message, PullMessagesRequest):
            context.request.headers[waiting.SECONDS] = str(waiting.LONGEST)
        return call_next(context)

    def _receive(self, endpoint: Endpoint) -> bool:
        """Fetch one packet, if there is one: terms are answered here, orders go to the worker."""
        pulled = endpoint.client.PullMessages(PullMessagesRequest(node=endpoint.node))
        if not pulled.messages_list:
            return False
        run = message_from_proto(pulled.messages_list[0]).metadata.run_id
        message = pull(endpoint, run, pulled.messages_list[0], pulled.message_object_trees[0], DOWNLOAD)
        packet = packet_of(message)
        if packet.kind == INVITATION:
            self._answer(message, self._reply_or_refusal(lambda: self._terms(packet, run)))
        elif packet.kind == ORDER and run in self._accepted:
            self._queue_order(message, packet)
        elif packet.kind == ORDER and not self._accepted and not self._dry_run:
            # it was sent to this site's previous process; the terms follow
            self._early_orders.append((run, message, packet))
        elif packet.kind == FAREWELL and run in self._accepted:
            self._over = True
            self._answer(message, Packet(ANSWER))
        elif packet.kind == REFUSAL and run in self._accepted:
            raise FederationError(f"{self.address} refuses this site: {reason_of(packet)}")
        else:
            self._answer(message, refusal(f"this site accepts no '{packet.kind[:40]}' message of this run"))
        return True

    def _answer(self, message: Message, packet: Packet) -> None:
        self._due += 1
        self._replies.put((message, packet))

    def _queue_order(self, message: Message, packet: Packet) -> None:
        self.site.report(f"{described(packet.head)}: received {packet.size:,} bytes")
        self._due += 1
        self._orders.put((message, packet))

    def _terms(self, packet: Packet, run: int) -> Packet:
        invitation = decode(packet.head, Invitation)
        if self.keys is not None:
            self.keys.verify(invitation, run)
        if self._dry_run:
            self._invitation = invitation
            return refusal(f"client {self.site.client} is making a dry run")
        enrolment = self.site.enrol(invitation)
        self._accepted.add(run)
        for order_run, message, order in self._early_orders:
            if order_run == run:
                self._queue_order(message, order)
        self._early_orders.clear()
        return Packet(ENROLMENT, encode(enrolment, Enrolment))

    def _work(self) -> None:
        while True:
            message, order = self._orders.get()
            self._replies.put((message, self._reply_or_refusal(functools.partial(self._perform, order))))

    def _perform(self, order: Packet) -> Packet:
        return Packet(ANSWER, *self.site.perform(order.head, order.body))

    def _reply_or_refusal(self, make: Callable[[], Packet]) -> Packet:
        """The reply that is made, or a refusal if that fails."""
        try:
            return make()
        except Exception as error:  # a site survives a job that fails; its log has the traceback
            return refusal(self.site.failed(error))

    def _reply(self, endpoint: Endpoint, pause: float) -> bool:
        """Send one reply, if one is ready before the pause ends."""
        try:
            message, packet = self._replies.get(timeout=pause) if pause else self._replies.get_nowait()
        except queue.Empty:
            return False
        run = message.metadata.run_id

        def request(protos: list[Any], trees: list[Any]) -> Any:
            return PushMessagesRequest(
                node=endpoint.node, messages_list=protos, message_object_trees=trees, clientapp_runtime_list=[0.0]
            )

        try:
            push(endpoint, run, [Message(records_of(packet), reply_to=message)], request)
        except httpx.HTTPStatusError as error:
            self._due -= 1
            self.site.report(f"a reply is discarded, because its run is over ({summary(error)})")
            return True
        except ObjectPushError:  # over its limit; or the SuperLink was started anew, and the server asks again
            self._due -= 1
            self.site.report(f"a reply of {packet.size:,} bytes is discarded, because the server does not take it")
            return True
        except httpx.HTTPError:
            self._replies.put((message, packet))  # sent again after the reconnection
            raise
        self._due -= 1
        if packet.kind == ANSWER and packet.body:
            self.site.report(f"sent {packet.size:,} bytes")
        return True


def _send_heartbeats(client: Any, node: Node, stopped: threading.Event, lost: threading.Event) -> None:
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
    while not stopped.wait(HEARTBEAT):
        try:
            if not client.SendNodeHeartbeat(request).success:
                lost.set()
        except httpx.HTTPStatusError:
            lost.set()
        except (httpx.HTTPError, RuntimeError):
            pass  # the next request of the connection fails as well
