"""FedDisco by hand: distances of labels, weights, and what clients disclose."""

import json

import pytest
import torch
from hand import one_weight_recipe, trained
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddisco import FedDisco, Member, Told, discrepancy_aware, divergence
from effuse.core.aggregate import Average
from effuse.core.errors import RecipeError, WireError
from effuse.core.reducers import Clipped, Median
from effuse.core.solvers import SGD
from effuse.privacy.histogram import Laplace
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tools.check import check
from effuse.transport.state import Snapshots

STEP = SGD(lr=0.5, batch=4, steps=1)


def members(*counts):
    return {k: Member(tuple(map(float, c)), float(sum(c))) for k, c in enumerate(counts)}


def test_weights_by_size_and_distance():
    """Sizes 100, 200, 100 with labels (50, 50), (200, 0), (75, 25); a 0.5, b 0.1.

    KL from uniform: 0, ln 2 = 0.693147, 0.75 ln 1.5 + 0.25 ln 0.5 = 0.130812; normalised 0, 0.841240, 0.158760.
    p: 0.25 + 0.1 = 0.35; 0.5 - 0.420620 + 0.1 = 0.179380; 0.25 - 0.079380 + 0.1 = 0.270620; their sum is 0.8.
    """
    asked = members((50, 50), (200, 0), (75, 25))
    assert [divergence(m.counts) for m in asked.values()] == pytest.approx([0.0, 0.693147, 0.130812], abs=1e-6)
    assert list(discrepancy_aware(asked, 0.5, 0.1).values()) == pytest.approx([0.4375, 0.224225, 0.338275], abs=1e-6)


def test_without_distances_and_offset_the_weights_are_the_sizes():
    """Uniform labels have no distance to normalise; 10 and 30 images weigh 1/4 and 3/4, with b 0.1 (0.35, 0.85) / 1.2."""
    uniform = members((5, 5), (15, 15))
    assert list(discrepancy_aware(uniform, 0.5, 0.0).values()) == pytest.approx([0.25, 0.75])
    assert list(discrepancy_aware(uniform, 0.5, 0.1).values()) == pytest.approx([0.35 / 1.2, 0.85 / 1.2])
    skewed = members((10, 0), (15, 15))
    assert list(discrepancy_aware(skewed, 0.0, 0.0).values()) == pytest.approx([0.25, 0.75])


def test_relu_cuts_off_and_where_it_leaves_nobody_sizes_count():
    """One class each: d = 1/2. With a 1: 0.25 - 0.5 < 0 and 0.75 - 0.5 = 0.25, so (0, 1); with a 4 both are below nought."""
    single = members((10, 0), (0, 30))
    assert list(discrepancy_aware(single, 1.0, 0.0).values()) == [0.0, 1.0]
    assert list(discrepancy_aware(single, 4.0, 0.0).values()) == [0.25, 0.75]


def test_counts_that_noise_has_emptied_have_no_distance():
    assert divergence((0.0, 0.0)) == 0.0


def test_the_mean_has_these_weights(tmp_path):
    """One step brings client 0 to 1 and client 1 to -1. Both have one class, so d = 1/2 each.

    p = 0.75 - 0.25 + 0.1 = 0.6 and 0.25 - 0.25 + 0.1 = 0.1: (0.6 - 0.1) / 0.7 = 5/7. Without distance and offset, 0.5.
    Uniform weights: 0.35 each, so 0.
    """
    assert trained(one_weight_recipe(FedDisco(local=STEP)), tmp_path / "a") == pytest.approx(5 / 7)
    assert trained(one_weight_recipe(FedDisco(local=STEP, a=0.0, b=0.0)), tmp_path / "b") == pytest.approx(0.5)
    assert trained(one_weight_recipe(FedDisco(local=STEP, weights="uniform")), tmp_path / "c") == pytest.approx(0.0)
    noted = RunFolder(tmp_path / "a").records()[0].noted["weights"]
    assert noted == {"0": pytest.approx(6 / 7), "1": pytest.approx(1 / 7)}


def test_a_client_whose_weight_is_nought_is_not_in_the_mean(tmp_path):
    """a 1, b 0: client 1 has 0.25 - 0.5 < 0, so the model is client 0's: 1."""
    assert trained(one_weight_recipe(FedDisco(local=STEP, a=1.0, b=0.0)), tmp_path) == pytest.approx(1.0)


def test_counts_are_told_once(tmp_path):
    """Two counts of four bytes from each of three clients beside FedAvg's models, in three rounds."""
    recipes = [toy_recipe(algorithm=a(local=ADAM), rounds=3) for a in (FedDisco, FedAvg)]
    sent = [run(recipe, tmp_path / recipe.algorithm.name).traffic.bytes for recipe in recipes]
    assert sent[0].up - sent[1].up == 3 * 2 * 4 and sent[0].down == sent[1].down
    assert check(recipes[0])["traffic"]["bytes"]["total"] == sent[0].total


def test_noise_is_drawn_once_and_charged_once(tmp_path):
    """With two of three clients a round, both are asked again until all have told. What each keeps, the server has."""
    algorithm = FedDisco(local=ADAM, cohort=2, histogram=Laplace(epsilon=2.0))
    run(toy_recipe(algorithm=algorithm, rounds=4), tmp_path / "run")
    ended = RunFolder(tmp_path / "run").load_checkpoint()
    states = {k: Snapshots(tmp_path / "run" / "clients" / str(k)).read(ended.snapshots[k]) for k in range(3)}
    assert {k: m.counts for k, m in ended.server.members.items()} == {k: s["told"].counts for k, s in states.items()}
    assert any(n != round(n) for m in ended.server.members.values() for n in m.counts)
    spent = json.loads((tmp_path / "run" / "ledger.json").read_text())["privacy"]
    assert spent == {"histogram": {"mechanism": "laplace(epsilon=2.0)", "epsilon": 2.0, "delta": 0.0, "times": 1}}


@pytest.mark.parametrize("rule", [Median(), Average(weights=(1.0, 1.0)), Average(cap=2.0), Clipped(norm=1.0, cap=2.0)])
def test_rules_that_ignore_its_weights_are_refused(rule, tmp_path):
    with pytest.raises(RecipeError, match="ignores the weights that feddisco computes; use mean.. or clipped"):
        run(one_weight_recipe(FedDisco(local=STEP, aggregate=rule)), tmp_path / "run")


def test_what_no_client_can_have_is_refused():
    for counts, weight in (([1.0, -1.0], 2.0), ([1.0, 1.0], 0.0)):
        with pytest.raises(WireError, match="counts are not negative|the weight 0 is not positive"):
            Told(torch.tensor(counts), weight)


def test_clipped_updates_keep_the_weights(tmp_path):
    """Both move by 1 and are cut to 0.5: 5/7 * 0.5."""
    recipe = one_weight_recipe(FedDisco(local=STEP, aggregate=Clipped(norm=0.5)))
    assert trained(recipe, tmp_path) == pytest.approx(2.5 / 7)
