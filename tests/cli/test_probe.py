"""`effuse probe`: options, its table, and refusals in a sentence."""

import json
from pathlib import Path

import pytest


def test_a_table_for_a_reader_and_json(effuse):
    settings = (
        "rounds=1",
        "evaluate=evaluate(grid=0)",
        "clients=2",
        "partition=iid()",
        "data=some(digits(),100)",
        "algorithm.local.epochs=1",
    )
    line = " ".join(f"--set '{setting}'" for setting in settings)
    assert effuse(f"run feddifrc.guide --out r --quiet {line}").code == 0
    told = effuse("probe r --stages 0,1 --steps 0,300 --images 60")
    assert told.code == 0
    for words in ("stage", "t 300", "64", "trained on 60 training images, judged on 16 others", "has seen them too"):
        assert words in told.out, words
    found = effuse(
        "probe r --stages 2 --steps 10 --kind logistic --penalty 0.1 --share 0.5 --seed 3 --untrained --json"
    ).json
    assert (found["probe"], found["penalty"], found["seed"], found["model"]) == ("logistic", 0.1, 3, "untrained")
    assert [(row["stage"], row["t"]) for row in found["rows"]] == [("2", 10)]
    assert abs(found["judged_on"] - 50) <= 5
    assert json.loads(Path("r/probe-untrained.json").read_text())["rows"] == found["rows"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--kind svm", "--kind svm: "),
        ("--steps 1,x", "--steps 1,x: 'x' is not a whole number"),
        ("--penalty 0", "--penalty 0 must be above 0"),
        ("--share 1", "--share 1 between 0 and 1"),
    ],
)
def test_options_are_refused_in_a_sentence(effuse, options, words):
    answer = effuse(f"probe nowhere {options}")
    assert answer.code == 1 and words in answer.err, answer.err
