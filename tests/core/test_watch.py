"""What a server sees of updates, with numbers computed by hand."""

import math

import pytest
import torch
from replies import Declared, Scripted, model, params, reply

from effuse.core.params import Params
from effuse.core.watch import SAMPLE, Watch, conspicuous, described


class Watching(Scripted):
    """A federation whose clients are somebody else's."""

    watching = True


def seen_of(*updates, start=0.0, weights=None, losses=None):
    """What is seen of models w that were trained from `start`."""
    n = len(updates)
    answers = {k: reply(w, (weights or [1.0] * n)[k], loss=(losses or [0.5] * n)[k]) for k, w in enumerate(updates)}
    fed = Watching(answers, clients=n)
    fed.mean(Declared().train, range(n), model=model(start))
    return fed.log.updates


def test_lengths_are_those_of_the_updates():
    """From 2, the models 5, 1 and 2 are 3, 1 and 0 away. Two of three directions cancel out, so no cosine is known."""
    seen = seen_of(5.0, 1.0, 2.0, start=2.0, weights=[4.0, 2.0, 1.0], losses=[1.0, 2.0, 3.0])
    assert [seen[k]["norm"] for k in range(3)] == [3.0, 1.0, 0.0]
    assert [seen[k]["weight"] for k in range(3)] == [4.0, 2.0, 1.0] and seen[2]["loss"] == 3.0
    assert [seen[k]["cosine"] for k in range(3)] == [None, None, None]


def test_a_long_update_does_not_decide_what_is_usual():
    """Two of three go up by 1 and one goes down by a million: their directions are 1, 1, -1, whose mean is 1/3 upwards."""
    seen = seen_of(1.0, 1.0, -1e6)
    assert [seen[k]["cosine"] for k in range(3)] == [pytest.approx(c) for c in (1.0, 1.0, -1.0)]


def test_the_cosine_is_that_to_the_mean_direction():
    """Directions (1, 0), (0, 1), (1, 0): their mean is (2, 1) / 3, of length sqrt(5) / 3; cosines 2, 1 and 2 over sqrt(5).

    The second update is ten times as long, which changes nothing. A difference is compared with zero.
    """
    watch = Watch()
    for client, values in enumerate(((1.0, 0.0), (0.0, 10.0), (1.0, 0.0))):
        watch.add(client, {"dc": params(*values)}, Declared.jobs["train"].arguments(model=model(7.0)), "fp32", 1.0, None)
    seen = watch.results()
    assert [seen[k]["cosine"] for k in range(3)] == [pytest.approx(c / math.sqrt(5)) for c in (2, 1, 2)]
    assert seen[1]["norm"] == 10.0


def test_directions_are_known_by_a_sample():
    """Of 10 x 16,384 values every tenth is kept; an update and its opposite still have a cosine of -1 to each other."""
    watch, up = Watch(), Params({"w": torch.arange(1.0, 10 * SAMPLE + 1)})
    for client, values in enumerate((up, up, -up)):
        watch.add(client, {"dc": values}, Declared.jobs["train"].arguments(model=model(0.0)), "fp32", 1.0, None)
    assert len(watch._directions[0]) == SAMPLE
    assert [each["cosine"] for each in watch.results().values()] == [pytest.approx(c) for c in (1.0, 1.0, -1.0)]


def test_who_is_conspicuous():
    """More than ten times the median, or away from the others. Of two clients nobody can say which one is odd."""
    usual = {"weight": 10.0, "loss": 0.5, "norm": 1.0, "cosine": 0.9}
    others = {1: usual, 2: usual, 3: usual}
    assert conspicuous(others) == {} and conspicuous({1: usual, 2: usual | {"norm": 1e6}}) == {}
    assert conspicuous(others | {0: usual | {"norm": 1e6}}) == {0: "its norm is 1e+06 times the median"}
    assert conspicuous(others | {0: usual | {"weight": 101.0}}) == {0: "its weight is 10.1 times the median"}
    both = conspicuous(others | {0: usual | {"loss": 6.0, "cosine": -0.5}})[0]
    assert both == "its loss is 12 times the median and its update points away from the others' (cosine -0.50)"
    assert conspicuous(others | {0: usual | {"norm": 10.0, "loss": None, "cosine": None}}) == {}
    assert described({4: usual | {"loss": None}}) == "client 4: weight 10, norm 1, cosine 0.9"


def test_only_a_federation_of_others_is_watched():
    fed = Scripted({0: reply(1.0)}, clients=1)
    fed.mean(Declared().train, [0], model=model(0.0))
    assert fed.log.updates == {}
