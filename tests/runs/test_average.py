"""The moving average of a run's models, by hand."""

import pytest
from replies import model
from toy import toy_recipe

from effuse.core.algorithm import Server
from effuse.runs.average import MovingAverage


def averaged(*rounds: tuple[float, bool]) -> MovingAverage:
    average = MovingAverage(toy_recipe(ema=0.5))
    for w, new in rounds:
        average.add(Server(model(w)), model(w), new)
    return average


def test_weights_are_powers_of_the_decay():
    """Of the models 1, 4 and 8 the weights are 1/4, 1/2 and 1: (0.25 + 2 + 8) / 1.75."""
    average = averaged((1.0, True), (4.0, True), (8.0, True))
    assert average.models == 3 and average.model.params["w"].item() == pytest.approx(10.25 / 1.75)


def test_only_models_that_a_round_has_changed_count():
    """The model 1 is untrained, so the second replaces it; the third is the second again."""
    average = averaged((1.0, False), (4.0, True), (4.0, False))
    assert average.models == 1 and average.model.params["w"].item() == 4.0


def test_without_a_decay_there_is_none():
    average = MovingAverage(toy_recipe())
    average.add(Server(model(1.0)), model(1.0), True)
    assert average.model is None
