"""Packets as Flower's messages, and how these are pushed and pulled; the same on both sides."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)

from effuse.core.errors import FederationError
from effuse.transport.flower.messages import UNDELIVERED, Packet, refusal
from effuse.transport.flower.parts import DROPPED, INLINE, PIECE, SMALL

RETRY, SLOWEST_RETRY = 0.05, 0.5  # seconds between queries for a part that is still being uploaded


class Endpoint(NamedTuple):
    """One end of a connection: Flower's client for it, and the node that speaks."""

    client: Any  # FleetHttpClient at a site, RuntimeHttpClient at the server; both speak these five calls
    node: Node


def records_of(packet: Packet) -> RecordDict:
    """A packet as records. A large body is one array of bytes: Flower cuts it, names the parts by hash, stores each once."""
    if packet.size <= INLINE:
        return RecordDict({"head": ConfigRecord({"kind": packet.kind, "head": packet.head, "body": packet.body})})
    records = RecordDict({"head": ConfigRecord({"kind": packet.kind, "head": packet.head})})
    if packet.body:
        records["body"] = ArrayRecord({"body": Array("uint8", (len(packet.body),), "effuse", packet.body)})
    return records


def packet_of(message: Message) -> Packet:
    """The packet in a message; any other content becomes a packet of an unknown kind."""
    if message.has_error():
        return refusal(message.error.reason or "") if message.error.code == DROPPED else Packet(UNDELIVERED)
    record = message.content.get("head")
    if not isinstance(record, ConfigRecord):
        return Packet("not a packet")
    kind, head = record.get("kind"), record.get("head")
    if not isinstance(kind, str) or not isinstance(head, bytes):
        return Packet("not a packet")
    within, body = record.get("body", b""), message.content.get("body")
    data = body["body"].data if isinstance(body, ArrayRecord) and "body" in body else within
    return Packet(kind, head, data if isinstance(data, bytes) else b"")


def push(
    endpoint: Endpoint, run: int, messages: Sequence[Message], request: Callable[[list[Any], list[Any]], Any]
) -> list[str]:
    """Send messages with all their parts; `request` makes the request that this end's client takes."""
    protos: list[ProtoMessage] = []
    trees: list[ObjectTree] = []
    parts: dict[str, Any] = {}
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            if message.content.array_records:
                protos.append(message_to_proto(remove_content_from_message(message)))
                trees.append(get_object_tree(message))
                parts |= get_all_nested_objects(message)
            else:
                protos.append(message_to_proto(message))
                trees.append(ObjectTree(object_id=message.object_id))
    pushed = endpoint.client.PushMessages(request(protos, trees))
    with no_object_id_recompute():
        push_objects(
            parts,
            make_push_object_fn_protobuf(endpoint.client.PushObject, endpoint.node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )
    return [str(message.metadata.message_id) for message in messages]


def pull(
    endpoint: Endpoint, run: int, proto: ProtoMessage, tree: ObjectTree, patience: float, limit: int | None = None
) -> Message:
    """Fetch all parts of a message, at most `limit` bytes, and confirm it, so that the SuperLink can delete it."""
    ids = [part.object_id for part in iterate_object_tree(tree)]
    fetch = make_pull_object_fn_protobuf(endpoint.client.PullObject, endpoint.node, run)
    confirm = make_confirm_message_received_fn_protobuf(endpoint.client.ConfirmMessageReceived, endpoint.node, run)
    if proto.HasField("error"):
        confirm(tree.object_id)
        return message_from_proto(proto)
    if proto.content.items:
        if limit is not None and proto.ByteSize() > limit:
            raise FederationError(f"its upload is over the limit of {limit:,} bytes for an answer to this job")
        return message_from_proto(proto)
    try:
        if limit is not None and len(ids) > limit // PIECE + SMALL:
            raise FederationError(f"its upload has {len(ids):,} parts, and an answer of {limit:,} bytes has fewer")
        parts = pull_objects(
            ids,
            fetch if limit is None else _limited(fetch, limit),
            max_time=patience,
            max_tries_per_object=None,
            initial_backoff=RETRY,
            backoff_cap=SLOWEST_RETRY,
        )
    except (FederationError, ObjectPullError):
        confirm(tree.object_id)  # it is not fetched again
        raise
    confirm(tree.object_id)
    message = inflate_object_from_contents(tree.object_id, parts)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id  # a message's content does not hold its id
    return message


def _limited(fetch: Callable[[str], bytes], limit: int) -> Callable[[str], bytes]:
    """The same function, until all parts together have more than `limit` bytes; several threads call it."""
    fetched: dict[str, int] = {}

    def limited(part: str) -> bytes:
        content = fetch(part)
        fetched[part] = len(content)
        if sum(list(fetched.values())) > limit:
            raise FederationError(f"its upload is over the limit of {limit:,} bytes for an answer to this job")
        return content

    return limited
