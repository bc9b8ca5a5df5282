"""The rule that chooses `feddiffuse.tuned`, on made-up scores."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.recipes import find_table
from effuse.recipes.feddiffuse import TRIED

ROOT = Path(__file__).parents[2]
found = importlib.util.spec_from_file_location("choose", ROOT / "tools" / "choose.py")
choose = importlib.util.module_from_spec(found)
found.loader.exec_module(choose)
Score = choose.Score

BASE = {"start-1": Score(50.0, 0.030), "start-2": Score(53.0, 0.031), "plain-1": Score(90.0, 0.05)}


def taken(**tried):
    return choose.changes(BASE | {f"{name.replace('_', '-')}-1": Score(*score) for name, score in tried.items()})


def test_noise_is_the_difference_of_two_seeds_or_a_twenty_fifth():
    """53 - 50 = 3, more than 0.04 * 50 = 2; of 50 and 50.5 it is 2."""
    assert choose.noise_of(BASE) == 3.0
    assert choose.noise_of(BASE | {"start-2": Score(50.5, 0.03)}) == 2.0


def test_a_change_must_lower_fid_by_more_than_the_noise_and_kid_at_all():
    """Noise 3: 46.9 is taken, 47.0 is not; 40 with a higher KID is not."""
    assert taken(ema=(46.9, 0.0299)) == ["ema"]
    assert taken(ema=(47.0, 0.01)) == [] and taken(ema=(40.0, 0.0301)) == [] and taken(ema=(60.0, 0.01)) == []


def test_of_one_thing_the_best_value_is_taken():
    assert taken(ema=(40.0, 0.02), server_ema=(39.0, 0.02), v=(45.0, 0.02)) == ["server-ema", "v"]
    assert taken(v=(41.0, 0.02), v_cosine=(40.0, 0.02), huber=(30.0, 0.02), min_snr=(31.0, 0.02)) == ["v-cosine", "huber"]
    rates = {"rate-3e-4": (44.0, 0.02), "rate-2e-3": (43.0, 0.02), "without-decay": (42.0, 0.02)}
    assert taken(**rates) == ["without-decay"]


def test_every_candidate_of_the_recipe_is_a_value_of_something():
    assert sorted(TRIED) == sorted(value for values in choose.THINGS.values() for value in values)
    names = [cell.name for cell in find_table("feddiffuse.tuning")[1].cells]
    assert names == ["start-1", "start-2", "plain-1", *(f"{change}-1" for change in TRIED)]


def row(name, ours, metric="fid", state="done", **also):
    return {"name": name, "state": state, "metric": metric, "ours": ours, "also": also}


TUNING = [
    row("start-1", 50.0, kid=0.03), row("start-2", 51.0, kid=0.03), row("without-kept-1", None, state="failed"),
    row("server-ema-1", 45.0, metric="fid_ema", kid=0.5, kid_ema=0.02), row("ema-1", 49.0, kid=0.02),
]  # fmt: skip
FINALISTS = [row("start", 20.0, kid=0.01), row("chosen-clip", 19.0, kid=0.01), row("chosen-ddim-250", 18.5, kid=0.02)]


def asked(path, *options):
    command = [sys.executable, str(ROOT / "tools" / "choose.py"), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("cells", "choice"), [(TUNING, ["decay", "rate-1e-3", "kept", "server-ema", "clip"]), (FINALISTS, "chosen-ddim-250")]
)
def test_it_reads_a_table(tmp_path, cells, choice):
    """An average at the server is judged by its own metrics; what diverged is not taken."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"cells": cells}))
    done = asked(path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == choice
    assert ("chosen: " if isinstance(choice, list) else "winner: ") in asked(path).stdout


def test_half_a_table_is_refused_in_a_sentence(tmp_path):
    """No file, an empty table, another's, one with holes, and one whose start diverged."""
    path = tmp_path / "table.json"
    for cells, told in (
        (None, "is not a table.json of feddiffuse.tuning"),
        ("{}", "is not a table.json of feddiffuse.tuning"),
        ([], "nothing to judge by"),
        ([*TUNING, row("v-1", None, state="missing")], "1 missing (v-1)"),
        ([*TUNING[:1], row("start-2", None, state="failed")], "the start itself has no number"),
    ):
        if cells is not None:
            path.write_text(cells if isinstance(cells, str) else json.dumps({"cells": cells}))
        done = asked(path)
        assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr
