"""The server's end of Flower: a SuperLink as a child process, and a run on it whose ServerApp is this process."""

import contextlib
import functools
import hashlib
import secrets
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from effuse.core.errors import FederationError, RunError
from effuse.transport.flower import superlink_process, turned_away, waiting
from effuse.transport.flower.codec import Endpoint, packet_of, pull, push, records_of
from effuse.transport.flower.keys import ServerKeys
from effuse.transport.flower.messages import HEAD_LIMIT, ORDER, Channel, Invitation, Lost, Packet, refusal
from effuse.transport.flower.parts import INLINE
from effuse.transport.flower.subprocesses import last_lines, port_in_use, start, stop

START_UP = 60.0  # seconds that a SuperLink may take to start
HEARTBEAT = 10.0  # seconds between heartbeats; Flower gives up after about sixty
TRIES = 4  # of a call, before the connection counts as lost
TOGETHER = 64  # small packets that are sent or fetched by one call
T = TypeVar("T")
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
APP = {  # a SuperLink starts no run without an app; the code of this one is never executed
    "pyproject.toml": b"""[project]
name = "effuse"
version = "1.0.0"
[tool.flwr.app]
publisher = "effuse"
[tool.flwr.app.components]
serverapp = "effuse_app:app"
clientapp = "effuse_app:app"
""",
    "effuse_app.py": b'raise RuntimeError("this federation is carried by effuse: join it with `effuse join`")\n',
}


class Operator:
    """Marks calls as the operator's."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Any:
        context.request.headers[superlink_process.OPERATOR] = self.token
        if isinstance(context.message, PushAppMessagesRequest):
            nodes = [message.metadata.dst_node_id for message in context.message.messages_list]
            context.request.headers[waiting.RECEIVERS] = ",".join(map(str, nodes))
        return call_next(context)


def flower_environment(home: Path) -> dict[str, str]:
    """Flower with a home folder of its own, without telemetry and update checks."""
    return {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class SuperLink(Channel):
    """Packets through a SuperLink that is a child of this process."""

    def __init__(self, folder: Path, host: str, port: int, keys: ServerKeys | None) -> None:
        self.folder, self.host, self.port, self.keys = folder, host, port, keys
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        self.address = f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._owners: dict[int, int] = {}  # node -> client
        self._run = 0
        self._stopped = threading.Event()

    def open(self) -> None:
        self.close()
        self._start_superlink()
        self._owners = self._call(self._register_keys)
        self._call(self._start_run)

    def close(self) -> None:
        self._stopped.set()
        if self.process is not None:
            with contextlib.suppress(httpx.HTTPError, AttributeError):
                output = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
                if self.process.poll() is None:
                    self._endpoint.client.PushTaskOutput(output)
                self._endpoint.client.close()
            stop([self.process])
            self.process = None

    def nodes(self) -> set[int]:
        nodes = {node.node_id for node in self._call(lambda: self._endpoint.client.GetNodes(GetNodesRequest())).nodes}
        # anyone can register a node with a SuperLink; with keys, only the nodes of registered keys take part
        return nodes if self.keys is None else nodes & self._owners.keys()

    def turned_away(self) -> list[str]:
        return turned_away.taken(self.folder / turned_away.FILE)

    def owner(self, node: int) -> int | None:
        return self._owners.get(node)

    def signed(self, invitation: Invitation) -> Invitation:
        return invitation if self.keys is None else self.keys.sign(invitation, self._run)

    def send(self, node: int, packet: Packet, life: float) -> str:
        return next(self.send_all([(node, packet)], life))

    def send_all(self, packets: Sequence[tuple[int, Packet]], life: float) -> Iterator[str]:
        for many in batches(packets):
            messages = [self._message(node, packet, life) for node, packet in many]
            yield from self._call(functools.partial(push, self._endpoint, self._run, messages, _request))

    def _message(self, node: int, packet: Packet, life: float) -> Message:
        kind = "query.effuse" if not packet.body else "train.effuse"
        answer = self.limit if packet.kind == ORDER and self.limit is not None else 2 * HEAD_LIMIT
        return Message(records_of(packet), node, kind, ttl=life, group_id=str(answer))

    def collect(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        for first in range(0, len(tickets), TOGETHER):
            yield from self._collected(tickets[first : first + TOGETHER], patience)

    def _collected(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        pulled = self._call(lambda: self._endpoint.client.PullMessages(PullAppMessagesRequest(message_ids=tickets)))
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            try:
                packet = packet_of(
                    self._call(functools.partial(pull, self._endpoint, self._run, proto, tree, patience, self.limit))
                )
            except FederationError as error:
                packet = refusal(str(error))
            except ObjectPullError as error:
                packet = refusal(f"its upload was not completed ({error})")
            except (Lost, MemoryError):
                raise
            except Exception as error:  # Flower raises what it likes on parts that do not fit together
                packet = refusal(f"its upload cannot be read ({type(error).__name__}: {error})")
            yield proto.metadata.reply_to_message_id, packet

    def _call(self, call: Callable[[], T]) -> T:
        """Call the SuperLink: a transport error is tried again, any other failure is `Lost`."""
        for attempt in range(TRIES):
            if self.process is None or self.process.poll() is not None:
                raise Lost("the SuperLink has ended")
            try:
                return call()
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
                time.sleep(0.2 * attempt)
            except (httpx.HTTPError, ObjectPushError) as error:
                raise Lost(f"{type(error).__name__}: {error}") from None
        raise Lost(why)

    def _start_superlink(self) -> None:
        if port_in_use(self.host, self.port):  # the calls below would reach that other process
            raise RunError(f"another process listens on {self.address}; end it, or choose another port")
        secret = self.folder / "secret"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        secret.write_bytes(secrets.token_bytes(32))
        secret.chmod(0o600)
        command = [sys.executable, "-P", "-m", superlink_process.__name__, "--host", self.host, "--port", str(self.port)]
        command += ["--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
        if self.keys is None:
            command += ["--insecure"]
        else:
            command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(self.keys.ca)]
            command += ["--ssl-certfile", str(self.keys.certificate), "--ssl-keyfile", str(self.keys.key)]
        log = self.folder / "superlink.log"
        # its forty threads would each keep memory of their own for messages that are long gone
        own = {superlink_process.SECRET_FILE: str(secret), "MALLOC_ARENA_MAX": "1"}
        self.process = start(command, log, flower_environment(self.folder) | own)
        scheme, until = "http" if self.keys is None else "https", time.monotonic() + START_UP
        verify: Any = True if self.keys is None else ssl.create_default_context(cafile=str(self.keys.ca))
        while True:
            try:
                if httpx.get(f"{scheme}://{self.address}/health", verify=verify).status_code == 200:
                    return
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    self.close()
                    name = self.address.rpartition(":")[0]
                    raise RunError(
                        f"the certificate in --keys is not valid for {name}; make keys with --host {name}"
                    ) from None
            if self.process.poll() is not None or time.monotonic() > until:
                ended = self.process.poll() is not None
                self.close()
                how = "ended at once" if ended else f"did not answer within {START_UP:.0f} s"
                raise RunError(f"the SuperLink at {self.address} {how}: {last_lines(log)}; is the port free?")
            time.sleep(0.1)

    def _connected(self, kind: Any, *interceptors: Any) -> Any:
        component = RuntimeVersionHttpInterceptor(component_name="effuse")
        operator = Operator(superlink_process.token((self.folder / "secret").read_bytes()))
        root = None if self.keys is None else self.keys.ca.read_bytes()
        return kind.from_server_address(self.address, self.keys is None, root, [component, operator, *interceptors])

    def _register_keys(self) -> dict[int, int]:
        """Register every client's key; the SuperLink answers with the number of the key's node."""
        if self.keys is None:
            return {}
        with contextlib.closing(self._connected(ControlHttpClient)) as control:
            return {
                control.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key))).node_id: client
                for client, key in self.keys.clients().items()
            }

    def _start_run(self) -> None:
        """Start a Flower run, and take the part of its ServerApp."""
        blob = build_fab_from_files(APP)[0]
        fab = fab_to_proto(Fab(hashlib.sha256(blob).hexdigest(), blob, {}))
        with contextlib.closing(self._connected(ControlHttpClient)) as control:
            self._run = control.StartRun(StartRunRequest(fab=fab)).run_id
        token = self._acquire_token()
        client = self._connected(RuntimeHttpClient, RuntimeTokenHttpInterceptor(token))
        self._endpoint = Endpoint(client, Node(node_id=SUPERLINK_NODE_ID))
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, task.context.node_id
        self._stopped = threading.Event()
        threading.Thread(target=_send_heartbeats, args=(client, self._stopped), daemon=True).start()

    def _acquire_token(self) -> str:
        """The token of this run; a run that a stranger started on this SuperLink is never carried out."""
        secret = (self.folder / "secret").read_bytes()
        proof = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
        until = time.monotonic() + START_UP
        with contextlib.closing(self._connected(RuntimeHttpClient, proof)) as runtime:
            while time.monotonic() < until:
                offered = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if offered.HasField("task") and offered.task.run_id == self._run:
                    return str(offered.token)
                time.sleep(0.05)
        raise RunError(f"the SuperLink at {self.address} does not start the run; see {self.folder / 'superlink.log'}")


def _request(protos: list[Any], trees: list[Any]) -> PushAppMessagesRequest:
    return PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)


def batches(packets: Sequence[tuple[int, Packet]]) -> Iterator[list[tuple[int, Packet]]]:
    """Packets that go in one call: small ones together, and a large one alone."""
    together: list[tuple[int, Packet]] = []
    for node, packet in packets:
        if together and (packet.size > INLINE or together[-1][1].size > INLINE or len(together) == TOGETHER):
            yield together
            together = []
        together.append((node, packet))
    if together:
        yield together


def _send_heartbeats(client: RuntimeHttpClient, stopped: threading.Event) -> None:
    while not stopped.wait(HEARTBEAT):
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
