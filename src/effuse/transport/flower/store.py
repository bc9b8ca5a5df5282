"""What a SuperLink keeps of messages: no reply takes more of its memory than its order allows, and nothing stays unread.

Flower keeps whatever a node announces and uploads, also twice and also when nobody fetches it. Here an order says how many
bytes its reply may have, in its `group_id`. A reply beyond that is dropped, and the server reads a refusal in its place.
A message that travels with its content has no parts: it is stored by one call and fetched by one.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from effuse.transport.flower.parts import DROPPED, PIECE, SMALL


@dataclasses.dataclass
class Upload:
    """A reply whose parts are uploaded one by one."""

    message: Message
    tree: bytes
    limit: int
    size: int = 0
    complete: bool = False


class Parts(InMemoryObjectStore):
    """The parts of messages, and which messages have none because they are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: set[str] = set()
        self.uploads: dict[str, Upload] = {}  # by the reply

    def get_object_tree(self, object_id: str) -> ObjectTree:
        """The parts of a message that is being delivered."""
        if object_id in self.whole and object_id not in self.store:
            self.whole.discard(object_id)  # it is delivered once
            return ObjectTree(object_id=object_id)
        return super().get_object_tree(object_id)

    def delete(self, object_id: str) -> None:
        self.uploads.pop(object_id, None)
        self.whole.discard(object_id)
        super().delete(object_id)


class Store(InMemoryLinkState):
    """Messages with their parts, within the limits of their orders."""

    parts: Parts

    def __init__(self, federation_manager: Any, object_store: object) -> None:
        self.parts = Parts()
        super().__init__(federation_manager, self.parts)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Store a message and say which of its parts are missing."""
        name, order = message.metadata.message_id, message.metadata.reply_to_message_id
        with self.lock:
            tree = object_tree.SerializeToString(deterministic=True)
            if order and not _whole(message) and name not in self.message_res_store:
                limit, ids = self._limit(order), [part.object_id for part in iterate_object_tree(object_tree)]
                if len(ids) > limit // PIECE + SMALL or object_tree.object_id != name:
                    message = _refused(message, f"its upload has {len(ids):,} parts, more than {limit:,} bytes need")
                else:
                    self.parts.uploads[name] = Upload(message, tree, limit)
            self._replaced(order, name)
            known = name in self.message_res_store if order else name in self.message_ins_store
            stored = (self.store_message_res(message) if order else self.store_message_ins(message)) is not None
            missing: list[str] = []
            if stored and _whole(message):
                if not known:
                    self.parts.whole.add(name)
            elif stored and (not order or self._is_the_first(name, tree)):
                missing = self.preregister_object_tree(object_tree, session_id)
                if order and not missing:
                    self.parts.uploads[name].complete = True
            elif not stored and not known:
                self.parts.uploads.pop(name, None)
            if not missing:
                self._cleanup_push_session(session_id, cleanup_messages=False)
            return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Store a part, unless its message grows beyond its limit: then all of it is dropped."""
        with self.lock:
            session = self._object_push_sessions.get(session_id)
            if session is None:
                return False
            upload = next((u for root in session.root_object_ids if (u := self.parts.uploads.get(root))), None)
            if upload is not None and object_id in session.pending_object_ids:
                upload.size += len(object_content)
                if upload.size > upload.limit:
                    self._drop(upload)
                    self._cleanup_push_session(session_id, cleanup_messages=False)
                    return False
            stored = bool(super().store_object(run_id, session_id, object_id, object_content))
            if upload is not None:
                upload.complete = not session.pending_object_ids
            return stored

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        with self.lock:  # first, as everywhere else: Flower takes it second here, and could wait for itself
            return super().get_object(run_id, object_id)

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        """The replies that are complete: a node that dies while it uploads has not replied, and holds nobody up."""
        with self.lock:
            replies, unread = self.message_ins_id_to_message_res_id, self._incomplete(message_ids)
            for order in unread:
                del replies[order]
            found = super().get_message_res(message_ids, run_id)
            replies.update(unread)
            return found

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Delete orders that were answered or are too old, with their parts and with answers that nobody fetched."""
        with self.lock:
            replies = (self.message_ins_id_to_message_res_id.get(order) for order in message_ins_ids)
            unread = [r for r in replies if r and not self.message_res_store[r].metadata.delivered_at]
            super().delete_messages(message_ins_ids)
            self._forget([*message_ins_ids, *unread])

    def _incomplete(self, orders: Iterable[str]) -> dict[str, str]:
        """The orders among these whose reply is being uploaded, with that reply."""
        replies = {order: self.message_ins_id_to_message_res_id.get(order, "") for order in orders}
        uploads = self.parts.uploads
        return {order: reply for order, reply in replies.items() if reply in uploads and not uploads[reply].complete}

    def _replaced(self, order: str, reply: str) -> None:
        """Forget an incomplete reply to an order: its node was interrupted, and sends another one."""
        for old in self._incomplete([order]).values():
            if old != reply:
                del self.message_ins_id_to_message_res_id[order], self.message_res_store[old]
                self.parts.delete(old)

    def _forget(self, roots: Iterable[str]) -> None:
        for root in roots:
            self.parts.delete(root)

    def _limit(self, order: str) -> int:
        """How many bytes the reply to an order may have."""
        sent = self.message_ins_store.get(order)
        words = sent.metadata.group_id if sent is not None else ""
        return int(words) if words.isdigit() else 0

    def _is_the_first(self, reply: str, tree: bytes) -> bool:
        """Whether these are the parts with which a reply was announced first."""
        upload = self.parts.uploads.get(reply)
        return upload is not None and upload.tree == tree

    def _drop(self, upload: Upload) -> None:
        """Delete the parts of a reply that is too large; what the server reads in its place says so."""
        name = upload.message.metadata.message_id
        self.parts.delete(name)
        why = f"its upload is over the limit of {upload.limit:,} bytes for an answer to this job"
        if name in self.message_res_store and not upload.message.metadata.delivered_at:
            self.message_res_store[name] = _refused(upload.message, why)
            self.parts.whole.add(name)


def _whole(message: Message) -> bool:
    return bool(message.has_error() or len(message.content))


def _refused(reply: Message, why: str) -> Message:
    return make_message(metadata=reply.metadata, error=Error(code=DROPPED, reason=why))
