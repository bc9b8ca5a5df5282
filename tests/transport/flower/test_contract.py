"""The parts of Flower that effuse calls: when a newer flwr changes one, a test says in one sentence which."""

import importlib
import importlib.metadata
import inspect
import random
import re
import subprocess
import sys
from pathlib import Path

import flwr
import pytest
from flwr.app import Message
from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, runtime_pb2
from flwr.supercore.task_identity import TaskIdentity

from effuse.core.errors import RunError
from effuse.transport import flower
from effuse.transport.flower import superlink_process
from effuse.transport.flower.codec import Endpoint, packet_of, pull, push, records_of
from effuse.transport.flower.messages import ANSWER, ORDER, UNDELIVERED, Packet

ROOT = Path(__file__).parents[3] / "src" / "effuse"

# what is called, and its arguments: by name, or `-` for one that is given by position
CALLS = {
    "flwr.supercore.protobuf.client:ProtobufClient.from_server_address": (
        "server_address insecure root_certificates interceptors"
    ),
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "component_name",
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": "token",
    "flwr.supercore.interceptors:SuperExecAuthHttpInterceptor": "master_secret protected_methods",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": "private_key public_key",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects": (
        "object_ids pull_object_fn max_time max_tries_per_object initial_backoff backoff_cap"
    ),
    "flwr.supercore.inflatable.inflatable_utils:push_objects": "objects push_object_fn object_ids_to_push",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents": "object_id object_contents",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_pull_object_fn_protobuf": "- node run_id",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_push_object_fn_protobuf": "- node run_id session_id",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_confirm_message_received_fn_protobuf": "- node run_id",
    "flwr.supercore.fab:Fab": "hash_str content verifications",
    "flwr.cli.build:build_fab_from_files": "files",
    "flwr.superlink.extensions:get_middleware": "",
    "flwr.superlink.cli:flower_superlink": "",
    "flwr.common.serde:fab_to_proto": "fab",
    "flwr.common.serde:message_to_proto": "message",
    "flwr.common.serde:message_from_proto": "message_proto",
}
METHODS = {
    "flwr.supernode.fleet_http_client:FleetHttpClient": (
        "RegisterNode ActivateNode DeactivateNode SendNodeHeartbeat PullMessages PushMessages PullObject "
        "PushObject ConfirmMessageReceived"
    ),
    "flwr.supercore.runtime:RuntimeHttpClient": (
        "AcquireTask PullTaskInput PushTaskOutput SendTaskHeartbeat GetNodes PullMessages PushMessages "
        "PullObject PushObject ConfirmMessageReceived"
    ),
    "flwr.supercore.control:ControlHttpClient": "StartRun RegisterNode",
}
FIELDS = {
    control_pb2.StartRunRequest: ["fab"],
    control_pb2.StartRunResponse: ["run_id"],
    control_pb2.RegisterNodeRequest: ["public_key"],
    control_pb2.RegisterNodeResponse: ["node_id"],
    runtime_pb2.AcquireTaskRequest: ["supported_task_types"],
    runtime_pb2.AcquireTaskResponse: ["task", "token"],
    runtime_pb2.PullTaskInputResponse: ["task_id", "run", "context"],
    runtime_pb2.PushTaskOutputRequest: ["sub_status", "details"],
    runtime_pb2.PullAppMessagesRequest: ["message_ids"],
    runtime_pb2.PullAppMessagesResponse: ["messages_list", "message_object_trees"],
    runtime_pb2.PushAppMessagesRequest: ["messages_list", "message_object_trees"],
    runtime_pb2.PushAppMessagesResponse: ["session_id", "objects_to_push"],
    runtime_pb2.GetNodesResponse: ["nodes"],
    fleet_pb2.RegisterNodeFleetRequest: ["public_key"],
    fleet_pb2.ActivateNodeRequest: ["public_key", "heartbeat_interval"],
    fleet_pb2.ActivateNodeResponse: ["node_id"],
    fleet_pb2.DeactivateNodeRequest: ["node_id"],
    fleet_pb2.PullMessagesRequest: ["node"],
    fleet_pb2.PullMessagesResponse: ["messages_list", "message_object_trees"],
    fleet_pb2.PushMessagesRequest: ["node", "messages_list", "message_object_trees", "clientapp_runtime_list"],
    fleet_pb2.PushMessagesResponse: ["session_id", "objects_to_push"],
    heartbeat_pb2.SendNodeHeartbeatRequest: ["node", "heartbeat_interval"],
    heartbeat_pb2.SendNodeHeartbeatResponse: ["success"],
}
FLAGS = (
    "--insecure --host --port --isolation --superexec-auth-secret-file --enable-supernode-auth "
    "--disable-runtime-dependency-installation --ssl-ca-certfile --ssl-certfile --ssl-keyfile"
)


def imported(place: str):
    module, _, path = place.partition(":")
    try:
        value = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        pytest.fail(f"flwr {flwr.__version__} no longer has {place}, which effuse/transport/flower uses", pytrace=False)
    return value


@pytest.mark.parametrize("place", CALLS)
def test_functions_take_their_arguments(place):
    parameters = inspect.signature(imported(place)).parameters
    for i, name in enumerate(CALLS[place].split()):
        if name != "-" and name not in parameters:
            pytest.fail(f"flwr {flwr.__version__}: {place} takes no '{name}' any more", pytrace=False)
        if name == "-" and i >= len(parameters):
            pytest.fail(f"flwr {flwr.__version__}: {place} takes only {len(parameters)} arguments", pytrace=False)


@pytest.mark.parametrize("place", METHODS)
def test_clients_have_their_methods(place):
    for name in METHODS[place].split():
        imported(f"{place}.{name}")


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_requests_have_their_fields(kind):
    missing = set(FIELDS[kind]) - set(kind.DESCRIPTOR.fields_by_name)
    if missing:
        pytest.fail(f"flwr {flwr.__version__}: {kind.DESCRIPTOR.name} has no field '{min(missing)}' any more", pytrace=False)


def test_the_superlink_takes_its_flags():
    tool = Path(sys.executable).parent / "flower-superlink"
    help_page = subprocess.run([str(tool), "--help"], capture_output=True, text=True, timeout=60).stdout
    missing = [flag for flag in FLAGS.split() if flag not in help_page]
    if missing or "process" not in help_page:
        pytest.fail(
            f"flwr {flwr.__version__}: flower-superlink takes no '{(missing or ['--isolation process'])[0]}'", pytrace=False
        )


def test_sites_call_below_one_path():
    """What `superlink_process` lets everyone reach is the calls of sites, and its hook is where Flower asks for it."""
    fleet, control = (imported(f"flwr.superlink.routers.{name}.router:router") for name in ("fleet", "control"))
    assert {route.path for route in fleet.routes} and all(route.path.startswith("/v1/fleet/") for route in fleet.routes)
    assert not any(route.path.startswith(superlink_process.FOR_SITES) for route in control.routes)
    assert "get_middleware()" in inspect.getsource(imported("flwr.superlink.main:_get_middleware"))


def test_an_unknown_key_can_be_told_from_one_in_use():
    """ActivateNode fails with 2004 for both. Without an interval it fails with 2003, but with 2004 if the key is unknown."""
    activate = imported("flwr.superlink.servicer.fleet.fleet_handlers:activate_node")
    codes = imported("flwr.supercore.error:ApiErrorCode")

    class State:
        def __init__(self, node) -> None:
            self.node = node

        def get_node_id_by_public_key(self, key):
            return self.node

        def activate_node(self, node, interval) -> bool:
            return False

    for node, interval, code in (
        (None, 10.0, codes.FLEET_NODE_ACTIVATION_FAILED),
        (None, 0.0, codes.FLEET_NODE_ACTIVATION_FAILED),
        (5, 10.0, codes.FLEET_NODE_ACTIVATION_FAILED),
        (5, 0.0, codes.FLEET_INVALID_HEARTBEAT_INTERVAL),
    ):
        with pytest.raises(imported("flwr.supercore.error:FlowerError")) as caught:
            activate(fleet_pb2.ActivateNodeRequest(public_key=b"key", heartbeat_interval=interval), State(node))
        assert caught.value.code == code and caught.value.to_json("")["code"] == code


class Store:
    """Both ends of a connection: what is pushed can be pulled."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.trees: list = []
        self.messages: list = []
        self.pushes = 0

    def PushMessages(self, request):
        self.trees += request.message_object_trees
        self.messages += request.messages_list
        if request.messages_list[0].content.items:
            return runtime_pb2.PushAppMessagesResponse(session_id="s")
        ids = {t.object_id for tree in request.message_object_trees for t in every(tree)}
        return runtime_pb2.PushAppMessagesResponse(session_id="s", objects_to_push=sorted(ids - self.objects.keys()))

    def PushObject(self, request):
        from flwr.proto.message_pb2 import PushObjectResponse

        self.pushes += 1
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullObject(self, request):
        from flwr.proto.message_pb2 import PullObjectResponse

        known, content = request.object_id in self.objects, self.objects[request.object_id]
        return PullObjectResponse(object_found=known, object_available=known, object_content=content)

    def ConfirmMessageReceived(self, request):
        from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse

        return ConfirmMessageReceivedResponse()


def every(tree):
    yield tree
    for child in tree.children:
        yield from every(child)


@pytest.fixture
def endpoint():
    from flwr.proto.node_pb2 import Node

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 1
    return Endpoint(Store(), Node(node_id=1))


def send(endpoint, packet, node=5):
    def request(protos, trees):
        return runtime_pb2.PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)

    return push(endpoint, 2, [Message(records_of(packet), node, "train.effuse")], request)[0]


def test_a_packet_arrives_as_it_was_sent(endpoint):
    """Any bytes, no bytes, and a body of several of Flower's pieces of 5 MiB."""
    for packet in (Packet("hello", b"\x00\xff"), Packet(ORDER, b"h", bytes(range(256)) * 50_000), Packet(ANSWER)):
        ticket = send(endpoint, packet)
        message = pull(endpoint, 2, endpoint.client.messages[-1], endpoint.client.trees[-1], 5.0)
        assert packet_of(message) == packet and message.metadata.message_id == ticket
        reply = Message(records_of(Packet(ANSWER, b"r")), reply_to=message)
        assert reply.metadata.reply_to_message_id == ticket and reply.metadata.src_node_id == 5


def test_a_broadcast_body_is_stored_once(endpoint):
    """Two orders with the same 12 MB: the second pushes a message, records and a head, not the array and its 3 pieces."""
    body = random.Random(0).randbytes(12_000_000)
    send(endpoint, Packet(ORDER, b"to client 0", body), 5)
    assert endpoint.client.pushes == 8
    send(endpoint, Packet(ORDER, b"to client 1", body), 6)
    assert endpoint.client.pushes == 8 + 3
    assert sum(map(len, endpoint.client.objects.values())) < len(body) + 20_000


def test_another_message_is_a_packet_of_an_unknown_kind(endpoint):
    from flwr.app import ConfigRecord, Error, RecordDict

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 1
    other = Message(RecordDict({"config": ConfigRecord({"x": 1})}), 5, "train")
    assert packet_of(other).kind == "not a packet"
    assert packet_of(Message(Error(code=3, reason="gone"), reply_to=other)).kind == UNDELIVERED


def test_nothing_of_flower_is_imported_outside_its_folder():
    for path in ROOT.rglob("*.py"):
        if (ROOT / "transport" / "flower") not in path.parents:
            source = path.read_text()
            assert "import flwr" not in source and "from flwr" not in source, path


def test_an_unknown_version_of_flower_is_refused(monkeypatch):
    flower.require()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.43.0")
    with pytest.raises(RunError, match="flwr 1.43.0 is installed, but effuse knows 1.41 and 1.42"):
        flower.require()


def test_effuse_can_be_imported_and_run_without_flower(tmp_path):
    """In a process that cannot import flwr, everything works but a federation over a network, which says what to install."""
    script = """
import sys, importlib.abc
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flwr":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == "flwr" else plain(name, *a)
from effuse.cli import main
for words in (
    "list demo",
    "run demo --rounds 1 --out b --engine flower",
    "serve demo --listen 127.0.0.1:9",
    "join 127.0.0.1:9 --client-id 0 --data recipe",
    "keys init k --clients 1",
):
    sys.argv = ["effuse", *words.split()]
    try:
        main()
    except SystemExit as exit:
        print("ended with", exit.code)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert re.findall(r"ended with (\d+)", done.stdout) == ["0", "1", "1", "1", "1"], done.stderr
    assert done.stderr.count("pip install 'effuse[flower]'") == 4
    assert not (tmp_path / "b").exists()
