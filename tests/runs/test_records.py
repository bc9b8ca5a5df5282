"""result.json and rounds.jsonl as values: reading and writing gives the same bytes, for files of every version."""

import dataclasses
import json
from pathlib import Path

import pytest
from toy import toy_recipe

import effuse
from effuse.core.errors import RunError
from effuse.core.metric import Measurement
from effuse.core.recipe import read_manifest
from effuse.runs.folder import RunFolder
from effuse.runs.records import Result, RoundRecord, Seconds, Sums, Traffic

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NOTHING = Sums(0, 0, 0)
TRAFFIC = Traffic(parameters=NOTHING, bytes=Sums(up=3, down=4, total=7), wire_bytes=NOTHING, messages=NOTHING, links={})
ROUND = RoundRecord(
    t=4, phase="federate", federated=3, loss=None, images=0, evaluations=0, seconds=Seconds(0.5, 1.0), traffic=TRAFFIC
)
KEYS = ["t", "phase", "federated", "loss", "images", "evaluations", "seconds"]


def test_every_committed_result_is_read_and_written_alike():
    files = sorted(RESULTS.rglob("result.json"))
    assert len(files) > 200
    for file in files:
        text = file.read_text()
        assert json.dumps(Result.from_json(json.loads(text), str(file)).to_json(), indent=2) + "\n" == text, file


def test_every_committed_round_is_read_and_written_alike():
    files = sorted(RESULTS.rglob("rounds.jsonl"))
    assert len(files) > 150
    for file in files:
        for line in file.read_text().splitlines():
            assert json.dumps(RoundRecord.from_json(json.loads(line), str(file)).to_json()) == line, file


def test_optional_fields_are_left_out_and_the_order_is_fixed():
    """A loss of None is written, because the field has no default; absent notes, metrics and GPU memory are not."""
    assert [*ROUND.to_json()] == [*KEYS, "traffic"] and ROUND.to_json()["loss"] is None
    full = dataclasses.replace(ROUND, at_a_time=2, gpu_bytes=5, noted={"a": [1]}, metrics={})
    assert [*full.to_json()] == [*KEYS, "at_a_time", "gpu_bytes", "noted", "metrics", "traffic"]
    assert RoundRecord.from_json(full.to_json(), "here") == full
    looked = dataclasses.replace(ROUND, traffic=dataclasses.replace(TRAFFIC, clients={}, evaluation=TRAFFIC))
    assert [*looked.to_json()["traffic"]][-2:] == ["clients", "evaluation"]
    assert RoundRecord.from_json(looked.to_json(), "here").traffic.evaluation == TRAFFIC


def test_a_measurement_keeps_what_it_has():
    """A measurement of one model, and a mean over clients with its spread."""
    one, mean = Measurement(1, {"n": 5}), Measurement(2.0, {}, "few", std=0.5, clients=[1.5, 2.5])
    base = {"weights_sha256": "0", "rounds": 1, "parameters": 1, "images": 1, "seconds": 1}
    result = Result(**base, metrics={"a": one, "b": mean}, traffic=TRAFFIC)
    written = result.to_json()["metrics"]
    assert written["a"] == {"value": 1, "protocol": {"n": 5}}
    assert [*written["b"].items()] == [
        ("value", 2.0),
        ("protocol", {}),
        ("warning", "few"),
        ("std", 0.5),
        ("clients", [1.5, 2.5]),
    ]
    assert Result.from_json(result.to_json(), "here") == result


def test_older_and_newer_files_are_read():
    """The first releases had no evaluations and no figures; fields of later releases are ignored."""
    old = {k: v for k, v in ROUND.to_json().items() if k != "evaluations"}
    assert RoundRecord.from_json(old, "here") == RoundRecord.from_json(old | {"new": 1}, "here") == ROUND


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"t": 1}, "runs/a/rounds.jsonl has no 'phase', which every version of effuse writes; restore it from a backup"),
        (ROUND.to_json() | {"seconds": 3.0}, "runs/a/rounds.jsonl: expected keys and values, not float"),
        ([], "runs/a/rounds.jsonl: expected keys and values, not list"),
        (ROUND.to_json() | {"t": "4"}, "runs/a/rounds.jsonl: expected int, not str"),
        (ROUND.to_json() | {"loss": True}, "runs/a/rounds.jsonl: expected float, not bool"),
        (ROUND.to_json() | {"noted": [1]}, "runs/a/rounds.jsonl: expected dict, not list"),
        (ROUND.to_json() | {"metrics": {"fid": "1"}}, "runs/a/rounds.jsonl: expected float, not str"),
    ],
)
def test_damaged_records_are_reported(found, words):
    with pytest.raises(RunError) as error:
        RoundRecord.from_json(found, "runs/a/rounds.jsonl")
    assert str(error.value).startswith(words)


def test_a_run_gives_what_its_folder_holds(tmp_path):
    run = effuse.run(toy_recipe(), out=tmp_path / "run")
    assert run.result == RunFolder(run.path).read_result() and run.weights_sha256 == run.result.weights_sha256
    assert run.result.to_json() == json.loads((run.path / "result.json").read_text())
    lines = (run.path / "rounds.jsonl").read_text().splitlines()
    assert [record.to_json() for record in RunFolder(run.path).records()] == [json.loads(line) for line in lines]


NESTED = "[" * 100_000


@pytest.mark.parametrize("damage", ["", "{", "9" * 5000, NESTED, "\x00\xff"])
def test_files_that_are_no_json_are_reported(tmp_path, damage):
    """Empty, cut off, a number of too many digits, nested too deeply, and bytes of another kind of file."""
    folder = RunFolder(tmp_path)
    folder.result.write_bytes(damage.encode("latin-1"))
    folder.rounds.write_bytes(json.dumps(ROUND.to_json()).encode() + b"\n" + damage.encode("latin-1") + b"\n")
    with pytest.raises(RunError, match="result.json is damaged: .*; restore it from a backup"):
        folder.read_result()
    records = folder.each_record()
    assert next(records) == ROUND
    with pytest.raises(RunError, match="rounds.jsonl is damaged: .*; restore it from a backup"):
        next(records)


@pytest.mark.parametrize("damage", ["", "{", NESTED, "\x00\xff"])
def test_manifests_that_are_no_json_are_reported(tmp_path, damage):
    (tmp_path / "manifest.json").write_bytes(damage.encode("latin-1"))
    with pytest.raises(RunError, match="manifest.json is not a manifest"):
        read_manifest(tmp_path)
