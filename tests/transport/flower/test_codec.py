"""Packets as Flower's messages, fetched part by part and no further than their limit."""

import random
import types

import pytest
from flwr.app import Message
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from effuse.core.errors import FederationError
from effuse.transport.flower import codec
from effuse.transport.flower.codec import PIECE, SMALL, Endpoint, packet_of, pull, records_of
from effuse.transport.flower.messages import Packet

BODY = random.Random(0).randbytes(10 << 20)  # two parts of 5 MiB


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Flower makes messages within a task only."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def uploaded(packet):
    """A SuperLink that holds this packet, its tree of parts, and what was fetched and confirmed."""
    message = Message(records_of(packet), 1, "query.effuse")
    parts = {part.object_id: part.deflate() for part in get_all_nested_objects(message).values()}
    fetched, confirmed = [], []

    def fetch(request):
        fetched.append(len(parts[request.object_id]))
        return PullObjectResponse(object_found=True, object_available=True, object_content=parts[request.object_id])

    client = types.SimpleNamespace(PullObject=fetch, ConfirmMessageReceived=confirmed.append)
    return Endpoint(client, Node(node_id=1)), get_object_tree(message), fetched, confirmed


@pytest.mark.parametrize("limit", [None, len(BODY) + 10_000])
def test_a_packet_is_fetched_as_it_was_sent(limit):
    packet = Packet("answer", b"head", BODY)
    endpoint, tree, fetched, confirmed = uploaded(packet)
    assert packet_of(pull(endpoint, 0, ProtoMessage(), tree, 1.0, limit)) == packet
    assert len(BODY) < sum(fetched) < len(BODY) + 10_000 and len(confirmed) == 1


def test_no_more_is_fetched_than_an_answer_may_have():
    """Of 10 MiB where 1 MiB is allowed; it is confirmed, so that the SuperLink deletes it."""
    endpoint, tree, fetched, confirmed = uploaded(Packet("answer", b"head", BODY))
    with pytest.raises(FederationError, match="its upload is over the limit of 1,048,576 bytes for an answer to this job"):
        pull(endpoint, 0, ProtoMessage(), tree, 1.0, 1 << 20)
    assert len(confirmed) == 1


def test_parts_are_counted_before_any_is_fetched(monkeypatch):
    """10 MiB may come in two parts of 5 MiB and 16 small ones; in parts of 64 KiB they are 160."""
    from flwr.app.message import array

    monkeypatch.setattr(array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1 << 16)
    endpoint, tree, fetched, confirmed = uploaded(Packet("answer", b"head", BODY))
    monkeypatch.setattr(codec, "SMALL", 2)
    monkeypatch.setattr(codec, "PIECE", 1 << 40)
    with pytest.raises(FederationError, match=r"its upload has \d+ parts, and an answer of 10,485,760 bytes has fewer"):
        pull(endpoint, 0, ProtoMessage(), tree, 1.0, len(BODY))
    assert fetched == [] and len(confirmed) == 1
    assert (PIECE, SMALL) == (5 << 20, 16)
