"""What a client with a key can leave at the SuperLink: no more than its order allows, and nothing for ever."""

import hashlib
import random
import time

import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.config_loader import get_federation_manager

from effuse.transport.flower.codec import packet_of, records_of
from effuse.transport.flower.messages import ANSWER, ORDER, REFUSAL, UNDELIVERED, Packet, reason_of
from effuse.transport.flower.parts import INLINE, PIECE, SMALL
from effuse.transport.flower.store import Store

LIMIT = 1 << 20  # bytes that an answer may have
BODY = random.Random(0).randbytes(INLINE + 1)  # the smallest body that travels in parts


class Link:
    """A SuperLink's store with a run, one order to each of two nodes, and their replies."""

    def __init__(self, monkeypatch) -> None:
        self.store = Store(get_federation_manager(), None)
        self.run = self.store.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        self.set = lambda node: [monkeypatch.setattr(TaskIdentity, f"_{k}", v) for k, v in self.identity(node).items()]
        self.nodes = [self.store.create_node(NOOP_FLWR_AID, "", bytes([k]), 10.0) for k in range(2)]
        for node in self.nodes:
            assert self.store.activate_node(node, 10.0)
        self.orders = [self.order(node) for node in self.nodes]

    def identity(self, node):
        return {"task_id": 1, "run_id": self.run, "node_id": node}

    def push(self, message, tree=None):
        """Announce a message; whether it was stored, and which parts are missing."""
        message.metadata.__dict__["_message_id"] = message.object_id
        self.session = self.store.start_session(self.run)
        tree = tree or get_object_tree(message)
        return self.store.store_message_and_object_tree(without_parts(message), tree, self.session)

    def order(self, node, life=600.0, limit=LIMIT):
        self.set(SUPERLINK_NODE_ID)
        order = Message(records_of(Packet(ORDER, b"head")), node, "train.effuse", ttl=life, group_id=str(limit))
        assert self.push(order, ObjectTree(object_id=order.object_id)) == (True, [])
        assert [m.metadata.message_id for m in self.store.get_message_ins(node, 1)] == [order.object_id]
        return order

    def reply(self, k, packet):
        self.set(self.nodes[k])
        return Message(records_of(packet), reply_to=self.orders[k])

    def upload(self, message, only=None) -> list[bool]:
        """Announce a reply and upload its parts; which were taken."""
        missing = self.push(message)[1]
        parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items() if name in missing}
        return [self.put(name, parts[name]) for name in list(parts)[:only]]

    def put(self, name, content) -> bool:
        return self.store.store_object(self.run, self.session, name, content)

    def fetched(self, k):
        """What the server reads as the reply to an order, with the tree of its parts."""
        asked = {self.orders[k].metadata.message_id}
        replies = self.store.get_message_res(asked, self.run)
        self.store.delete_messages({m.metadata.reply_to_message_id for m in replies})
        return [(m, self.store.object_store.get_object_tree(m.metadata.message_id)) for m in replies]

    @property
    def size(self) -> int:
        return sum(len(entry.content) for entry in self.store.parts.store.values())

    @property
    def empty(self) -> bool:
        """Whether the store keeps nothing of any message."""
        parts, store = self.store.parts, self.store
        kept = (store.message_ins_store, store.message_res_store, parts.store, parts.whole, parts.uploads)
        return not any(map(len, (*kept, store._object_push_sessions, store._object_push_session_by_root)))


def without_parts(message):
    return remove_content_from_message(message) if message.content.array_records else message


@pytest.fixture
def link(monkeypatch):
    return Link(monkeypatch)


def test_a_small_packet_has_no_parts_and_leaves_nothing(link):
    """An order and its answer are stored with their content by one call each, and read once."""
    answer = link.reply(0, Packet(ANSWER, b"receipt", b"small"))
    assert link.push(answer, ObjectTree(object_id=answer.object_id)) == (True, [])
    [(message, tree)] = link.fetched(0)
    assert packet_of(message) == Packet(ANSWER, b"receipt", b"small") and not tree.children
    link.fetched(1), link.store.delete_messages({link.orders[1].metadata.message_id})
    assert link.empty


def test_a_large_packet_is_kept_until_it_is_confirmed(link):
    answer = link.reply(0, Packet(ANSWER, b"receipt", BODY))
    assert all(link.upload(answer)) and link.size > len(BODY)
    [(message, tree)] = link.fetched(0)
    assert len(tree.children) == 1 and link.size > len(BODY), "it is fetched part by part"
    link.store.object_store.delete(tree.object_id)
    assert link.size == 0 and not link.store.parts.uploads


def test_an_upload_beyond_its_limit_is_dropped_and_the_server_reads_why(link):
    """5 MiB for an answer of 1 MiB; the other client's answer is kept."""
    honest = link.reply(1, Packet(ANSWER, b"receipt", BODY))
    assert all(link.upload(honest))
    before = link.size
    assert not all(link.upload(link.reply(0, Packet(ANSWER, b"receipt", random.Random(1).randbytes(5 << 20)))))
    assert link.size == before
    [(message, tree)] = link.fetched(0)
    packet = packet_of(message)
    assert (
        packet.kind == REFUSAL
        and reason_of(packet) == "its upload is over the limit of 1,048,576 bytes for an answer to this job"
    )
    [(message, tree)] = link.fetched(1)
    assert tree.children


def test_more_parts_are_announced_than_the_limit_needs(link):
    """An answer of 1 MiB has 16 small parts at most, and none of 5 MiB."""
    assert LIMIT // PIECE + SMALL == 16
    answer = link.reply(0, Packet(ANSWER, b"receipt", BODY))
    tree = get_object_tree(answer)
    tree.children.extend(ObjectTree(object_id=hashlib.sha256(bytes([k])).hexdigest()) for k in range(16))
    assert link.push(answer, tree) == (True, []) and link.size == 0 and not link.store.parts.store
    [(message, _)] = link.fetched(0)
    assert "parts, more than 1,048,576 bytes need" in reason_of(packet_of(message))


def test_a_reply_is_announced_once(link):
    """Flower takes the same reply again with other parts, and would keep all of them."""
    answer = link.reply(0, Packet(ANSWER, b"receipt", BODY))
    assert all(link.upload(answer))
    known, sessions = len(link.store.parts.store), len(link.store._object_push_sessions)
    for k in range(50):
        tree = ObjectTree(object_id=answer.object_id, children=[ObjectTree(object_id=hashlib.sha256(b"%d" % k).hexdigest())])
        assert link.push(answer, tree)[1] == []
    assert (len(link.store.parts.store), len(link.store._object_push_sessions)) == (known, sessions)


def test_a_client_that_leaves_parts_behind_is_bounded(link):
    """It uploads all but the last part of what it may, again and again. One answer's worth is kept."""
    for k in range(20):
        link.upload(link.reply(0, Packet(ANSWER, b"%d" % k, random.Random(k).randbytes(LIMIT - 10_000))), only=3)
        assert link.size <= LIMIT
    answer = link.reply(1, Packet(ANSWER, b"receipt", BODY))
    assert all(link.upload(answer)) and len(link.fetched(1)) == 1, "others go on"


def test_an_upload_that_was_interrupted_is_no_reply(link):
    """A site is killed between two parts. Its order stays open, and the answer of its next process takes the place."""
    half = link.reply(0, Packet(ANSWER, b"first", BODY))
    assert link.upload(half, only=2) == [True, True] and link.fetched(0) == []
    whole = link.reply(0, Packet(ANSWER, b"second", BODY[::-1]))
    assert all(link.upload(whole)) and link.size < 2 * len(BODY), "the half is forgotten"
    [(message, tree)] = link.fetched(0)
    assert tree.object_id == whole.object_id
    link.store.parts.delete(tree.object_id)
    assert link.size == 0


def test_a_node_that_is_gone_amid_its_upload_is_undelivered(link):
    """Flower says so of a node that is gone, unless it has announced a reply."""
    assert link.upload(link.reply(0, Packet(ANSWER, b"receipt", BODY)), only=2) == [True, True]
    link.store.deactivate_node(link.nodes[0])
    [(message, tree)] = link.fetched(0)
    assert packet_of(message).kind == UNDELIVERED
    link.store.object_store.delete(tree.object_id)  # Flower's own words
    assert link.size == 0


def test_what_is_too_old_is_deleted(link, monkeypatch):
    """An order that lives for a second, with half an answer; Flower deletes the message, and would keep the parts."""
    link.orders[0] = link.order(link.nodes[0], life=1.0)
    link.upload(link.reply(0, Packet(ANSWER, b"receipt", BODY)), only=2)
    assert link.store.parts.store
    time.sleep(1.1)
    assert link.store.get_message_ins(link.nodes[1], 1) == []
    assert link.size == 0 and not link.store.parts.uploads and len(link.store.message_res_store) == 0


def test_an_answer_without_an_order_leaves_nothing(link):
    order, node = link.orders[0], link.nodes[0]
    answer = link.reply(0, Packet(ANSWER, b"receipt", BODY))
    link.store.delete_messages({order.metadata.message_id})
    before = (len(link.store._object_push_sessions), len(link.store.parts.store))
    assert link.push(answer) == (False, [])
    assert (len(link.store._object_push_sessions), len(link.store.parts.store)) == before and not link.store.parts.uploads
    assert node in link.store.nodes


def test_flower_makes_this_store(monkeypatch):
    """The name that `superlink_process` replaces is the one by which Flower makes its store."""
    monkeypatch.setattr(linkstate_factory, "InMemoryLinkState", Store)
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.supercore.object_store import ObjectStoreFactory

    parts = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    state = linkstate_factory.LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, get_federation_manager(), parts).state()
    assert isinstance(state, Store) and state.object_store is state.parts
