"""Runs of other versions: finished ones open; unreadable ones are refused in a sentence that names their version.

`tests/saved/0.1.0` was written by effuse 0.1.0 (06baa4f): the digits, two clients, a round of one step, and a network of
4,101 parameters.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from toy import ADAM, ToyStateful, toy_recipe

import effuse
from effuse.core.errors import FederationError, RunError, WireError
from effuse.core.federation import SETUP_T
from effuse.core.rng import stream
from effuse.core.wire import decode, encode, marks_in
from effuse.core.workbench import SERVER
from effuse.runs import driver, folder
from effuse.runs.evaluation import evaluate_run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tools.export import export_auxiliary
from effuse.tools.prune import prune_run
from effuse.transport import state
from effuse.transport.state import Snapshots, pack_state

SAVED = Path(__file__).parents[1] / "saved" / "0.1.0"
OURS = re.escape(effuse.__version__)
REFUSED = (
    rf"was saved by effuse 0\.1\.0 or older, and this is effuse {OURS}, which cannot read it; "
    "use that version for this run, or start a new one"
)


@pytest.fixture
def old(tmp_path):
    """A copy of the runs of 0.1.0."""
    return shutil.copytree(SAVED, tmp_path / "old")


def begun(run: Path) -> Path:
    """The run as it was before its end."""
    (run / "result.json").unlink()
    return run


@pytest.mark.parametrize("name", ["fedavg", "local_only"])
def test_a_finished_run_of_an_older_version_opens(name, old):
    opened = load(old / name)
    assert opened.sample(3, seed=1).pixels.shape == (3, 1, 8, 8)
    result = driver.resume(old / name)
    assert result.rounds == 1 and result.to_json() == json.loads((old / name / "result.json").read_text())
    if name == "fedavg":
        assert opened.model.params.digest() == result.weights_sha256


def test_a_finished_run_of_an_older_version_is_measured_again(old):
    assert evaluate_run(old / "fedavg", [], device="cpu") == RunFolder(old / "fedavg").read_result().metrics


def test_a_finished_run_of_an_older_version_is_pruned_and_repeated(old, tmp_path):
    """A ratio of 0 removes nothing. The manifest repeats the training, but for the rounding of another machine."""
    pruned = prune_run(old / "fedavg", 0.0, tmp_path / "small", settings=["evaluate.metrics=[]"], device="cpu")
    assert pruned["after"]["parameters"] == pruned["before"]["parameters"]
    recipe = effuse.recipe(str(old / "fedavg" / "manifest.json"))
    driver.run(recipe, tmp_path / "again")
    before = recipe.model.initial(stream(recipe.seed, SETUP_T, "model", 0, SERVER, "initial")).params
    then, again = (load(run).model.params for run in (old / "fedavg", tmp_path / "again"))
    # the first step of Adam moves a weight by lr, whatever its gradient, so rounding may turn a step round
    assert (again - then).norm() < 0.1 * (then - before).norm()


def test_an_unfinished_run_of_an_older_version_is_refused(old, monkeypatch):
    """Before data is loaded; its messages had other names."""
    monkeypatch.setattr(driver, "_loaded", lambda recipe: pytest.fail("loaded data"))
    before = {p: p.read_bytes() for p in begun(old / "fedavg").rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(RunError, match=rf"checkpoints/000001.safetensors {REFUSED}"):
        driver.resume(old / "fedavg")
    assert {p: p.read_bytes() for p in (old / "fedavg").rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_personal_models_of_an_older_version_are_refused(old):
    with pytest.raises(RunError, match=REFUSED):
        load(old / "local_only", client=0)
    with pytest.raises(RunError, match=REFUSED):
        evaluate_run(old / "local_only", [], device="cpu")
    with pytest.raises(RunError, match=REFUSED):
        export_auxiliary(old / "fedavg", "grid", old / "x.png")


def test_a_clients_state_of_an_older_version_is_refused(old):
    with pytest.raises(FederationError, match=rf"0_0.state {REFUSED}"):
        Snapshots(old / "local_only" / "clients" / "0").read("0_0")


def test_the_sentence_names_the_version_that_a_header_tells(tmp_path, monkeypatch):
    """A later version, with another format, saved a run and its clients' states."""
    with monkeypatch.context() as later:
        for module in (state, folder):
            later.setattr(module, "MARKS", {"format": "9", "version": "0.7.1"})
        later.setattr(state, "FORMAT", "9")
        driver.run(toy_recipe(algorithm=ToyStateful(local=ADAM)), tmp_path / "run")
        assert RunFolder(tmp_path / "run").load_checkpoint() is not None, "it reads its own"
    with pytest.raises(RunError, match=rf"was saved by effuse 0\.7\.1, and this is effuse {OURS}"):
        driver.resume(begun(tmp_path / "run"))
    (file, *_) = sorted((tmp_path / "run" / "clients" / "0").glob("*.state"))
    with pytest.raises(FederationError, match=r"was saved by effuse 0\.7\.1"):
        Snapshots(file.parent).read(file.stem)


def test_marks_are_read_without_what_they_mark():
    """The header precedes the tensors, so the start of a large file is enough; marks do not change the value."""
    blob = encode(ADAM.lr, float, marks={"format": "9"})
    size = 8 + int.from_bytes(blob[:8], "little")
    assert marks_in(blob[:size]) == marks_in(blob) == {"format": "9"} and decode(blob, float) == ADAM.lr
    assert marks_in(encode(1.0, float)) == {}
    marks = {"format": state.FORMAT, "version": effuse.__version__} | state.SEALS
    assert marks_in(state.unframe(pack_state({"visits": 1}))[0]) == marks
    for damaged in (b"", blob[:20], b"\x02\0\0\0\0\0\0\0[]"):
        with pytest.raises(WireError, match="cannot be read"):
            marks_in(damaged)


def test_a_damaged_header_is_reported(tmp_path):
    driver.run(toy_recipe(), tmp_path / "run")
    for file in (begun(tmp_path / "run") / "checkpoints").iterdir():
        file.write_bytes(b"\xff" * 100)
    with pytest.raises(RunError, match="cannot be read .* restore it from a backup, or start a new run"):
        driver.resume(tmp_path / "run")
