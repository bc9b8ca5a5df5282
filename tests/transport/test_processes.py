"""Worker processes: the weights of one process, and no worker left however a run ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy import ADAM, ALGORITHMS, ToyImages, ToyStateful, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.localonly import LocalOnly
from effuse.core.errors import RecipeError, RunError, TrainingError
from effuse.core.recipe import Evaluate
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.diffusion.samplers import Ancestral
from effuse.runs import rounds
from effuse.runs.driver import resume, run
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.transport import processes
from effuse.transport.processes import gpu_of, modules_of, pick_workers, slots_each

STATEFUL = toy_recipe(algorithm=ToyStateful(local=ADAM, cohort=2), rounds=3, wire="bf16")
PERSONAL = toy_recipe(
    algorithm=LocalOnly(local=ADAM),
    model=ToyUnet(dropout=0.0),
    threads=4,
    evaluate=Evaluate(grid=2, every=1),
    sampler=Ancestral(batch=2),
)
CUT = toy_recipe(algorithm=FedPhD(local=ADAM, cohort=2, r_g=1, R_s=2, ratio=0.5), rounds=3)
# warm-up models and images in a client's state, and messages of the algorithm's own; FedDDPM and AuxOnly have the same jobs
TESTED = toy_recipe(algorithm=ALGORITHMS["fedddpm+"])
SHARED = toy_recipe(algorithm=ALGORITHMS["localaug"])
JOBS = pytest.mark.slow("two workers each; loopback tests what these jobs send, the other recipes test the workers")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def children(parent: int) -> list[int]:
    """The worker processes of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(entry.name)] * (b"effuse.transport.serving" in (entry / "cmdline").read_bytes())
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def have_ended(pids: list[int], patience: float = 20.0) -> bool:
    until = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def lines(folder):
    """rounds.jsonl without the keys that depend on time, encoding or the number of processes."""
    dropped = ("seconds", "traffic", "at_a_time", "clients")
    records = [record.to_json() for record in RunFolder(folder).records()]
    losses = [{k: own.get("loss") for k, own in record.get("clients", {}).items()} for record in records]
    return [{k: v for k, v in record.items() if k not in dropped} for record in records], losses


@pytest.mark.parametrize(
    "recipe",
    [STATEFUL, PERSONAL, CUT, pytest.param(TESTED, marks=JOBS), pytest.param(SHARED, marks=JOBS)],
    ids=["state and dropout", "personal models, two slots each", "a network cut in the middle", "fedddpm+", "localaug"],
)
def test_two_processes_give_the_weights_of_one(recipe, tmp_path):
    one = run(recipe, tmp_path / "one")
    two = run(recipe, tmp_path / "two", workers=2)
    assert two.weights_sha256 == one.weights_sha256 and two.metrics == one.metrics
    assert two.traffic.bytes == one.traffic.bytes and two.traffic.wire_bytes.up > 0
    assert lines(tmp_path / "two") == lines(tmp_path / "one"), "images trained elsewhere are counted here"
    (at_a_time,) = {record.at_a_time for record in RunFolder(tmp_path / "two").records()}
    (alone,) = {record.at_a_time for record in RunFolder(tmp_path / "one").records()}
    assert at_a_time == 2 * slots_each(alone, 2, CPU)
    assert not children(os.getpid())


class Killer(Observer):
    """Kills a worker process during a round."""

    def __init__(self, t: int) -> None:
        self.t = t

    def replied(self, t, client, loss):
        if t == self.t:
            self.t = -1  # once
            os.kill(children(os.getpid())[0], signal.SIGKILL)


def test_a_worker_that_dies_ends_the_run_in_a_sentence_and_it_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)
    # rounds are counted from one; the death in the second is noticed there or in the next
    reason = r"round [23]: worker process [12] of 2 was killed by SIGKILL; .*`effuse resume .*run` goes on from the last"
    with pytest.raises(RunError, match=reason):
        run(toy_recipe(algorithm=ToyStateful(local=ADAM), rounds=3), tmp_path / "run", workers=2, observer=Killer(1))
    assert not children(os.getpid())
    quiet = run(toy_recipe(algorithm=ToyStateful(local=ADAM), rounds=3), tmp_path / "quiet")
    assert resume(tmp_path / "run", workers=1).weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == lines(tmp_path / "quiet")


def test_an_error_in_a_worker_is_raised_with_its_type_sentence_and_trace(tmp_path):
    exploding = toy_recipe(algorithm=FedAvg(local=SGD(lr=1e30, batch=8, steps=5)))
    with pytest.raises(TrainingError, match="round 1, client 0, job 'train': the loss became") as error:
        run(exploding, tmp_path / "run", workers=2)
    assert "in handle" in error.value.__notes__[0], "--debug shows where it was"
    assert not children(os.getpid())


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_end_with_the_parent(ending, tmp_path):
    """Ctrl-C ends in one sentence; a parent that is killed prints none, and its workers end as well."""
    recipe = tmp_path / "toy.json"
    recipe.write_text(json.dumps({"recipe": toy_recipe(rounds=100_000).saved()}))
    script = "import toy; from effuse.cli import main; main()"
    command = [sys.executable, "-c", script, "run", str(recipe), "--workers", "2", "--out", str(tmp_path / "run"), "--quiet"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "rounds.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.02)
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.send_signal(ending)
    _, words = parent.communicate(timeout=60)
    assert have_ended(workers)
    if ending == signal.SIGINT:
        assert parent.returncode == 130
        assert words == f"effuse: interrupted; `effuse resume {tmp_path / 'run'}` goes on from the last checkpoint\n"


def test_how_many_processes_and_slots(monkeypatch):
    """On a CPU the slots are divided among processes; on GPUs each process has its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [pick_workers(n, CPU, 10) for n in (None, 1, 3, 20)] == [1, 1, 3, 10]
    assert [pick_workers(n, CUDA, 10) for n in (None, 1, 3, 20)] == [4, 1, 3, 10] and pick_workers(None, CUDA, 2) == 2
    assert slots_each(5, 4, CUDA) == 5 and [slots_each(n, 2, CPU) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]


def test_workers_share_the_visible_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu_of(n) for n in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert [gpu_of(n) for n in range(3)] == ["5", "GPU-7", "5"]


def test_modules_outside_effuse_are_named():
    assert modules_of(toy_recipe()) == ["toy"]


def test_a_spec_that_only_a_script_defines_is_refused_with_workers():
    @spec
    class OfScript(ToyImages):
        """Defined where no other process can import it."""

    OfScript.__module__ = "__main__"
    with pytest.raises(RecipeError, match="of_script is defined in the script itself; put it into a module"):
        modules_of(toy_recipe(data=OfScript()))


def test_an_error_while_a_worker_starts_is_raised(tmp_path, monkeypatch):
    """The parent has the data, but the worker does not find the module that defines it."""
    monkeypatch.setattr(processes, "modules_of", lambda recipe: [])
    with pytest.raises(RecipeError, match="no source 'toy_images'"):
        run(toy_recipe(), tmp_path / "run", workers=2)
