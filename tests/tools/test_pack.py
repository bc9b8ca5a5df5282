"""A run that is packed, moved, unpacked and resumed ends in the same weights."""

import hashlib
import json
import shutil

import pytest
from toy import ADAM, SYNTHESIS, ToyStateful, toy_recipe

from effuse.algorithms.fedddpm import FedDDPM
from effuse.core.errors import RunError
from effuse.core.recipe import Evaluate
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ancestral
from effuse.runs import rounds
from effuse.runs.driver import resume, run
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.tools.pack import pack, unpack

KEPT = Adam(lr=1e-2, batch=8, epochs=1, state="kept")


class Killed(Exception):
    """Interrupts a run, as when its machine is given back."""


class Reaper(Observer):
    """Interrupts a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def phase(self, words: str) -> None:
        if words == "training":  # a checkpoint has just been written
            self.left -= 1
            if not self.left:
                raise Killed


@pytest.fixture(autouse=True)
def a_checkpoint_after_every_round(monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)


STATEFUL = toy_recipe(algorithm=ToyStateful(local=KEPT, cohort=2), rounds=4, ema=0.5)
# its server keeps an optimiser; a round of warm-up and one of synthesis come before the four federated ones
TRAINING_SERVER = toy_recipe(algorithm=FedDDPM(**SYNTHESIS | {"group": 3}, local=KEPT, central=KEPT), rounds=4)


def half(path, after=2, recipe=STATEFUL):
    """A run that is interrupted after some of its rounds."""
    with pytest.raises(Killed):
        run(recipe, path, observer=Reaper(after))
    assert RunFolder(path).load_checkpoint().t == after and not RunFolder(path).result.exists()


@pytest.mark.parametrize(
    ("recipe", "after", "part"), [(STATEFUL, 2, 1000), (STATEFUL, 2, 10**9), (TRAINING_SERVER, 4, 10_000)]
)
def test_a_packed_run_goes_on_elsewhere(recipe, after, part, tmp_path):
    """Parts of 1,000 bytes split files; a part of 10^9 bytes holds them all."""
    half(tmp_path / "here", after, recipe)
    written = pack(tmp_path / "here", tmp_path / "parts", part)
    sizes = [path.stat().st_size for path in written if path.suffix == ".bin"]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == sorted(path.name for path in written)
    assert all(size == part for size in sizes[:-1]) and 0 < sizes[-1] <= part
    carried = shutil.move(tmp_path / "parts", tmp_path / "carried")
    shutil.rmtree(tmp_path / "here")
    there = unpack(carried, tmp_path / "there")
    whole = run(recipe, tmp_path / "whole")
    assert resume(there).weights_sha256 == whole.weights_sha256
    assert len(RunFolder(there).records()) == len(RunFolder(tmp_path / "whole").records()) > after


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    """A checkpoint that a failed unpack left there must not be mixed with another's."""
    half(tmp_path / "run")
    written = pack(tmp_path / "run", tmp_path / "parts", 5000)
    last = written[-1].read_bytes()
    written[-1].unlink()
    with pytest.raises(RunError, match="cannot be read"):
        unpack(tmp_path / "parts", tmp_path / "there")
    written[-1].write_bytes(last)
    with pytest.raises(RunError, match="is not an empty folder; delete it, or choose another --out"):
        unpack(tmp_path / "parts", tmp_path / "there")


def test_parts_with_more_than_the_files_are_refused(tmp_path):
    half(tmp_path / "run")
    written = pack(tmp_path / "run", tmp_path / "parts", 10**9)
    blob = written[1].read_bytes() + b"more"
    written[1].write_bytes(blob)
    index = json.loads(written[0].read_text())
    index["parts"][0] |= {"size": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    written[0].write_text(json.dumps(index))
    with pytest.raises(RunError, match="the parts hold more than the files"):
        unpack(tmp_path / "parts", tmp_path / "there")


def test_a_finished_run_is_packed_with_its_model(tmp_path):
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM), rounds=1, evaluate=Evaluate(grid=2), sampler=Ancestral(batch=2))
    result = run(recipe, tmp_path / "run")
    pack(tmp_path / "run", tmp_path / "parts", 5000)
    again = unpack(tmp_path / "parts", tmp_path / "again")
    assert resume(again).weights_sha256 == result.weights_sha256
    files = [path for path in (tmp_path / "run" / "model").rglob("*") if path.is_file()]
    for model in files:
        assert (again / model.relative_to(tmp_path / "run")).read_bytes() == model.read_bytes()
    assert files and not (again / "samples").exists(), "only what is needed to go on"


def test_what_was_damaged_on_the_way_is_refused_and_leaves_no_run(tmp_path):
    """A changed bit, a missing part, a part that is too long: the error names the part, and nothing can be resumed."""
    half(tmp_path / "run")
    written = pack(tmp_path / "run", tmp_path / "parts", 5000)
    part = written[-2]
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(RunError, match=rf"{part.name} is not the part that was packed; fetch it again"):
        unpack(tmp_path / "parts", tmp_path / "a")
    part.unlink()
    with pytest.raises(RunError, match=rf"{part.name} cannot be read"):
        unpack(tmp_path / "parts", tmp_path / "b")
    part.write_bytes(whole)
    index = json.loads(written[0].read_text())
    index["files"][-1]["sha256"] = "0" * 64
    written[0].write_text(json.dumps(index))
    with pytest.raises(RunError, match="is damaged; pack the run again"):
        unpack(tmp_path / "parts", tmp_path / "c")
    assert not any((tmp_path / name / "manifest.json").exists() for name in "abc")


@pytest.mark.parametrize(
    "name", ["../run/secret", "/etc/passwd", "clients/0/../../x.state", "flower/superlink/secret", "model/../../x", "x.py"]
)
def test_a_pack_writes_nothing_but_a_runs_own_files(name, tmp_path):
    half(tmp_path / "run")
    written = pack(tmp_path / "run", tmp_path / "parts", 10**9)
    index = json.loads(written[0].read_text())
    index["files"][1]["name"] = name
    written[0].write_text(json.dumps(index))
    with pytest.raises(RunError, match="which is not a file of a packed run"):
        unpack(tmp_path / "parts", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_what_cannot_be_packed_or_unpacked_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="manifest.json"):
        pack(tmp_path / "none", tmp_path / "parts", 10)
    half(tmp_path / "run")
    with pytest.raises(RunError, match="a part of 0 bytes holds nothing"):
        pack(tmp_path / "run", tmp_path / "parts", 0)
    pack(tmp_path / "run", tmp_path / "parts", 10**6)
    with pytest.raises(RunError, match="is not an empty folder"):
        pack(tmp_path / "run", tmp_path / "parts", 10**6)
    with pytest.raises(RunError, match="already holds a run"):
        unpack(tmp_path / "parts", tmp_path / "run")
    with pytest.raises(RunError, match="give the folder that `effuse pack` wrote"):
        unpack(tmp_path / "run", tmp_path / "there")
    (tmp_path / "parts" / "pack.json").write_text('{"format": 2, "files": [], "parts": []}')
    with pytest.raises(RunError, match="has format 2, and this effuse reads format 1"):
        unpack(tmp_path / "parts", tmp_path / "there")


def test_a_private_run_stays_private(tmp_path):
    """A server's run holds models trained on data of the sites; the index says so where modes are lost on the way."""
    half(tmp_path / "run")
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "parts").mkdir(mode=0o755)
    written = pack(tmp_path / "run", tmp_path / "parts", 10**6)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "parts", *written])
    (tmp_path / "parts").chmod(0o755)
    assert unpack(tmp_path / "parts", tmp_path / "there").stat().st_mode & 0o077 == 0
