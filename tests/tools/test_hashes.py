"""Comparing two checkouts: equal runs, and runs that differ in one bit of a compared part."""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from toy import ADAM, Diary, ToyStateful, toy_recipe

import effuse
from effuse.core.params import Params
from effuse.transport.state import pack_state, unpack_state

ROOT = Path(__file__).parent.parent.parent
found = importlib.util.spec_from_file_location("hashes", ROOT / "tools" / "hashes.py")
hashes = importlib.util.module_from_spec(found)
found.loader.exec_module(hashes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose client state holds a message and a model's parameters."""
    folder = tmp_path_factory.mktemp("hashes") / "run"
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM)).changed(list(hashes.TOY))
    effuse.run(recipe, out=folder)
    np.savez(folder / "drawn.npz", model=effuse.load(folder).sample(2, seed=7).pixels.numpy())
    return folder


@pytest.fixture
def pair(finished, tmp_path):
    """The same run twice."""
    for name in ("old", "new"):
        shutil.copytree(finished, tmp_path / name)
    return tmp_path / "old", tmp_path / "new"


def flip(path: Path, at: int) -> None:
    """Change the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def parts(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_a_run_equals_its_copy_in_parts_that_hold_something(pair):
    """ToyUnet has three layers with weight and bias: six tensors, which each of the three clients also stores."""
    assert hashes.differences(*pair) == []
    contents = hashes.contents(pair[0])
    assert len(contents["weights"]) == 6 and len(contents["grids"]) == 1 and len(contents["drawn"]) == 1
    assert sorted(contents["clients"]) == ["0", "1", "2"] and len(contents["losses"]) == 4
    tensors = [value for value in contents["clients"]["0"] if value.startswith("F32")]
    assert len(tensors) == 6
    assert contents["result"]["/metrics/fid_pixels/value"] > 0 and contents["ledger"]["/training/bytes/total"] > 0


def test_one_bit_of_a_weight(pair):
    """The last byte of a safetensors file belongs to its last tensor."""
    weights = next((pair[1] / "model").glob("*.safetensors"))
    flip(weights, -1)
    assert parts(hashes.differences(*pair)) == ["weights"]


def test_a_buffer_that_the_digest_of_weights_leaves_out(pair):
    """An additional tensor in the file: weights_sha256 ignores it, the comparison does not."""
    weights = next((pair[1] / "model").glob("*.safetensors"))
    save_file(load_file(weights) | {"count": torch.tensor(3)}, weights)
    (line,) = hashes.differences(*pair)
    assert line.startswith("weights: ") and "count only in NEW" in line


def changed_state(run: Path, client: int, **values) -> None:
    """Change values of a client's state."""
    file = hashes.newest(run / "clients" / str(client), ".state")[0]
    state = unpack_state(file.read_bytes())
    file.write_bytes(pack_state(state | {key: change(state[key]) for key, change in values.items()}))


def test_one_bit_of_a_clients_state(pair):
    """The lowest bit of a number in client 1's six tensors: one value is removed, another is added."""

    def flipped(params: Params) -> Params:
        first, *rest = params.tensors
        changed = first.clone()
        changed.view(torch.int32).flatten()[0] ^= 1
        return Params(dict(zip(params, [changed, *rest])))

    changed_state(pair[1], 1, past=flipped)
    assert hashes.differences(*pair) == ["clients: 1: 1 values only in OLD, 1 only in NEW"]


def test_a_plain_value_of_a_clients_state(pair):
    """A client visited four times: 4 -> 5."""
    changed_state(pair[1], 0, diary=lambda diary: Diary(diary.visits + 1, diary.seen))
    assert hashes.differences(*pair) == ["clients: 0: 1 values only in OLD, 1 only in NEW"]


def test_names_of_messages_and_keys_may_change(pair):
    """The same state under other names of the same length, so that the file stays valid."""
    for file in pair[1].glob("clients/*/*.state"):
        blob = file.read_bytes()
        assert blob.count(b"toy.Diary") == 2 and blob.count(b"visits") == 1
        for old, new in ((b"toy.Diary", b"boy.Story"), (b"visits", b"amount"), (b"diary", b"notes"), (b"seen", b"done")):
            blob = blob.replace(old, new)
        file.write_bytes(blob)
    assert hashes.differences(*pair) == []


def test_a_client_that_has_lost_its_state(pair):
    shutil.rmtree(pair[1] / "clients" / "2")
    assert hashes.differences(*pair) == ["clients: 2 only in OLD"]


def test_only_the_newest_state_counts(pair):
    """The number of older snapshots depends on the timing of checkpoints; round 10 is later than round 9."""
    clients = pair[1] / "clients" / "0"
    (clients / "0_0.state").write_bytes(b"older")
    assert hashes.differences(*pair) == []
    assert [path.name for path in hashes.newest(clients, ".state")] == ["3_0.state"]
    (clients / "10_0.state").write_bytes((clients / "3_0.state").read_bytes())
    (clients / "9_0.state").write_bytes(b"older")
    assert hashes.differences(*pair) == []


def test_one_bit_of_the_servers_checkpoint(pair):
    flip(hashes.newest(pair[1] / "checkpoints", ".safetensors")[0], -1)
    assert parts(hashes.differences(*pair)) == ["server"]


def test_one_shade_of_one_pixel(pair):
    grid = next(pair[1].rglob("*.png"))
    picture = np.asarray(Image.open(grid)).copy()
    picture.flat[0] ^= 1
    Image.fromarray(picture).save(grid)
    drawn = dict(np.load(pair[1] / "drawn.npz"))
    drawn["model"].flat[0] = np.nextafter(drawn["model"].flat[0], np.float32(9))
    np.savez(pair[1] / "drawn.npz", **drawn)
    assert parts(hashes.differences(*pair)) == ["grids", "drawn"]


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "part"),
    [
        ("ledger.json", '"total": 24', '"total": 25', ["ledger"]),
        ("ledger.json", '"wire_bytes": 0', '"wire_bytes": 7', []),
        ("result.json", '"images": ', '"images": 1', ["result"]),
        ("result.json", '"seconds": ', '"seconds": 1', []),
        ("rounds.jsonl", '"loss": ', '"loss": 1', ["losses"]),
    ],
)
def test_numbers_of_a_run(pair, file, old, new, part):
    """Only times and bytes on the wire are ignored. Three clients in four rounds: 12 messages each way, 24 in all."""
    edited(pair[1] / file, old, new)
    assert parts(hashes.differences(*pair)) == part


def test_nothing_is_not_equal_to_nothing(pair):
    for run in pair:
        shutil.rmtree(run / "model")
    assert hashes.differences(*pair) == ["weights: nothing to compare"]


class Done:
    """A side with finished runs."""

    def __init__(self, folder: Path, ends: dict[str, str]) -> None:
        self.folder, self.ends = folder, ends

    def runs(self):
        return [hashes.Run("algorithm", name) for name in self.ends]

    def place(self, run):
        return self.folder / run.name

    def done(self, run):
        return self.ends[run.name], 1.0


@pytest.fixture
def sides(pair, tmp_path):
    """Runs a, b and c of two sides; b differs in a weight, and c has no data."""
    ends = {"a": hashes.OK, "b": hashes.OK, "c": hashes.NO_DATA}
    for side, run in zip(("OLD", "NEW"), pair):
        for name in ("a", "b"):
            shutil.copytree(run, tmp_path / side / name / "run")
            (tmp_path / side / name / "called.txt").write_text(name)
    flip(next((tmp_path / "NEW" / "b" / "run" / "model").glob("*.safetensors")), -1)
    return [Done(tmp_path / side, dict(ends)) for side in ("OLD", "NEW")]


def compared(sides, only="", other=()):
    return hashes.compared(*sides, argparse.Namespace(only=only, other=list(other), workers=1))


def test_the_table_and_the_exit_code(sides, capsys):
    assert compared(sides) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["algorithm:", "a", "equal"]
    assert lines[1].split()[:4] == ["!", "algorithm:", "b", "differs"] and "weights: " in lines[1]
    assert lines[2].split() == ["algorithm:", "c", "no", "data"]
    assert lines[3] == "1 differs, 1 equal, 1 no data; 1 not as they should be"
    assert compared(sides, only=": a") == 0 and "same source" not in capsys.readouterr().out
    assert compared(sides[:1] * 2) == 0 and "same source" in capsys.readouterr().out


def test_an_expected_difference_must_be_there(sides, capsys):
    assert compared(sides, other=["algorithm: b"]) == 0
    assert "as expected; weights" in capsys.readouterr().out
    assert compared(sides, other=["algorithm: a", "algorithm: b"]) == 1
    assert "expected to differ" in capsys.readouterr().out
    for options in ({"other": ["algorithm: z"]}, {"only": "z"}):
        with pytest.raises(SystemExit, match="no "):
            compared(sides, **options)


def test_what_only_one_side_can_do(sides, capsys):
    """A failure and a run missing in NEW are wrong; a run only in NEW is listed."""
    old, new = sides
    new.ends = {"a": "failed: boom", "c": hashes.OK, "d": hashes.OK}
    assert compared(sides) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NEW: failed: boom" in lines[0] and "only in OLD" in lines[1] and "OLD: no data" in lines[2]
    assert "only in NEW" in lines[3] and lines[4].endswith("3 not as they should be")


def test_a_checkout_is_run_once_per_source(tmp_path):
    """A side does a real run, reuses it, and repeats it after a change of the source."""
    run = hashes.Run("algorithm", "fedprox")
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "toy.py", checkout / "tests")

    def side():
        return hashes.Side(checkout, tmp_path / "out", sys.executable, 1, 120)

    first = side()
    assert run in first.runs() and hashes.Run("recipe", "fedphd.demo") in first.runs()
    how, seconds = first.done(run)
    assert how == hashes.OK and side().done(run) == (how, seconds)
    mean = checkout / "src" / "effuse" / "core" / "params.py"
    edited(mean, "weight / self.total", "1.000001 * weight / self.total")
    changed = side()
    assert changed.folder != first.folder and changed.done(run)[0] == hashes.OK
    assert "weights" in parts(hashes.differences(first.place(run) / "run", changed.place(run) / "run"))
    mean.write_text("raise ValueError('broken')")
    assert side().done(run)[0] == "failed: ValueError: broken"
