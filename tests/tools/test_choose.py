"""The rule that chooses `feddiffuse.tuned`, on made-up scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.recipes.feddiffuse import CHANGES, FROM_PLAIN

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from choose import NAMES, THINGS, Score, better, from_plain, from_tuned, scores  # noqa: E402

NOISE = Score(2.0, 0.001)
PLAIN = {("none", 1): Score(50.0, 0.030), ("none", 2): Score(52.0, 0.031)}


def chosen(**found):
    return from_plain(PLAIN | {(name.replace("_", "-"), 1): Score(*score) for name, score in found.items()})


def test_fid_decides_and_kid_where_it_does_not():
    """Noise 2 and 0.001: 47 is better than 50, 48.5 is not by FID but by its KID of 0.028, not by one of 0.0295."""
    assert (
        better(Score(47.0, 0.5), Score(50.0, 0.03), NOISE) == 1 and better(Score(53.0, 0.0), Score(50.0, 0.03), NOISE) == -1
    )
    assert [better(Score(48.5, k), Score(50.0, 0.03), NOISE) for k in (0.028, 0.0295, 0.032)] == [1, 0, -1]


def test_of_one_thing_the_best_value_is_taken():
    assert chosen(kept=(47.9, 0.03), min_snr=(48.1, 0.03)) == ["kept"]
    assert chosen(ema=(40.0, 0.02), server_ema=(45.0, 0.02)) == ["ema"]
    assert chosen(clip=(40.0, 0.02), ddim_250=(39.0, 0.02)) == ["ddim-250"]
    assert chosen(clip=(40.0, 0.02), steps_1000=(45.0, 0.02), dpm_50=(44.0, 0.02)) == ["clip", "steps-1000"]


def test_a_decay_is_judged_against_its_rate():
    """30 against 31 is within the noise: the rate alone, which is simpler; 28 is not."""
    rates = {"rate-3e-4": (45.0, 0.02), "rate-1e-3": (31.0, 0.02)}
    assert chosen(**rates, **{"rate-1e-3-decay": (30.0, 0.02)}) == ["rate-1e-3"]
    assert chosen(**rates, **{"rate-1e-3-decay": (28.0, 0.02)}) == ["rate-1e-3", "decay"]


def test_what_goes_and_what_comes_in():
    found = {"none": 20.0, "without-kept": 17.0, "without-ema": 30.0, "with-batch-64": 19.0, "with-v": 15.0}
    assert from_tuned({(k, 1): Score(v, 0.01) for k, v in found.items()}, NOISE) == (["kept"], ["v"])


def test_every_candidate_of_the_recipe_is_a_value_of_something():
    tried = {"-".join(names) for names in FROM_PLAIN if names}
    assert tried == {value for values in THINGS.values() for value in values}
    assert all(name in CHANGES for value in tried for name in NAMES.get(value, (value,)))


@pytest.mark.parametrize("base", ["plain", "tuned"])
def test_it_reads_a_table(tmp_path, base):
    """Cells that are missing are left out; a moving average at the server is judged by its own metrics."""
    cell = {"labels": {"base": "plain", "change": "none", "seed": 1}, "metric": "fid", "ours": 50.0, "also": {"kid": 0.03}}
    other = cell | {"labels": cell["labels"] | {"seed": 2}, "ours": 51.0}
    averaged = cell | {"labels": cell["labels"] | {"change": "server-ema"}, "metric": "fid_ema", "ours": 40.0,
                       "also": {"kid": 0.5, "kid_ema": 0.02}}  # fmt: skip
    missing = cell | {"labels": cell["labels"] | {"change": "kept"}, "ours": None, "also": {}}
    tuned = [
        row | {"labels": row["labels"] | {"base": "tuned"}}
        for row in (cell, averaged | {"labels": {**cell["labels"], "change": "with-v"}})
    ]
    table = {"cells": [cell, other, averaged, missing, *tuned]}
    assert scores(table, "plain")["server-ema", 1] == Score(40.0, 0.02) and ("kept", 1) not in scores(table, "plain")
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "choose.py"), str(path), "--base", base, "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == (["server-ema"] if base == "plain" else {"goes": [], "comes": ["v"]})
