"""A site's question for messages waits at the SuperLink until there is one, so that idle sites cost nothing.

Flower answers at once, and its sites ask again and again: fifty of them keep a core busy with empty answers.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest

ASK = "/v1/fleet/pull-messages"  # a site's question for a message
SEND = "/v1/runtime/push-messages"  # the operator's call that brings one
END = "/v1/runtime/push-task-output"  # the operator's last call
SECONDS, RECEIVERS = "x-effuse-wait", "x-effuse-to"  # headers: how long a question may wait; the messages' nodes
LONGEST = 10  # seconds that a question may wait
SHORT = 1 << 10  # bytes of a question; a longer one does not wait
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Waiting:
    """Lets a question pass when its node has an unread message, its time is over, or the run has ended."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.unread: dict[int, int] = {}  # node -> messages that were sent to it; an empty answer says that none is left
        self.news: dict[int, set[asyncio.Event]] = defaultdict(set)  # node -> its questions that wait
        self.ended = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path") if scope["type"] == "http" else None
        if path == ASK and _number(scope, "content-length", SHORT) is not None:
            await self._ask(scope, receive, send)
            return
        await self.app(scope, receive, send)
        if path == SEND:
            for node in map(int, filter(bytes.isdigit, _header(scope, RECEIVERS).split(b","))):
                self.unread[node] = self.unread.get(node, 0) + 1
                self._wake(node)
        elif path == END:
            self.ended = True
            for node in list(self.news):
                self._wake(node)

    def _wake(self, node: int) -> None:
        for event in self.news.get(node, ()):
            event.set()

    async def _ask(self, scope: Message, receive: Receive, send: Send) -> None:
        seconds, first = _number(scope, SECONDS, LONGEST), await receive()
        try:
            node = PullMessagesRequest.FromString(first.get("body", b"")).node.node_id
        except Exception:  # protobuf's own: Flower refuses it
            node = 0
        at_once = not (seconds and node) or self.ended or node in self.unread or first.get("more_body")
        if not at_once and not await self._news(node, seconds, receive):
            return

        async def replayed() -> Message:
            nonlocal first
            again, first = first, {}
            return again or await receive()

        async def read(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                left = self.unread.pop(node, 0) - 1
                if left > 0 and (b"content-length", b"0") not in message["headers"]:
                    self.unread[node] = left
            await send(message)

        await self.app(scope, replayed, read)

    async def _news(self, node: int, seconds: float | None, receive: Receive) -> bool:
        """Wait; whether the site is still there."""
        event = asyncio.Event()
        self.news[node].add(event)
        came, gone = asyncio.ensure_future(event.wait()), asyncio.ensure_future(receive())
        try:
            await asyncio.wait({came, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return not gone.done()
        finally:
            for task in (came, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self.news[node].discard(event)
            if not self.news[node]:
                del self.news[node]


def _header(scope: Message, name: str) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name.encode()), b"")


def _number(scope: Message, name: str, most: int) -> int | None:
    """The number in a header; None where it is none, or too large."""
    words = _header(scope, name)
    return int(words) if words.isdigit() and len(words) < 21 and int(words) <= most else None
