"""Calls of sites past Flower's layers: they get the answers that they would get through them, and are authenticated."""

import asyncio
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.superlink.config_loader import get_federation_manager
from flwr.superlink.routers.fleet.router import router
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from effuse.transport.flower.direct import CALLS, Direct
from effuse.transport.flower.store import Store
from effuse.transport.flower.superlink_process import _where_it_acts

HEARTBEAT, PULL = "/v1/fleet/send-node-heartbeat", "/v1/fleet/pull-messages"


@pytest.fixture
def site():
    """A node of a store, and a function that makes its signed calls; what went through the layers is noted."""
    store, key = Store(get_federation_manager(), None), ec.generate_private_key(ec.SECP384R1())
    node = store.create_node(NOOP_FLWR_AID, "", public_key_to_bytes(key.public_key()), 10.0)
    assert store.activate_node(node, 10.0)
    layered = []

    async def layers(scope, receive, send):
        layered.append((await receive())["body"])

    def call(path, request, signed=key, method="POST"):
        wire, sent = SimpleNamespace(headers={}), []
        interceptor = NodeAuthHttpInterceptor(signed, signed.public_key())
        interceptor.intercept(ProtobufRequestContext("", request, wire), lambda context: None)
        body = request.SerializeToString()
        halves = [body[len(body) // 2 :], body[: len(body) // 2]]

        async def receive():
            return {"type": "http.request", "body": halves.pop(), "more_body": bool(halves)}

        async def send(message):
            sent.append(message)

        headers = [(name.lower().encode(), value.encode()) for name, value in wire.headers.items()]
        state = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: store))
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": SimpleNamespace(state=state)}
        asyncio.run(Direct(layers)(scope, receive, send))
        return sent

    return SimpleNamespace(call=call, node=node, layered=layered)


def test_a_call_is_answered_without_the_layers(site):
    request = SendNodeHeartbeatRequest(node=Node(node_id=site.node), heartbeat_interval=10.0)
    start, body = site.call(HEARTBEAT, request)
    assert start["status"] == 200 and (b"content-length", str(len(body["body"])).encode()) in start["headers"]
    assert SendNodeHeartbeatResponse.FromString(body["body"]).success and not site.layered
    assert site.call(PULL, PullMessagesRequest(node=Node(node_id=site.node)))[1]["body"] == b""


def test_what_is_refused_goes_through_the_layers_unchanged(site):
    """Another key, another node, and an interval that Flower refuses: its own layers say so, from the same bytes."""
    own = PullMessagesRequest(node=Node(node_id=site.node))
    foreign = PullMessagesRequest(node=Node(node_id=site.node + 1))
    short = SendNodeHeartbeatRequest(node=Node(node_id=site.node), heartbeat_interval=0.1)
    assert site.call(PULL, own, signed=ec.generate_private_key(ec.SECP384R1())) == []
    assert site.call(PULL, foreign) == [] and site.call(HEARTBEAT, short) == []
    assert site.layered == [request.SerializeToString() for request in (own, foreign, short)]


def test_other_calls_are_passed_on(site):
    own = PullMessagesRequest(node=Node(node_id=site.node))
    assert site.call("/v1/fleet/activate-node", own) == [] == site.call(PULL, own, method="GET") and len(site.layered) == 2


def test_flower_has_these_calls_and_functions():
    routes = {route.path: route.endpoint.__name__ for route in router.routes}
    assert {path: f"fleet_{name}" for path, (_, name, _) in CALLS.items()}.items() <= routes.items()


def test_a_layer_acts_below_its_path_and_others_go_round_it():
    """By the names of Flower's layers; the one that checks signatures stays on every call of a site."""
    from flwr.superlink.main import _get_middleware

    def seen(path):
        went = []

        async def call():
            for layer in _get_middleware():

                async def app(scope, receive, send, layer=layer):
                    went.append(f"not {layer.cls.__name__}")

                class Layer:
                    def __init__(self, app, name=layer.cls.__name__, **options):
                        self.name = name

                    async def __call__(self, scope, receive, send):
                        went.append(self.name)

                Layer.__name__ = layer.cls.__name__
                wrapped = _where_it_acts(type(layer)(Layer, **layer.kwargs))
                await wrapped.cls(app, *wrapped.args, **wrapped.kwargs)({"type": "http", "path": path}, None, None)

        asyncio.run(call())
        return [name for name in went if not name.startswith("not ")]

    kept = {"BaseHTTPMiddleware", "ProtobufTranslationMiddleware"}
    assert set(seen("/v1/fleet/activate-node")) == kept | {"NodeAuthMiddleware", "FleetEventLogMiddleware"}
    assert set(seen("/v1/runtime/push-messages")) == kept | {"RuntimeTracingMiddleware"}
    assert len(seen("/v1/control/start-run")) == 6 and "ControlAuthenticationMiddleware" in seen("/v1/control/start-run")
