"""Curves of the runs in a folder: sums up to every round, and the metrics of evaluated rounds."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hand import one_weight_recipe
from toy import toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.recipe import Evaluate
from effuse.core.solvers import SGD
from effuse.diffusion.samplers import Ddim
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.runs.driver import run

TOOL = Path(__file__).parent.parent.parent / "tools" / "curves.py"
found = importlib.util.spec_from_file_location("curves", TOOL)
curves = importlib.util.module_from_spec(found)
found.loader.exec_module(curves)


def line(federated: int, phase: str = "federate", **rest) -> dict:
    """A round of ten images, half a second and seven bytes; three seconds with evaluation and checkpoint."""
    record = {"t": 0, "phase": phase, "federated": federated, "loss": 0.5, "images": 10}
    return (
        record | {"seconds": {"round": 0.5, "total": 3.0}, "traffic": traffic(bytes={"up": 3, "down": 4, "total": 7})} | rest
    )


def traffic(**passed) -> dict:
    """Traffic with the given sums, and otherwise zeros."""
    nothing = dict.fromkeys(("parameters", "bytes", "wire_bytes", "messages"), {"up": 0, "down": 0, "total": 0})
    return nothing | {"links": {}} | passed


def written(folder: Path, *lines: dict, **result) -> None:
    folder.mkdir(parents=True)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if result:
        (folder / "result.json").write_text(json.dumps(result))


def test_sums_and_metrics(tmp_path):
    """Three rounds: 10, 20, 30 images; 0.5, 1, 1.5 seconds, evaluation not among them; 7, 14, 21 bytes."""
    written(tmp_path / "b", line(0, "warm-up", loss=None), line(1), line(2, metrics={"fid": 9.0, "mix": 0.1}))
    written(tmp_path / "a", line(1, metrics={"fid": 20.0}))
    (tmp_path / "table.json").write_text("{}")
    with open(tmp_path / "out.csv", "w") as file:
        curves.write(curves.rows_in(tmp_path), file)
    with open(tmp_path / "out.csv") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["cell", "round", "phase", "images", "loss", "seconds", "bytes", "fid", "mix"],
        ["a", "1", "federate", "10", "0.5", "0.5", "7", "20.0", ""],
        ["b", "0", "warm-up", "10", "", "0.5", "7", "", ""],
        ["b", "1", "federate", "20", "0.5", "1.0", "14", "", ""],
        ["b", "2", "federate", "30", "0.5", "1.5", "21", "9.0", "0.1"],
    ]


def test_a_curve_has_two_points_or_more(tmp_path):
    written(tmp_path / "a", line(1, metrics={"fid": 20.0}), line(2))
    written(tmp_path / "b", line(1), line(2, metrics={"fid": 9.0}), line(2, "correction", metrics={"fid": 8.0}))
    assert list(curves.curves(curves.rows_in(tmp_path), "fid")) == [("b", [2, 2], [9.0, 8.0])]


def test_warm_up_is_not_on_a_curve(tmp_path):
    """A warm-up's loss of 3 comes before the two rounds' losses of 2 and 1."""
    written(tmp_path / "a", line(0, "warm-up", loss=3.0), line(1, loss=2.0), line(2, loss=1.0))
    assert list(curves.curves(curves.rows_in(tmp_path), "loss")) == [("a", [1, 2], [2.0, 1.0])]


def test_cells_are_picked_by_a_pattern(tmp_path):
    for name in ("fedavg-shard-0", "fedavg-shard-1", "fedprox-shard-0"):
        written(tmp_path / name, line(1))
    assert [row["cell"] for row in curves.rows_in(tmp_path, "*-shard-0")] == ["fedavg-shard-0", "fedprox-shard-0"]
    asked = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path), "--cells", "*-2"], capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 1 and "no run called *-2 with a finished round" in asked.stderr


def test_a_cell_with_copied_rounds_has_its_own_result(tmp_path):
    """Its rounds have no metrics, so the last one takes those of the result; metrics of a round are not replaced."""
    result = {"weights_sha256": "0", "metrics": {"fid": {"value": 4.0, "protocol": {}}}, "rounds": 2, "traffic": traffic()}
    result |= {"parameters": 1, "images": 20, "seconds": 6.0}
    written(tmp_path / "taken", line(1), line(2), **result)
    written(tmp_path / "own", line(1, metrics={"fid": 5.0}), **result)
    assert [row.get("fid") for row in curves.rows_in(tmp_path)] == [5.0, None, 4.0]


def test_the_curves_of_real_runs(tmp_path):
    """Two clients with two images each: 4, then 8 images; four bytes each way per client: 16, then 32 bytes."""
    step = SGD(lr=0.25, batch=4, epochs=1)
    run(one_weight_recipe(FedAvg(local=step), rounds=2), tmp_path / "runs" / "plain")
    looked = Evaluate(grid=0, every=1, metrics=(FID(n=20, encoder=Pixels(side=2)),))
    measured = run(toy_recipe(rounds=2, evaluate=looked, sampler=Ddim(steps=2)), tmp_path / "runs" / "seen").metrics
    files = [tmp_path / "c.csv", tmp_path / "c.png"]
    command = [sys.executable, str(TOOL), str(tmp_path / "runs"), "--csv", str(files[0]), "--png", str(files[1])]
    subprocess.run([*command, "--metric", "fid_pixels"], check=True, timeout=120)
    with open(files[0]) as file:
        rows = list(csv.DictReader(file))
    assert [(r["cell"], r["round"]) for r in rows] == [("plain", "1"), ("plain", "2"), ("seen", "1"), ("seen", "2")]
    assert [(r["images"], r["bytes"]) for r in rows[:2]] == [("4", "16"), ("8", "32")]
    assert (
        float(rows[3]["fid_pixels"]) == measured["fid_pixels"].value and rows[2]["fid_pixels"] and not rows[1]["fid_pixels"]
    )
    assert files[1].read_bytes().startswith(b"\x89PNG") and files[1].stat().st_size > 5000


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "no run with a finished round"),
        ((line(1, metrics={"mix": 1.0}),), "--metric fid: no run has two values of it; valid: mix, loss"),
    ],
)
def test_missing_data_is_reported(tmp_path, lines, words):
    written(tmp_path / "runs" / "a", *lines)
    command = [sys.executable, str(TOOL), str(tmp_path / "runs"), "--png", str(tmp_path / "c.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1
