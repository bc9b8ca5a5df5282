"""A run that takes over the preparation of another ends as if it had prepared itself, and counts what that cost."""

import dataclasses
import json

import pytest
from toy import ADAM, CVAES, KEPT, SYNTHESIS, TEST, ToyLabelled, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedcvae import FedCVAE
from effuse.algorithms.fedddpm import AuxOnly, FedDDPM, FedDDPMPlus
from effuse.algorithms.feddiff import FedDiff
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.shared.filters import Fmf
from effuse.core.errors import RecipeError, RunError
from effuse.core.privacy import Budget
from effuse.machines.eager import Eager
from effuse.privacy.histogram import Gaussian
from effuse.runs import rounds
from effuse.runs.driver import resume, run
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.pack import pack, unpack

FEDDDPM = FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM)
GENERATORS = {"generators": (ToyLabelled(dropout=0.0),), "task": Denoise(schedule=Linear(steps=25)), "least": 1}
FEDDIFF = FedDiff(
    **SYNTHESIS, **GENERATORS, central=KEPT, filter=Fmf(gamma=0.25, noise=2.0), histogram=Gaussian(epsilon=1.0), keep=True
)
DISTILLED = FedCVAE(**CVAES, variant="kd", distillation=ADAM, central=ADAM)
PAIRS = {  # the run that prepares, and the one that takes its preparation over
    "another learning rate at the server": (FEDDDPM, dataclasses.replace(FEDDDPM, central=KEPT)),
    "fedddpm+": (FEDDDPM, FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=TEST)),
    "from fedddpm+": (FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=TEST), FEDDDPM),
    "aux only": (FEDDDPM, AuxOnly(**SYNTHESIS, central=ADAM, share=0.1)),
    "localaug": (FEDDDPM, LocalAug(**SYNTHESIS, local=ADAM, cohort=2)),
    "from localaug": (LocalAug(**SYNTHESIS, local=ADAM, cohort=2), FEDDDPM),
    "feddiff": (FEDDIFF, dataclasses.replace(FEDDIFF, central=ADAM)),
    "fedcvae, distilled": (DISTILLED, dataclasses.replace(DISTILLED, central=KEPT)),
}


def recipe(algorithm, **changes):
    classes = {"model": ToyLabelled(dropout=0.0)} if algorithm.name not in ("feddiff", "fedcvae") else {}
    return toy_recipe(**{"algorithm": algorithm, "rounds": 2} | classes | changes)


def outcome(folder):
    """Everything that a run leaves behind, without times and bytes on the wire.

    An order names the client's last state. After a preparation of one's own that is an empty one; a run that took the
    preparation over has none, so its orders are some bytes shorter.
    """
    records = [record.to_json() for record in RunFolder(folder).records()]
    files = [json.loads(folder.joinpath(name).read_text()) for name in ("result.json", "ledger.json")]
    return without([*files, *records], {"seconds", "round_seconds", "wire_bytes"})


def without(value, names):
    """The same JSON without the keys of those names."""
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def checkpoint_every_round(monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)


@pytest.fixture
def fits(monkeypatch):
    """Where fits were made."""
    made, fit = [], Eager.fit
    monkeypatch.setattr(Eager, "fit", lambda machine, net, work: made.append(work.where) or fit(machine, net, work))
    return made


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
@pytest.mark.parametrize("pair", PAIRS)
def test_it_ends_as_if_it_had_prepared_itself(pair, engine, tmp_path, fits):
    first, second = (recipe(algorithm, ema=0.5) for algorithm in PAIRS[pair])
    run(first, tmp_path / "first", engine=engine)
    run(second, tmp_path / "alone", engine=engine)
    before = len(fits)
    run(second, tmp_path / "warm", engine=engine, warm=tmp_path / "first")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "alone")
    assert 2 * len(fits[before:]) < 2 * before and not any("warm" in where for where in fits[before:])
    spent = [RunFolder(tmp_path / name).records()[0].seconds for name in ("first", "warm")]
    assert spent[0] == spent[1], "the time of the preparation is the time that it took"
    assert RunFolder(tmp_path / "warm").read_result().seconds > spent[0].total
    # and the next run can take over from this one
    run(second, tmp_path / "next", engine=engine, warm=tmp_path / "warm")
    assert outcome(tmp_path / "next") == outcome(tmp_path / "alone")


class Stopped(Exception):
    """The process ends."""


def stopped_after(monkeypatch, number: int):
    """Make a run end after that many of its own checkpoints."""
    left, save = [number], RunFolder.save_checkpoint

    def counted(folder, *what):
        save(folder, *what)
        left[0] -= 1
        if not left[0]:
            raise Stopped

    monkeypatch.setattr(RunFolder, "save_checkpoint", counted)


def begun(algorithm, folder, number: int, **options) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stopped_after(patch, number)
        run(recipe(algorithm), folder, **options)


# three clients in one group: a round of warm-up, one of synthesis, two federated ones
def test_an_unfinished_run_is_enough_once_it_has_prepared(tmp_path):
    run(recipe(FEDDDPM), tmp_path / "alone")
    begun(FEDDDPM, tmp_path / "early", 1)
    with pytest.raises(RunError, match="has not finished a preparation, so there is nothing to take over"):
        run(recipe(FEDDDPM), tmp_path / "warm", warm=tmp_path / "early")
    assert not (tmp_path / "warm").exists()
    begun(FEDDDPM, tmp_path / "late", 3)
    run(recipe(FEDDDPM), tmp_path / "warm", warm=tmp_path / "late")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "alone")


@pytest.mark.parametrize("number", [1, 2])
def test_it_resumes(number, tmp_path, fits):
    run(recipe(FEDDDPM), tmp_path / "first")
    begun(FEDDDPM, tmp_path / "warm", number, warm=tmp_path / "first")
    resume(tmp_path / "warm")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "first")


def test_a_packed_run_carries_its_preparation(tmp_path):
    begun(FEDDDPM, tmp_path / "first", 3)
    pack(tmp_path / "first", tmp_path / "packed", 10_000)
    unpack(tmp_path / "packed", tmp_path / "there")
    run(recipe(FEDDDPM), tmp_path / "warm", warm=tmp_path / "there")
    resume(tmp_path / "first")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "first")


def test_a_damaged_preparation_is_refused(tmp_path):
    run(recipe(FEDDDPM), tmp_path / "first")
    kept = RunFolder(tmp_path / "first").prepared
    blob = bytearray(kept.read_bytes())
    blob[-1] ^= 1
    kept.write_bytes(blob)
    with pytest.raises(RunError, match="prepared.safetensors"):
        run(recipe(FEDDDPM), tmp_path / "warm", warm=tmp_path / "first")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, r"seed=0, not 1; set it so"),
        ({"clients": 2}, r"clients=3, not 2"),
        ({"algorithm": dataclasses.replace(FEDDDPM, share=0.5)}, r"algorithm\.share=0\.1, not 0\.5"),
        ({"algorithm": dataclasses.replace(FEDDDPM, group=1)}, r"algorithm\.group=2, not 1"),
        (
            {"algorithm": dataclasses.replace(FEDDIFF, share=0.1), "model": ToyLabelled(dropout=0.0)},
            r"algorithm\.generators=nothing, not \[toy_labelled",
        ),
    ],
)
def test_another_preparation_is_refused(changes, said, tmp_path):
    begun(FEDDDPM, tmp_path / "first", 3)
    with pytest.raises(RunError, match=said):
        run(recipe(**{"algorithm": FEDDDPM} | changes), tmp_path / "warm", warm=tmp_path / "first")


def test_changed_data_are_refused(tmp_path):
    begun(FEDDDPM, tmp_path / "first", 3)
    manifest = tmp_path / "first" / "manifest.json"
    saved = json.loads(manifest.read_text())
    saved["data_sha256"]["train"] = "0" * 64
    manifest.write_text(json.dumps(saved))
    with pytest.raises(RunError, match="prepared on other data"):
        run(recipe(FEDDDPM), tmp_path / "warm", warm=tmp_path / "first")


def test_where_there_is_nothing_to_take_over(tmp_path):
    begun(FEDDDPM, tmp_path / "first", 3)
    with pytest.raises(RecipeError, match="fedavg has no preparation; leave --warm out"):
        run(recipe(FedAvg(local=ADAM)), tmp_path / "warm", warm=tmp_path / "first")
    with pytest.raises(RecipeError, match="charged for its own preparation"):
        run(recipe(FEDDDPM, budget=Budget(epsilon=1.0, delta=1e-3)), tmp_path / "warm", warm=tmp_path / "first")
