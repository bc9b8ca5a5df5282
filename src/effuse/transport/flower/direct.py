"""The calls of a round without Flower's layers, each of which costs more than the call itself.

A call is authenticated and carried out by Flower's own functions. Where one of them raises, nothing was changed, and the
call goes through all layers to get Flower's answer.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from effuse.transport.flower.parts import CALL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
CALLS: dict[str, tuple[Any, str, bool]] = {  # path -> its message, Flower's function for it, whether that takes the parts
    "/v1/fleet/pull-messages": (PullMessagesRequest, "pull_messages", True),
    "/v1/fleet/push-messages": (PushMessagesRequest, "push_messages", False),
    "/v1/fleet/pull-object": (PullObjectRequest, "pull_object", False),
    "/v1/fleet/push-object": (PushObjectRequest, "push_object", False),
    "/v1/fleet/confirm-message-received": (ConfirmMessageReceivedRequest, "confirm_message_received", True),
    "/v1/fleet/send-node-heartbeat": (SendNodeHeartbeatRequest, "send_node_heartbeat", False),
}


class Direct:
    """Answers the calls of sites that come often, and passes on all others."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in CALLS:
            await self.app(scope, receive, send)
            return
        parts = [await receive()]
        while parts[-1].get("more_body"):
            parts.append(await receive())
        body = b"".join(part.get("body", b"") for part in parts)
        try:
            answer = await run_in_threadpool(_carried_out, scope, body) if len(body) > CALL else _carried_out(scope, body)
        except Exception:  # of any kind: Flower turns it into an answer below
            again = [{"type": "http.request", "body": body, "more_body": False}]

            async def replayed() -> Message:
                return again.pop() if again else await receive()

            await self.app(scope, replayed, send)
            return
        kind = [(b"content-type", PROTOBUF_MEDIA_TYPE.encode()), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": answer})


def _carried_out(scope: Message, body: bytes) -> bytes:
    kind, name, takes_parts = CALLS[scope["path"]]
    http = Request(dict(scope, state={}))
    http.state.protobuf_request = request = kind.FromString(body)
    authenticate_node(http)
    state: Any = get_linkstate(http)
    parts = {"store": state.object_store} if takes_parts else {}
    answer: bytes = getattr(fleet_handlers, name)(request=request, state=state, **parts).SerializeToString()
    return answer
