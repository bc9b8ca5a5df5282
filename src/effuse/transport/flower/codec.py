"""Letters as Flower's messages, and how those are pushed and pulled; the same on both sides."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
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
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects

from effuse.transport.flower.messages import UNDELIVERED, Packet

RETRY, SLOWEST_RETRY = 0.05, 0.5  # seconds between looks for a part that is still being uploaded


class Ends(NamedTuple):
    """A connection: Flower's client for it, and whose it is."""

    client: Any  # FleetHttpClient at a site, RuntimeHttpClient at the server; both speak these five calls
    node: Node


def content_of(letter: Packet) -> RecordDict:
    """A letter as records: the body is one array of bytes, which Flower cuts, names by hash, and stores and sends once."""
    records = RecordDict({"head": ConfigRecord({"kind": letter.kind, "head": letter.head})})
    if letter.body:
        records["body"] = ArrayRecord({"body": Array("uint8", (len(letter.body),), "effuse", letter.body)})
    return records


def letter_of(message: Message) -> Packet:
    """The letter in a message; what is not one of ours becomes a letter of an unknown kind."""
    if message.has_error():
        return Packet(UNDELIVERED)
    head = message.content.get("head")
    kind = head.get("kind") if isinstance(head, ConfigRecord) else None
    if not isinstance(kind, str) or not isinstance(head["head"], bytes):
        return Packet("not a letter")
    body = message.content.get("body")
    data = body["body"].data if isinstance(body, ArrayRecord) and "body" in body else b""
    return Packet(kind, head["head"], data)


def push(ends: Ends, run: int, message: Message, request: Callable[[Any, ObjectTree], Any]) -> str:
    """Send a message with all its parts; `request` makes the call's own kind of request."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        tree = get_object_tree(message)
        pushed = ends.client.PushMessages(request(message_to_proto(remove_content_from_message(message)), tree))
        push_objects(
            get_all_nested_objects(message),
            make_push_object_fn_protobuf(ends.client.PushObject, ends.node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )
    return str(message.metadata.message_id)


def pull(ends: Ends, run: int, tree: ObjectTree, patience: float) -> Message:
    """Fetch all parts of a message, and confirm it, so that the SuperLink can forget it."""
    parts = pull_objects(
        [part.object_id for part in iterate_object_tree(tree)],
        make_pull_object_fn_protobuf(ends.client.PullObject, ends.node, run),
        max_time=patience,
        max_tries_per_object=None,
        initial_backoff=RETRY,
        backoff_cap=SLOWEST_RETRY,
    )
    make_confirm_message_received_fn_protobuf(ends.client.ConfirmMessageReceived, ends.node, run)(tree.object_id)
    message = inflate_object_from_contents(tree.object_id, parts)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id  # a message does not hold its own name
    return message
