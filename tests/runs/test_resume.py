"""A run that is killed and resumed ends in the same result as an undisturbed one."""

import dataclasses
import json
import os
import signal

import pytest
import torch
from timeless import timeless
from toy import (
    CVAES,
    DRAWN,
    GUIDE,
    INVERSION,
    SYNTHESIS,
    TEST,
    ToyAveraging,
    ToyGuided,
    ToyStateful,
    ToyTwoTasks,
    toy_recipe,
)

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.dense import Dense
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedcda import FedCDA
from effuse.algorithms.fedcvae import FedCVAE
from effuse.algorithms.feddda import FedDDA
from effuse.algorithms.fedddpm import FedDDPM, FedDDPMPlus
from effuse.algorithms.feddiffuse import UDec
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.feddisco import FedDisco
from effuse.algorithms.fedema import FedEMA
from effuse.algorithms.fedlid import FedLID
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.fedproto import FedProto
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.localonly import LocalOnly
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.algorithms.scaffold import Scaffold
from effuse.core.algorithm import Server
from effuse.core.errors import FederationError, RunError
from effuse.core.recipe import Evaluate
from effuse.core.reducers import Clipped, Median
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ancestral
from effuse.machines.eager import Eager
from effuse.privacy.histogram import Laplace
from effuse.runs import rounds
from effuse.runs.driver import resume, run
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer

ADAM = Adam(lr=1e-2, batch=8, epochs=1, state="kept")
TURNS = SYNTHESIS | {"group": 1}  # a client at a time
RECIPES = {
    "stateful": toy_recipe(algorithm=ToyStateful(local=ADAM, cohort=2), rounds=4, ema=0.5),
    "local only": toy_recipe(
        algorithm=LocalOnly(local=ADAM), rounds=4, evaluate=Evaluate(grid=2, every=2), sampler=Ancestral(batch=2)
    ),
    "udec": toy_recipe(
        algorithm=UDec(local=ADAM, cohort=2), rounds=4, evaluate=Evaluate(grid=2, every=2), sampler=Ancestral(batch=2)
    ),
    # round 0 enrols; the network is cut at the end of the second round after that, of four
    "fedphd": toy_recipe(algorithm=FedPhD(local=ADAM, cohort=2, r_g=1, R_s=2, ratio=0.5, a=20.0), rounds=4, ema=0.5),
    "scaffold": toy_recipe(algorithm=Scaffold(local=Adam(lr=1e-2, batch=8, epochs=1), cohort=2), rounds=4),
    "mofedsam": toy_recipe(algorithm=MoFedSAM(local=Adam(lr=1e-2, batch=8, epochs=1), cohort=2), rounds=3),
    # six rounds of warm-up and synthesis by turns, two federated ones, a correction: fits 1 | 2 | 3 | 4-6, 7-9 | 10
    "fedddpm+": toy_recipe(
        algorithm=FedDDPMPlus(**TURNS, local=Adam(lr=1e-2, batch=8, epochs=1), central=ADAM, test=TEST),
        rounds=2,
        ema=0.5,
    ),
    "fedddpm": toy_recipe(algorithm=FedDDPM(**TURNS, local=ADAM, central=ADAM, part=0.5, share=0.5), rounds=2),
    "localaug": toy_recipe(algorithm=LocalAug(**TURNS, local=ADAM, cohort=2), rounds=2),
    # the clients' networks, then rounds of two fits each: 1-3 | 4-5 | 6-7 | 8-9
    "dense": toy_recipe(algorithm=Dense(**INVERSION, local=Adam(lr=1e-2, batch=8, epochs=1), central=ADAM), rounds=3),
    # three warm-ups, the distillation, two rounds: fits 1-3 | 4 | 5 | 6; draws 1-3 in the synthesis, and 4
    "fedcvae, distilled": toy_recipe(
        algorithm=FedCVAE(
            **CVAES,
            variant="kd",
            distillation=Adam(lr=1e-2, batch=8, epochs=1),
            central=ADAM,
            histogram=Laplace(epsilon=1.0),
        ),
        rounds=2,
    ),
    "feddifrc": toy_recipe(algorithm=FedDifRC(local=ADAM, cohort=2, guide=GUIDE, t=3, refresh=2), rounds=4),
    "fedema": toy_recipe(
        algorithm=FedEMA(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.5, state="kept"), cohort=2), rounds=4
    ),
    "fedlid": toy_recipe(algorithm=FedLID(local=ADAM), rounds=3),
    # three rounds of drawing, then three of two fits each: draws 1 | 2 | 3, fits 1-2 | 3-4 | 5-6
    "feddda": toy_recipe(algorithm=FedDDA(local=ADAM, **DRAWN, cohort=2, deal="add_lack", filter=1), rounds=3),
    "feddisco": toy_recipe(algorithm=FedDisco(local=ADAM, cohort=2, histogram=Laplace(epsilon=1.0)), rounds=4),
    "fedcda": toy_recipe(algorithm=FedCDA(local=ADAM, cohort=2, cache=2, batches=2, warmup=1), rounds=4),
    "fedproto": toy_recipe(algorithm=FedProto(local=ADAM, cohort=2), rounds=4),
    "two tasks": toy_recipe(algorithm=ToyTwoTasks(local=ADAM, pull=0.5), rounds=3),
    "averaging": toy_recipe(algorithm=ToyAveraging(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.5)), rounds=3),
    "sent once": toy_recipe(algorithm=ToyGuided(local=ADAM, cohort=2), rounds=4),
    "median": toy_recipe(algorithm=FedAvg(local=ADAM, cohort=2, aggregate=Median()), rounds=4),
    "clipped": toy_recipe(algorithm=FedAvg(local=ADAM, cohort=2, aggregate=Clipped(norm=0.05)), rounds=4),
    "centralised": toy_recipe(algorithm=Centralised(local=Adam(lr=1e-2, batch=8, steps=3, ema=0.9, state="kept")), rounds=4),
}
# where the process is killed: (recipe, event, how many times it happened)
DEATHS = [
    ("stateful", "fit", 1),  # in the first round, before any checkpoint
    ("stateful", "fit", 4),  # one client of the round has replied and written its state
    ("stateful", "fit", 8),
    ("stateful", "sync", 2),  # before a checkpoint, the states that it names are being synced to disk
    ("stateful", "rename", 3),
    ("stateful", "renamed", 4),  # a client's new state is on disk, its reply was not accepted
    ("stateful", "checkpoint", 1),  # half of a checkpoint is on disk
    ("stateful", "checkpoint", 3),
    ("stateful", "checkpointed", 2),  # a checkpoint is on disk, the next round has not begun
    ("stateful", "line", 2),  # half a line of rounds.jsonl
    ("stateful", "lined", 3),  # the line is whole, its checkpoint is missing
    ("stateful", "result", 1),  # only the result is missing
    ("local only", "fit", 5),
    ("local only", "checkpoint", 2),
    ("udec", "fit", 4),  # a client in its first round: it must be sent the whole model again
    ("udec", "renamed", 5),
    ("udec", "checkpoint", 2),
    ("udec", "drawing", 2),  # in the evaluation, after the checkpoint of its round
    ("local only", "drawing", 5),  # in the last evaluation
    ("sent once", "fit", 4),  # one client of the round has answered with a guide: it must be sent that again
    ("sent once", "checkpointed", 1),
    ("median", "fit", 4),
    ("clipped", "checkpoint", 2),
    ("fedphd", "renamed", 2),  # one client has sent and saved its histogram, the others have not
    ("fedphd", "fit", 4),  # the last client before pruning has trained
    ("fedphd", "checkpoint", 3),  # the network is pruned, its checkpoint half written
    ("fedphd", "checkpointed", 3),  # the checkpoint holds the pruned network, clients hold the moments of the wider one
    ("fedphd", "fit", 5),  # the first client after pruning
    ("fedphd", "renamed", 8),
    ("feddifrc", "renamed", 2),  # two clients have told moments and kept the guide, and the third is being asked
    ("feddifrc", "fit", 2),  # a client has looked, its reply has not been taken
    ("feddifrc", "checkpointed", 1),  # the basis is in the server's state
    ("fedema", "fit", 4),  # a client has mixed two networks and trained, its reply has not been taken
    ("fedema", "renamed", 4),
    ("fedema", "checkpointed", 2),
    ("fedlid", "fit", 5),
    ("feddda", "drawing", 3),
    ("feddda", "checkpoint", 2),
    ("feddda", "fit", 2),  # a client has kept its share, its reply has not been taken
    ("feddda", "checkpointed", 4),
    ("feddisco", "renamed", 2),  # a client has kept what it tells, and the second is being asked
    ("feddisco", "fit", 3),
    ("feddisco", "checkpointed", 1),
    ("fedcda", "fit", 4),  # the first choice is next
    ("fedcda", "checkpointed", 2),  # products and choices are in the server's state
    ("fedcda", "fit", 5),
    ("fedproto", "checkpointed", 1),  # prototypes are in it
    ("scaffold", "fit", 4),  # a client's variate is written, its reply not yet taken
    ("scaffold", "checkpoint", 2),
    ("mofedsam", "fit", 4),
    ("fedddpm+", "fit", 1),  # during the first warm-up
    ("fedddpm+", "renamed", 4),  # the second warm-up model is saved
    ("fedddpm+", "renamed", 5),  # and uploaded: its client has deleted it
    ("fedddpm+", "drawing", 1),  # during synthesis
    ("fedddpm+", "checkpoint", 2),  # at the end of a synthesis
    ("fedddpm+", "fit", 3),  # the warm-up of the third client
    ("fedddpm+", "drawing", 4),  # during the first test
    ("fedddpm+", "fit", 8),
    ("fedddpm+", "fit", 10),  # in the correction
    ("fedddpm+", "checkpoint", 9),  # after it
    ("fedddpm", "drawing", 3),
    ("fedddpm", "fit", 7),  # in the first round's correction
    ("fedddpm", "fit", 11),  # in the second's, whose optimiser state was saved
    ("localaug", "renamed", 8),  # a client has its share
    ("localaug", "checkpoint", 7),  # sharing is over
    ("localaug", "fit", 5),
    ("dense", "fit", 2),
    ("dense", "fit", 7),  # the second batch of images is drawn, the student has not seen it
    ("dense", "checkpoint", 3),
    ("fedcvae, distilled", "drawing", 2),
    ("fedcvae, distilled", "fit", 4),  # in the distillation
    ("fedcvae, distilled", "drawing", 4),  # from the distilled decoder
    ("fedcvae, distilled", "checkpoint", 3),
    ("fedcvae, distilled", "fit", 6),
    ("two tasks", "fit", 3),  # a client has trained one of its two networks
    ("two tasks", "renamed", 4),
    ("two tasks", "checkpoint", 2),
    ("averaging", "fit", 8),  # its gradient is reported
    ("centralised", "fit", 3),
    ("centralised", "checkpoint", 3),
]


class Fate:
    """Kills this process when an event happens for the n-th time."""

    def __init__(self, monkeypatch, event: str, n: int) -> None:
        self.left = n
        fit, draw, sync, rename = Eager.fit, Eager.generate, os.fsync, os.replace
        append, save, write_json = RunFolder.append, RunFolder.save_checkpoint, RunFolder.write_json

        def after_fit(machine, net, work):
            done = fit(machine, net, work)
            self.strike(event == "fit")
            return done

        def after_drawing(machine, *args):
            drawn = draw(machine, *args)
            self.strike(event == "drawing")
            return drawn

        def at_sync(handle):
            self.strike(event == "sync")
            sync(handle)

        def at_rename(old, new):
            checkpoint = "checkpoints" in str(new)
            if "prepared" in str(new):
                return rename(old, new)
            self.strike(event == "rename" and not checkpoint)
            if event == "checkpoint" and checkpoint and self.left == 1:
                os.truncate(old, os.path.getsize(old) // 2)
                rename(old, str(old) + ".half")  # leave the unfinished file under another name
            self.strike(event == "checkpoint" and checkpoint)
            rename(old, new)
            self.strike(event == "renamed" and not checkpoint)

        def at_line(folder, record):
            if event == "line" and self.left == 1:
                with open(folder.rounds, "a") as file:
                    file.write(json.dumps(record.to_json())[:40])
            self.strike(event == "line")
            append(folder, record)
            self.strike(event == "lined")

        def at_checkpoint(folder, *what):
            save(folder, *what)
            self.strike(event == "checkpointed")

        def at_json(folder, name, value):
            self.strike(event == "result" and name == "result.json")
            write_json(folder, name, value)

        monkeypatch.setattr(Eager, "fit", after_fit)
        monkeypatch.setattr(Eager, "generate", after_drawing)
        monkeypatch.setattr(os, "fsync", at_sync)
        monkeypatch.setattr(os, "replace", at_rename)
        monkeypatch.setattr(RunFolder, "append", at_line)
        monkeypatch.setattr(RunFolder, "save_checkpoint", at_checkpoint)
        monkeypatch.setattr(RunFolder, "write_json", at_json)

    def strike(self, now: bool) -> None:
        if now:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def killed_run(recipe, folder, monkeypatch, event, n, action=run) -> None:
    """Run in a child process that dies by SIGKILL at the given moment."""
    child = os.fork()
    if child == 0:
        with monkeypatch.context() as patch:
            Fate(patch, event, n)
            action(recipe, folder) if action is run else action(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
        "the process outlived the moment it should have died"
    )


def lines(folder):
    """rounds.jsonl without times."""
    return [timeless(record) for record in RunFolder(folder).records()]


def average(folder) -> dict[str, bytes]:
    """The files of the average over rounds, if there is one."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("model-ema/**/*")) if p.is_file()}


@pytest.fixture(autouse=True)
def checkpoint_every_round(monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result, the average over rounds, and the lines of an undisturbed run of each recipe."""
    known = {}

    def get(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("quiet") / "run"
            known[name] = (run(RECIPES[name], folder), average(folder), lines(folder))
        return known[name]

    return get


@pytest.mark.parametrize(("name", "event", "n"), DEATHS)
def test_killed_and_resumed(name, event, n, tmp_path, monkeypatch, undisturbed):
    quiet, quiet_average, quiet_lines = undisturbed(name)
    killed_run(RECIPES[name], tmp_path / "run", monkeypatch, event, n)
    result = resume(tmp_path / "run")
    assert result.weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == quiet_lines
    assert average(tmp_path / "run") == quiet_average and (quiet_average or RECIPES[name].ema is None)
    assert result.traffic == quiet.traffic and result.metrics == quiet.metrics and result.images == quiet.images


def test_a_run_that_dies_in_an_evaluation_trains_no_round_again(tmp_path, monkeypatch, undisturbed):
    """The checkpoint is written before the last evaluation: a model that may not be fitted again ends alike."""
    quiet, _, quiet_lines = undisturbed("udec")
    killed_run(RECIPES["udec"], tmp_path / "run", monkeypatch, "drawing", 4)
    assert len(lines(tmp_path / "run")) == 3, "the line of round 4 waits for its evaluation"
    monkeypatch.setattr(Eager, "fit", None)
    assert resume(tmp_path / "run").weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == quiet_lines and quiet_lines[-1]["measuring"] > 0


def test_an_average_restarts_when_the_network_is_pruned(tmp_path):
    """Five federated rounds, pruned at the end of the third: the average has three models, from rounds three to five."""
    run(RECIPES["fedphd"].changed(["rounds=5", "algorithm.R_s=3"]), tmp_path / "run")
    assert RunFolder(tmp_path / "run").load_checkpoint().averaged == 3


def test_killed_twice(tmp_path, monkeypatch, undisturbed):
    quiet, _, quiet_lines = undisturbed("stateful")
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "fit", 6)
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "checkpoint", 1, action=lambda folder: resume(folder))
    assert resume(tmp_path / "run").weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == quiet_lines


def test_a_checkpoint_names_only_states_that_the_disk_holds(tmp_path, monkeypatch):
    """Before a checkpoint names client states, their files and folders are synced to disk."""
    held: dict[str, int] = {}
    sync, save = os.fsync, RunFolder.save_checkpoint

    def at_sync(handle):
        sync(handle)
        held[os.readlink(f"/proc/self/fd/{handle}")] = len(held)

    named = []

    def at_checkpoint(folder, checkpoint, *more):
        for client, name in checkpoint.snapshots.items():
            home = folder.path.resolve() / "clients" / str(client)
            assert f"{home / name}.state" in held and str(home) in held
            named.append(name)
        save(folder, checkpoint, *more)

    monkeypatch.setattr(os, "fsync", at_sync)
    monkeypatch.setattr(RunFolder, "save_checkpoint", at_checkpoint)
    run(RECIPES["stateful"], tmp_path / "run")
    assert len(set(named)) > 1


def test_the_ledger_does_not_depend_on_when_checkpoints_are_written(tmp_path, monkeypatch):
    """To the byte on the wire: an order names the state of the last checkpoint in a field of one length."""
    for share in (0.0, 1e9):
        monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", share)
        run(dataclasses.replace(RECIPES["stateful"], rounds=14), tmp_path / str(share), engine="loopback")
    rare, often = (json.loads((tmp_path / str(share) / "ledger.json").read_text()) for share in (0.0, 1e9))
    assert rare == often and rare["training"]["wire_bytes"]["total"] > 0


def test_rare_checkpoints_resume_alike(tmp_path, monkeypatch, undisturbed):
    """Only the first round is checkpointed; the states that it names must remain for three more rounds."""
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 0.0)
    quiet, _, quiet_lines = undisturbed("stateful")
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "fit", 8)
    assert resume(tmp_path / "run").weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == quiet_lines


def test_resuming_a_finished_run_gives_its_result(tmp_path):
    first = run(toy_recipe(), tmp_path / "run")
    observer = Observer()
    observer.said = (words := []).append
    assert resume(tmp_path / "run", observer=observer) == first
    assert words == [f"{tmp_path / 'run'} is already finished"]
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"device": "cpu"', '"device": "gone"'))
    assert resume(tmp_path / "run") == first, "even without the device on which it ran"


def test_old_states_and_checkpoints_are_dropped(tmp_path):
    run(RECIPES["stateful"], tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    for client in (tmp_path / "run" / "clients").iterdir():
        names = {path.name for path in client.iterdir()}
        assert len(names - {"durable"}) <= 3, "the accepted state, the one before it, and that of the checkpoint before"


def test_a_lost_client_folder_is_reported(tmp_path, monkeypatch):
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "checkpointed", 3)
    for file in (tmp_path / "run" / "clients").rglob("*.state"):
        file.unlink()
    with pytest.raises(FederationError, match="has no snapshot .* that the server expects; restore the folder"):
        resume(tmp_path / "run")


def test_a_damaged_checkpoint_is_reported(tmp_path, monkeypatch):
    """There is no other one to go back to."""
    killed_run(RECIPES["centralised"], tmp_path / "run", monkeypatch, "checkpointed", 1)
    (only,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    only.write_bytes(only.read_bytes()[:-10])
    with pytest.raises(RunError, match="is damaged: its digest is not .* restore it from a backup, or start a new run"):
        resume(tmp_path / "run")


def bits_flipped(path, at: float = 0.9) -> None:
    blob = bytearray(path.read_bytes())
    blob[int(at * len(blob))] ^= 1
    path.write_bytes(blob)


@pytest.mark.parametrize(
    "what",
    ["checkpoint cut", "checkpoint flipped", "checkpoint empty", "state flipped", "state empty", "state cut", "state gone"],
)
@pytest.mark.parametrize("name", ["stateful", "fedddpm", "centralised"])
def test_a_damaged_file_goes_back_to_the_checkpoint_before(tmp_path, monkeypatch, undisturbed, name, what):
    """It ends in the undisturbed result, and says so loudly; a flipped bit in the tensors parses, so only a digest tells."""
    quiet, _, quiet_lines = undisturbed(name)
    killed_run(RECIPES[name], tmp_path / "run", monkeypatch, "checkpointed", 3)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1]
    states = RunFolder(tmp_path / "run").load_checkpoint().snapshots
    if what.startswith("state") and not states:
        client, snapshot = "", f"server/{RunFolder(tmp_path / 'run').load_checkpoint().workbench}.state"
    elif what.startswith("state"):
        client = max(states, key=lambda k: int(states[k].split("_")[0]))  # written since the checkpoint before
        snapshot = f"clients/{client}/{states[client]}.state"
    victim = tmp_path / "run" / snapshot if what.startswith("state") else newest
    if what == "state gone":
        victim.unlink()
    elif what == "state cut":  # in its header, which is read before the digest
        victim.write_bytes(victim.read_bytes()[:40])
    elif what == "checkpoint cut":
        victim.write_bytes(victim.read_bytes()[:-10])
    elif what.endswith("empty"):
        victim.write_bytes(b"")
    else:
        bits_flipped(victim)
    observer = Observer()
    observer.said = (words := []).append
    assert resume(tmp_path / "run", observer=observer).weights_sha256 == quiet.weights_sha256
    assert lines(tmp_path / "run") == quiet_lines
    assert words[0].startswith("WARNING: ") and victim.name in words[0] or "snapshot" in words[0]
    assert words[1].startswith("WARNING: going back to the checkpoint before it, ")
    assert newest.with_suffix(".damaged").exists()


def test_a_checkpoint_belongs_to_its_manifest(tmp_path, monkeypatch):
    """An edited manifest would end in other weights; neither of the two checkpoints is for it."""
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "checkpointed", 3)
    manifest = tmp_path / "run" / "manifest.json"
    kept = manifest.read_text()
    manifest.write_text(kept.replace("lr=0.01", "lr=0.02"))
    with pytest.raises(RunError, match="belongs to the manifest [0-9a-f]{12}, and manifest.json here is [0-9a-f]{12}"):
        resume(tmp_path / "run")
    manifest.write_text(kept)
    resume(tmp_path / "run")


def test_a_checkpoint_with_another_kind_of_state_is_refused(tmp_path, monkeypatch):
    """The checkpoint of a SCAFFOLD whose server had a model but no variate."""
    killed_run(RECIPES["scaffold"], tmp_path / "run", monkeypatch, "checkpointed", 2)
    folder = RunFolder(tmp_path / "run")
    saved = folder.load_checkpoint()
    folder.save_checkpoint(dataclasses.replace(saved, server=Server(saved.server.model)))
    with pytest.raises(
        RunError, match="holds a Server, but scaffold now needs a ScaffoldServer; finish it with the version"
    ):
        resume(tmp_path / "run")


def test_partial_files_of_a_killed_write_are_deleted(tmp_path, monkeypatch, undisturbed):
    killed_run(RECIPES["stateful"], tmp_path / "run", monkeypatch, "rename", 3)
    assert list((tmp_path / "run").rglob("*.partial")), "the process was killed in the middle of a write"
    assert resume(tmp_path / "run").weights_sha256 == undisturbed("stateful")[0].weights_sha256
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path):
    """Another process may read a run while a round's line is being written."""
    folder = RunFolder(tmp_path / "run")
    run(RECIPES["centralised"], tmp_path / "run")
    before = folder.records()
    line = folder.rounds.read_text().splitlines()[-1]
    with open(folder.rounds, "a") as file:
        file.write(line[: len(line) // 2])
    assert folder.records() == before and len(before) == RECIPES["centralised"].rounds


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    run(toy_recipe(), tmp_path / "run")
    with pytest.raises(RunError, match="already holds a run; choose another --out, or continue it with `effuse resume"):
        run(toy_recipe(), tmp_path / "run")


def test_two_processes_do_not_share_a_folder(tmp_path):
    run(toy_recipe(), tmp_path / "run")
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="in use by another effuse process"):
        resume(tmp_path / "run")


def test_the_manifest_repeats_the_run(tmp_path):
    from effuse.recipes import find_recipe

    first = run(RECIPES["stateful"], tmp_path / "run")
    _, again = find_recipe(str(tmp_path / "run" / "manifest.json"))
    assert run(again, tmp_path / "again").weights_sha256 == first.weights_sha256
    assert torch.get_num_threads() == 1
