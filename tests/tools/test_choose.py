"""The rule that chooses `feddiffuse.tuned`, on made-up scores."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.recipes.feddiffuse import CHANGES, FROM_PLAIN

ROOT = Path(__file__).parents[2]
found = importlib.util.spec_from_file_location("choose", ROOT / "tools" / "choose.py")
choose = importlib.util.module_from_spec(found)
found.loader.exec_module(choose)
NAMES, THINGS, Score, better, from_plain = choose.NAMES, choose.THINGS, choose.Score, choose.better, choose.from_plain

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
    assert choose.from_tuned({(k, 1): Score(v, 0.01) for k, v in found.items()}, NOISE) == (["kept"], ["v"])


def test_every_candidate_of_the_recipe_is_a_value_of_something():
    tried = {"-".join(names) for names in FROM_PLAIN if names}
    assert tried == {value for values in THINGS.values() for value in values}
    assert all(name in CHANGES for value in tried for name in NAMES.get(value, (value,)))


def row(base, change, ours, seed=1, metric="fid", state="done", **also):
    labels = {"base": base, "change": change, "seed": seed}
    return {
        "name": f"{base}-{change}-{seed}",
        "labels": labels,
        "state": state,
        "metric": metric,
        "ours": ours,
        "also": also,
    }


TABLE = [
    row("plain", "none", 50.0, kid=0.03), row("plain", "none", 51.0, seed=2, kid=0.03),
    row("plain", "server-ema", 49.5, metric="fid_ema", kid=0.5, kid_ema=0.02), row("plain", "kept", None, state="failed"),
    row("tuned", "none", 30.0, kid=0.02), row("tuned", "with-v", 20.0, kid=0.02),
]  # fmt: skip


def asked(path, *options):
    command = [sys.executable, str(ROOT / "tools" / "choose.py"), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("base", "choice"), [("plain", ["server-ema"]), ("tuned", {"goes": [], "comes": ["v"]})])
def test_it_reads_a_table(tmp_path, base, choice):
    """Noise 1 and 0: of the average at the server, KID decides, 0.02 by its own metric; what diverged is not taken."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"cells": TABLE}))
    done = asked(path, "--base", base, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == choice


def test_half_a_table_is_refused_in_a_sentence(tmp_path):
    """The second half is not asked for when the first is judged; no file, an empty table and another's are told, too."""
    path = tmp_path / "table.json"
    for text, told in (
        (None, "is not a table.json of feddiffuse.tuning"),
        ("{}", "is not a table.json of feddiffuse.tuning"),
        ('{"cells": []}', "has no cells"),
        (json.dumps({"cells": [*TABLE, row("plain", "clip", None, state="missing")]}), "1 missing (plain-clip-1)"),
    ):
        if text is not None:
            path.write_text(text)
        done = asked(path)
        assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr
    path.write_text(json.dumps({"cells": [*TABLE, row("tuned", "with-norm-1", None, state="missing")]}))
    assert asked(path).returncode == 0 and "tuned-with-norm-1-1" in asked(path, "--base", "tuned").stderr
