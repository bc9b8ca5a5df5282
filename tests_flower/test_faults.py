"""Faults in a real federation; the weights are the undisturbed run's, or those of a fake channel with the same loss."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest
from deployment import Deployment, kill
from fake import FakeChannel, run_over
from flwr.proto.control_pb2 import ListNodesRequest, StartRunRequest, StopRunRequest, UnregisterNodeRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from slow import ToySlow
from toy import ADAM, ToyStateful, toy_recipe

from effuse.core.errors import RunError
from effuse.runs import driver
from effuse.transport.flower import enrolment, keys
from effuse.transport.flower.commands import Served, served
from effuse.transport.flower.superlink import SuperLink
from effuse.transport.flower.terms import Terms
from effuse.transport.state import Snapshots


def recipe_of(**changes):
    return toy_recipe(reproducible=True, **({"rounds": 4, "algorithm": ToyStateful(local=ADAM)} | changes))


def without_a_network(deployment, recipe, lost) -> str:
    """The weights of the same run on a fake channel, in which these answers of client 1 are lost."""
    channel = FakeChannel(deployment.folder / "fake-sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n in lost else packet
    return run_over(channel, recipe, deployment.folder / "fake", Terms(quorum=2, deadline=0.3)).weights_sha256


def visits(deployment, client) -> int:
    """How often a client has taken part, by its state."""
    snapshots = Snapshots(deployment.folder / "sites" / str(client))
    newest = max(int(p.stem.split("_")[0]) for p in snapshots.folder.glob("*.state"))
    return snapshots.read(f"{newest}_0")["diary"].visits


def test_a_site_killed_mid_round_misses_it_and_comes_back_with_its_state(deployment, monkeypatch):
    """Client 1 is killed in round 1, which ends at its deadline with two of three; from round 2 on it takes part again."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, seconds=20.0, rounds=(1,)))
    sites = deployment.sites()
    server = deployment.serve(
        deployment.manifest(recipe), "--out", str(deployment.folder / "run"), "--quorum", "2", "--deadline", "15"
    )
    deployment.until("site-1.log", "round 2, job 'train': received")
    kill(sites[1])
    deployment.until("run/federation.log", "round 2, job 'train': continuing with 2 of 3; silent: 1")
    deployment.site(1)
    assert server.wait(120) == 0
    result = json.loads((deployment.folder / "run" / "result.json").read_text())
    plain = recipe_of(algorithm=ToySlow(local=ADAM, seconds=0.0, rounds=(1,)))
    monkeypatch.setattr(enrolment, "INVITE_AGAIN", 0.01)
    assert result["weights_sha256"] == without_a_network(deployment, plain, {2})
    assert visits(deployment, 1) == 3 and visits(deployment, 0) == 4


def test_a_site_that_is_killed_for_good_costs_no_deadline(deployment):
    """Client 1 is killed in round 1. The deadline is an hour; Flower notices soon, and no later round waits."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, seconds=20.0, rounds=(1,)))
    sites = deployment.sites()
    options = ("--quorum", "2", "--deadline", "3600", "--grace", "2")
    server = deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"), *options)
    deployment.until("site-1.log", "round 2, job 'train': received")
    kill(sites[1])
    assert server.wait(240) == 0, deployment.printed("serve.log")
    log = deployment.printed("run/federation.log")
    assert all(f"round {t}, job 'train': continuing with 2 of 3; silent: 1" in log for t in (2, 3, 4)), log
    rounds = [json.loads(line) for line in (deployment.folder / "run" / "rounds.jsonl").read_text().splitlines()]
    assert max(line["seconds"]["round"] for line in rounds[2:]) < 30


@pytest.mark.parametrize("at", [1, 2])
def test_a_server_killed_and_resumed_ends_with_the_same_weights(at, deployment):
    """It is killed when clients 0 and 1 have answered and client 2 has not; the sites reconnect by themselves."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, who=2, seconds=4.0, rounds=(at,)))
    deployment.sites()
    server = deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"))
    deployment.until("site-2.log", f"round {at}, job 'train': received")
    for client in (0, 1):
        deployment.wait(
            lambda k=client: deployment.printed(f"site-{k}.log").count("sent ") == at + 1, f"answer {at} of client {client}"
        )
    kill(server)
    server = deployment.serve("--resume", str(deployment.folder / "run"))
    assert server.wait(120) == 0, deployment.printed("serve.log")
    result = json.loads((deployment.folder / "run" / "result.json").read_text())
    expected = driver.run(recipe, deployment.folder / "simulator")
    assert result["weights_sha256"] == expected.weights_sha256
    assert [visits(deployment, k) for k in range(3)] == [4, 4, 4]


def test_a_client_whose_key_is_taken_away_is_shut_out_of_the_resumed_run(deployment, monkeypatch):
    """Clients 0 to 2 take part in round 0; then client 1 is shut out, with the weights of a run in which it is silent."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, who=2, seconds=4.0, rounds=(1,)))
    sites = deployment.sites()
    server = deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"))
    deployment.until("site-2.log", "round 2, job 'train': received")
    kill(server)
    (deployment.keys / "server" / "clients" / "1.pub").unlink()
    server = deployment.serve("--resume", str(deployment.folder / "run"), "--quorum", "2")
    assert server.wait(120) == 0, deployment.printed("serve.log")
    result = json.loads((deployment.folder / "run" / "result.json").read_text())
    monkeypatch.setattr(enrolment, "INVITE_AGAIN", 0.01)
    plain = recipe_of(algorithm=ToySlow(local=ADAM, who=2, seconds=0.0, rounds=(1,)))
    assert result["weights_sha256"] == without_a_network(deployment, plain, range(2, 9))
    assert visits(deployment, 0) == 4 and "shut out, because they have no key: 1" in deployment.printed("run/federation.log")
    assert "silent" not in deployment.printed("run/federation.log")
    assert "(the server does not know this key); trying again for a moment" in deployment.printed("site-1.log")
    kill(sites[1])


def test_a_superlink_that_dies_is_started_again(deployment):
    """The server starts another SuperLink, the sites reconnect, and orders are sent again."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, seconds=4.0, rounds=(1,)))
    deployment.sites()
    server = deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"))
    deployment.until("site-1.log", "round 2, job 'train': received")
    children = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 1
    os.kill(int(children[0]), signal.SIGKILL)
    assert server.wait(120) == 0, deployment.printed("serve.log")
    result = json.loads((deployment.folder / "run" / "result.json").read_text())
    assert result["weights_sha256"] == driver.run(recipe, deployment.folder / "simulator").weights_sha256
    assert "the connection is lost" in deployment.printed("run/federation.log")


def test_a_reply_past_its_deadline_is_discarded(deployment, monkeypatch):
    """Client 1 needs 9 s in round 1, where 5 are allowed; its state of that round is discarded, too."""
    recipe = recipe_of(algorithm=ToySlow(local=ADAM, seconds=9.0, rounds=(1,)))
    deployment.sites()
    engine = served(Served(deployment.address, deployment.keys, Terms(2, 5.0)), "toy", 3)
    result = driver.run(recipe, deployment.folder / "run", name="toy", served=engine)
    monkeypatch.setattr(enrolment, "INVITE_AGAIN", 0.01)
    plain = recipe_of(algorithm=ToySlow(local=ADAM, seconds=0.0, rounds=(1,)))
    assert "silent: 1" in deployment.printed("run/federation.log")
    log = deployment.printed("run/federation.log")
    assert "client 1's answer to round 2, job 'train' came after the deadline and is discarded" in log
    assert result.weights_sha256 == without_a_network(deployment, plain, {2})
    assert visits(deployment, 1) == 3


def test_wrong_answers_are_rejected_and_the_rounds_go_on(deployment):
    """A NaN, a wrong shape, a missing key, an unknown message type and too many bytes, one a round."""
    recipe = recipe_of(rounds=5)
    deployment.site(0), deployment.site(2)
    deployment.site(1, EFFUSE_TEST_WRONG="1")
    engine = served(Served(deployment.address, deployment.keys, Terms(2, 30.0)), "toy", 3)
    result = driver.run(recipe, deployment.folder / "run", name="toy", served=engine)
    assert result.rounds == 5
    log = deployment.printed("run/federation.log")
    shape = "'up.bias' has the shape (7,), not (1,)"
    reasons = ("non-finite number", shape, "'up.bias' is missing", "unknown type 'gossip'", "over the limit")
    for t, reason in enumerate(reasons, 1):
        lines = [line for line in log.splitlines() if f"round {t}, job 'train': client 1's answer is rejected: " in line]
        assert len(lines) == 1 and reason in lines[0], log


def test_strangers_are_refused(deployment):
    """A key of another federation, a key that is not registered, a plaintext client, and a run that a stranger starts."""
    other = Deployment(deployment.folder / "other", 4)
    host, _, port = deployment.address.partition(":")
    superlink = SuperLink(deployment.folder / "superlink", host, int(port), keys.ServerKeys(deployment.keys))
    superlink.open()
    try:
        foreign = deployment.site(0, "--data", "recipe", "--keys", str(other.keys))
        unknown = deployment.folder / "unknown"
        unknown.mkdir()
        (unknown / "client.key").touch(0o600)
        (unknown / "client.key").write_bytes((other.keys / "client-3" / "client.key").read_bytes())
        (unknown / "ca.crt").write_bytes((deployment.keys / "server" / "ca.crt").read_bytes())
        stranger = deployment.site(1, "--data", "recipe", "--keys", str(unknown))
        plaintext = deployment.site(2, "--data", "recipe")
        assert [p.wait(90) for p in (foreign, stranger, plaintext)] == [1, 1, 1]
        assert "does not show a certificate of this federation" in deployment.printed("site-0.log")
        assert "the server does not know this key; ask its operator whether client 1 was shut out" in deployment.printed(
            "site-1.log"
        )
        assert "412" not in deployment.printed("site-1.log")
        assert "speaks TLS, and this site has no keys" in deployment.printed("site-2.log")
        assert superlink.nodes() == set()
        # Flower would let anyone start and stop runs, list and unregister nodes
        common = (
            deployment.address,
            False,
            superlink.keys.ca.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr")],
        )
        with contextlib.closing(ControlHttpClient.from_server_address(*common)) as control:
            for call, request in (
                (control.StartRun, StartRunRequest()),
                (control.StopRun, StopRunRequest(run_id=superlink._run)),
                (control.ListNodes, ListNodesRequest()),
                (control.UnregisterNode, UnregisterNodeRequest(node_id=next(iter(superlink._owners)))),
            ):
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    call(request)
        with contextlib.closing(RuntimeHttpClient.from_server_address(*common)) as runtime:
            with pytest.raises(httpx.HTTPStatusError, match="403"):
                runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        verify = ssl.create_default_context(cafile=str(superlink.keys.ca))
        for path in ("docs", "openapi.json", "v1/fleet/../control/list-nodes", "v1/fleet/%2e%2e/control/list-nodes"):
            for how in (httpx.get, httpx.post):
                assert how(f"https://{deployment.address}/{path}", verify=verify).status_code in (403, 404, 405), path
        assert superlink.nodes() == set(), "the run goes on"
    finally:
        superlink.close()


def test_a_port_in_use_and_a_certificate_for_another_host_are_refused(deployment):
    host, _, port = deployment.address.partition(":")
    with socket.create_server((host, int(port))):
        with pytest.raises(RunError, match="another process listens on 127.0.0.1:[0-9]+"):
            SuperLink(deployment.folder / "a", host, int(port), keys.ServerKeys(deployment.keys)).open()
    with pytest.raises(RunError, match="is not valid for 127.0.0.2; make keys with --host 127.0.0.2"):
        SuperLink(deployment.folder / "b", "127.0.0.2", int(port), keys.ServerKeys(deployment.keys)).open()


def test_ctrl_c_ends_a_runs_own_processes_and_no_others(tmp_path):
    """`effuse run --engine flower` is interrupted in its second round; then the run is resumed. Another process lives on."""
    settings = [
        "clients=3",
        "rounds=6",
        "reproducible=True",
        "threads=1",
        "sampler=None",
        "evaluate=evaluate(grid=0)",
        "algorithm.local=adam(lr=1e-3, batch=64, steps=10)",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "effuse", "run", "demo", "--out", str(tmp_path / "run"), "--json", *options]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "effuse join"])
    run = subprocess.Popen([*command, "--engine", "flower"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = tmp_path / "run" / "rounds.jsonl"
        until = time.monotonic() + 90
        while not lines.exists() or not lines.read_text():
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
        assert run.returncode == 130 and "effuse resume" in error
        assert bystander.poll() is None
        left = subprocess.run(["pgrep", "-f", str(tmp_path / "run")], capture_output=True, text=True).stdout
        assert left == ""
    finally:
        bystander.kill()
        bystander.wait()
    options = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, "-m", "effuse", "resume", str(tmp_path / "run"), "--json"], **options)
    assert done.returncode == 0, done.stderr
    simulator = [word if word != str(tmp_path / "run") else str(tmp_path / "plain") for word in command]
    plain = subprocess.run(simulator, **options)
    assert json.loads(done.stdout)["weights_sha256"] == json.loads(plain.stdout)["weights_sha256"]
