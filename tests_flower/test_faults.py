"""What goes wrong in a real federation, each time with the undisturbed run's weights, or those of the same loss without a network."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from conftest import Town, kill
from fake import FakeChannel, run_over
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from slow import ToySlow
from toy import ADAM, ToyStateful, toy_recipe

from effuse.core.errors import RunError
from effuse.runs import driver
from effuse.transport.flower import keys
from effuse.transport.flower import server as federation
from effuse.transport.flower.commands import Served, served
from effuse.transport.flower.superlink import SuperLink
from effuse.transport.flower.terms import Terms
from effuse.transport.state import Snapshots


def slow(**changes):
    return toy_recipe(reproducible=True, **({"rounds": 4, "algorithm": ToyStateful(local=ADAM)} | changes))


def without_a_network(town, recipe, lost) -> str:
    """The weights of the same run in one process, in which some answers of client 1 are lost."""
    channel = FakeChannel(town.folder / "fake-sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n in lost else packet
    return run_over(channel, recipe, town.folder / "fake", Terms(quorum=2, deadline=0.3)).weights_sha256


def visits(town, client) -> int:
    """How often a client's state says that it has taken part."""
    kept = Snapshots(town.folder / "sites" / str(client))
    newest = max(int(p.stem.split("_")[0]) for p in kept.folder.glob("*.state"))
    return kept.read(f"{newest}_0")["diary"].visits


def test_a_worker_killed_mid_round_is_missed_once_and_comes_back_with_its_state(town, monkeypatch):
    """Client 1 dies at work in round 1: the round ends at its deadline with two of three; from round 2 on it takes part again."""
    recipe = slow(algorithm=ToySlow(local=ADAM, seconds=20.0, rounds=(1,)))
    sites = town.sites()
    server = town.serve(town.manifest(recipe), "--out", str(town.folder / "run"), "--quorum", "2", "--deadline", "15")
    town.until("site-1.log", "round 1, job 'train': received")
    kill(sites[1])
    town.until("run/federation.log", "round 1, job 'train': continuing with 2 of 3; silent: 1")
    town.site(1)
    assert server.wait(120) == 0
    result = json.loads((town.folder / "run" / "result.json").read_text())
    plain = slow(algorithm=ToySlow(local=ADAM, seconds=0.0, rounds=(1,)))
    monkeypatch.setattr(federation, "KNOCK", 0.01)
    assert result["weights_sha256"] == without_a_network(town, plain, {2})
    assert visits(town, 1) == 3 and visits(town, 0) == 4


@pytest.mark.parametrize("at", [1, 2])
def test_a_server_killed_and_resumed_ends_as_if_nothing_had_happened(at, town):
    """It dies in a round in which clients 0 and 1 have answered and client 2 has not; the sites stay and reconnect by themselves."""
    recipe = slow(algorithm=ToySlow(local=ADAM, who=2, seconds=4.0, rounds=(at,)))
    town.sites()
    server = town.serve(town.manifest(recipe), "--out", str(town.folder / "run"))
    town.until("site-2.log", f"round {at}, job 'train': received")
    for client in (0, 1):
        town.wait(lambda k=client: town.said(f"site-{k}.log").count("sent ") == at + 1, f"answer {at} of client {client}")
    kill(server)
    server = town.serve("--resume", str(town.folder / "run"))
    assert server.wait(120) == 0, town.said("serve.log")
    result = json.loads((town.folder / "run" / "result.json").read_text())
    expected = driver.run(recipe, town.folder / "simulator")
    assert result["weights_sha256"] == expected.weights_sha256
    assert [visits(town, k) for k in range(3)] == [4, 4, 4]


def test_a_client_whose_key_is_taken_away_is_shut_out_of_the_resumed_run(town, monkeypatch):
    """Clients 0 to 2 take part in round 0; then client 1 is not let in any more, and the rest is as if it had stayed silent."""
    recipe = slow(algorithm=ToySlow(local=ADAM, who=2, seconds=4.0, rounds=(1,)))
    sites = town.sites()
    server = town.serve(town.manifest(recipe), "--out", str(town.folder / "run"))
    town.until("site-2.log", "round 1, job 'train': received")
    kill(server)
    (town.keys / "server" / "clients" / "1.pub").unlink()
    server = town.serve("--resume", str(town.folder / "run"), "--quorum", "2")
    assert server.wait(120) == 0, town.said("serve.log")
    result = json.loads((town.folder / "run" / "result.json").read_text())
    monkeypatch.setattr(federation, "KNOCK", 0.01)
    plain = slow(algorithm=ToySlow(local=ADAM, who=2, seconds=0.0, rounds=(1,)))
    assert result["weights_sha256"] == without_a_network(town, plain, range(2, 9))
    assert visits(town, 0) == 4 and "shut out, because they have no key: 1" in town.said("run/federation.log")
    assert "silent" not in town.said("run/federation.log")
    assert "(the server does not know this key); trying again for a moment" in town.said("site-1.log")
    kill(sites[1])


def test_a_superlink_that_dies_is_started_again(town):
    """The driver outlives its SuperLink: it starts another, the sites come back, and orders go out again."""
    recipe = slow(algorithm=ToySlow(local=ADAM, seconds=4.0, rounds=(1,)))
    town.sites()
    server = town.serve(town.manifest(recipe), "--out", str(town.folder / "run"))
    town.until("site-1.log", "round 1, job 'train': received")
    children = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 1
    os.kill(int(children[0]), signal.SIGKILL)
    assert server.wait(120) == 0, town.said("serve.log")
    result = json.loads((town.folder / "run" / "result.json").read_text())
    assert result["weights_sha256"] == driver.run(recipe, town.folder / "simulator").weights_sha256
    assert "the connection is lost" in town.said("run/federation.log")


def test_a_reply_past_its_deadline_is_discarded(town, monkeypatch):
    """Client 1 needs 9 s in round 1, where 5 are allowed; its state of that round is gone, as if it had not taken part."""
    recipe = slow(algorithm=ToySlow(local=ADAM, seconds=9.0, rounds=(1,)))
    town.sites()
    engine = served(Served(town.address, town.keys, Terms(2, 5.0)), "toy", 3)
    result = driver.run(recipe, town.folder / "run", name="toy", served=engine)
    monkeypatch.setattr(federation, "KNOCK", 0.01)
    plain = slow(algorithm=ToySlow(local=ADAM, seconds=0.0, rounds=(1,)))
    assert "silent: 1" in town.said("run/federation.log")
    assert "client 1's answer to round 1, job 'train' came after the deadline and is discarded" in town.said(
        "run/federation.log"
    )
    assert result.weights_sha256 == without_a_network(town, plain, {2})
    assert visits(town, 1) == 3


def test_a_client_that_lies_is_rejected_each_time_and_the_rounds_go_on(town):
    """NaN, a wrong shape, a wrong key set, an unknown message type, too many bytes: one a round."""
    recipe = slow(rounds=5)
    town.site(0), town.site(2)
    town.site(1, EFFUSE_TEST_LIES="1")
    engine = served(Served(town.address, town.keys, Terms(2, 30.0)), "toy", 3)
    result = driver.run(recipe, town.folder / "run", name="toy", served=engine)
    assert result.rounds == 5
    log = town.said("run/federation.log")
    for t, reason in enumerate(
        (
            "non-finite number",
            "'up.bias' has the shape (7,), not (1,)",
            "'up.bias' is missing",
            "unknown type 'gossip'",
            "over its limit",
        )
    ):
        said = [line for line in log.splitlines() if f"round {t}, job 'train': client 1's answer is rejected: " in line]
        assert len(said) == 1 and reason in said[0], log


def test_strangers_are_refused(town):
    """A key of another federation, a key that is not registered, a plaintext client, and a run that somebody else starts."""
    other = Town(town.folder / "other", 4)
    host, _, port = town.address.partition(":")
    link = SuperLink(town.folder / "superlink", host, int(port), keys.ServerKeys(town.keys))
    link.open()
    try:
        foreign = town.site(0, "--data", "recipe", "--keys", str(other.keys))
        unknown = town.folder / "unknown"
        unknown.mkdir()
        (unknown / "client.key").write_bytes((other.keys / "client-3" / "client.key").read_bytes())
        (unknown / "ca.crt").write_bytes((town.keys / "server" / "ca.crt").read_bytes())
        stranger = town.site(1, "--data", "recipe", "--keys", str(unknown))
        plaintext = town.site(2, "--data", "recipe")
        assert [p.wait(90) for p in (foreign, stranger, plaintext)] == [1, 1, 1]
        assert "does not show a certificate of this federation" in town.said("site-0.log")
        assert "the server does not know this key; ask its operator whether client 1 was shut out" in town.said("site-1.log")
        assert "412" not in town.said("site-1.log")
        assert "refuses this node" in town.said("site-2.log")
        assert link.nodes() == set()
        # anyone may start a run on a SuperLink, but without its secret nobody can act in it
        common = (town.address, False, link.keys.ca.read_bytes(), [RuntimeVersionHttpInterceptor(component_name="flwr")])
        with contextlib.closing(ControlHttpClient.from_server_address(*common)) as control:
            with contextlib.suppress(httpx.HTTPError):
                control.StartRun(StartRunRequest())
        with contextlib.closing(RuntimeHttpClient.from_server_address(*common)) as runtime:
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    finally:
        link.close()


def test_a_port_that_is_taken_and_a_certificate_for_another_host_are_told(town):
    host, _, port = town.address.partition(":")
    with socket.create_server((host, int(port))):
        with pytest.raises(RunError, match="another process listens on 127.0.0.1:[0-9]+"):
            SuperLink(town.folder / "a", host, int(port), keys.ServerKeys(town.keys)).open()
    with pytest.raises(RunError, match="is not valid for 127.0.0.2; make keys with --host 127.0.0.2"):
        SuperLink(town.folder / "b", "127.0.0.2", int(port), keys.ServerKeys(town.keys)).open()


def test_ctrl_c_ends_a_runs_own_processes_and_no_others(tmp_path):
    """`effuse run --engine flower` is interrupted in its second round; a bystander lives, nothing of the run does, and it resumes."""
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
    done = subprocess.run(
        [sys.executable, "-m", "effuse", "resume", str(tmp_path / "run"), "--json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    plain = subprocess.run(
        [w if w != str(tmp_path / "run") else str(tmp_path / "plain") for w in command],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert json.loads(done.stdout)["weights_sha256"] == json.loads(plain.stdout)["weights_sha256"]
