"""Accuracy over rounds, by hand and in a run."""

import dataclasses
import json

import pytest
from toy import ADAM, SMALL, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.recipe import Evaluate
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.history import accuracy_over_rounds
from effuse.runs.driver import run
from effuse.tasks.classify import Classify


def test_the_figures_by_hand():
    """The last five of 0.1, 0.5, 0.3, 0.7, 0.4, 0.6 have the mean 2.5 / 5. 0.8 is never reached."""
    measured = list(zip(range(1, 7), (0.1, 0.5, 0.3, 0.7, 0.4, 0.6)))
    assert accuracy_over_rounds(measured) == pytest.approx(
        {"accuracy_last5": 0.5, "accuracy_best": 0.7}
        | dict.fromkeys(("rounds_to_0.2", "rounds_to_0.3", "rounds_to_0.4"), 2)
        | {"rounds_to_0.6": 4}
    )
    assert accuracy_over_rounds(measured[:4]) == {}


def test_a_run_that_is_evaluated_every_round_has_them(tmp_path):
    evaluate = Evaluate(grid=0, every=1, metrics=(Accuracy(),))
    recipe = toy_recipe(algorithm=FedAvg(local=ADAM), model=SMALL, task=Classify(), rounds=6, evaluate=evaluate)
    result = run(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    values = [line["metrics"]["accuracy"] for line in lines]
    assert len(values) == 6 and result.figures["accuracy_last5"] == pytest.approx(sum(values[1:]) / 5)
    assert result.figures["accuracy_best"] == max(values)
    once = run(dataclasses.replace(recipe, evaluate=dataclasses.replace(evaluate, every=0)), tmp_path / "once")
    assert "accuracy_last5" not in once.figures and once.weights_sha256 == result.weights_sha256
