"""FedOpt and FedAvgM by hand: two clients, one weight."""

import dataclasses
import math

import pytest
from hand import one_weight_recipe, trained
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from effuse.core.errors import RecipeError
from effuse.core.solvers import SGD
from effuse.models.resnet import Cnn
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.tools.check import check

# each client moves to its images' value, 1 or -1; by size the mean is (3 * 1 - 1) / 4 = 0.5, whatever w was
STEP = SGD(lr=0.5, batch=4, steps=1)


def weight(algorithm, rounds: int, folder) -> float:
    return trained(one_weight_recipe(algorithm, rounds=rounds), folder)


def test_fedavgm(tmp_path):
    """Delta = 0.5 - x. With beta = 0.5, eta = 0.8: m = 0.5, x = 0.4; then Delta = 0.1, m = 0.35, x = 0.68."""
    algorithm = FedAvgM(local=STEP, eta=0.8, beta=0.5)
    assert weight(algorithm, 1, tmp_path / "a") == pytest.approx(0.4)
    assert weight(algorithm, 2, tmp_path / "b") == pytest.approx(0.68)


def test_fedavgm_without_momentum_is_fedavg(tmp_path):
    """x + (mean - x) is the mean."""
    solver = SGD(lr=0.25, batch=4, steps=1)
    a = weight(FedAvgM(local=solver, beta=0.0), 2, tmp_path / "a")
    assert a == pytest.approx(weight(FedAvg(local=solver), 2, tmp_path / "b"))


def test_fedadam(tmp_path):
    """beta_1 = 0.5, beta_2 = 0.75, tau = 0.1, eta = 0.2, v = 0.01 at first.

    Round 1: Delta = 0.5, m = 0.25, v = 0.0075 + 0.0625 = 0.07, x = 0.2 * 0.25 / (sqrt(0.07) + 0.1).
    Round 2: Delta = 0.5 - x, m = 0.125 + Delta / 2, v = 0.0525 + Delta^2 / 4.
    """
    algorithm = FedAdam(local=STEP, eta=0.2, beta_1=0.5, beta_2=0.75, tau=0.1)
    x = 0.2 * 0.25 / (math.sqrt(0.07) + 0.1)
    assert weight(algorithm, 1, tmp_path / "a") == pytest.approx(x, rel=1e-5)
    delta = 0.5 - x
    after = x + 0.2 * (0.125 + delta / 2) / (math.sqrt(0.0525 + delta**2 / 4) + 0.1)
    assert weight(algorithm, 2, tmp_path / "b") == pytest.approx(after, rel=1e-5)


def test_fedyogi(tmp_path):
    """v = 0.01 < Delta^2 = 0.25: v grows by a quarter of 0.25 to 0.0725. x = 0.05 / (sqrt(0.0725) + 0.1).

    With tau = 1, v = 1 > 0.25: v falls to 0.9375, and x = 0.05 / (sqrt(0.9375) + 1). Adam would have 0.8125 there.
    """
    yogi = {"local": STEP, "eta": 0.2, "beta_1": 0.5, "beta_2": 0.75}
    grown, fallen = 0.05 / (math.sqrt(0.0725) + 0.1), 0.05 / (math.sqrt(0.9375) + 1)
    assert weight(FedYogi(**yogi, tau=0.1), 1, tmp_path / "a") == pytest.approx(grown, rel=1e-5)
    assert weight(FedYogi(**yogi, tau=1.0), 1, tmp_path / "b") == pytest.approx(fallen, rel=1e-5)


def test_fedadagrad(tmp_path):
    """Round 1: v = 0.01 + 0.25, x = 0.2 * 0.5 / (sqrt(0.26) + 0.1). Round 2 adds (0.5 - x)^2; there is no momentum."""
    algorithm = FedAdagrad(local=STEP, eta=0.2, tau=0.1)
    x = 0.1 / (math.sqrt(0.26) + 0.1)
    delta = 0.5 - x
    after = x + 0.2 * delta / (math.sqrt(0.26 + delta**2) + 0.1)
    assert weight(algorithm, 2, tmp_path / "a") == pytest.approx(after, rel=1e-5)


def test_the_average_over_rounds_is_of_the_delivered_models(tmp_path):
    """FedAvgM's 0.4 and 0.68 with ema = 0.5: weights 0.5 and 1, so (0.2 + 0.68) / 1.5."""
    recipe = one_weight_recipe(FedAvgM(local=STEP, eta=0.8, beta=0.5), rounds=2, ema=0.5)
    run(recipe, tmp_path / "run")
    assert load(tmp_path / "run", ema=True).model.params["w"].item() == pytest.approx(0.88 / 1.5)


def test_batch_statistics_are_fedavgs(tmp_path):
    """Buffers are averaged and take no server step: after one round they are those of FedAvg, and the weights are not."""
    recipe = toy_recipe(model=Cnn(widths=(4,), norm="batch"), task=Classify(), sampler=None, rounds=1)
    models = {}
    for name, algorithm in {"adam": FedAdam(local=ADAM), "avg": FedAvg(local=ADAM)}.items():
        run(dataclasses.replace(recipe, algorithm=algorithm), tmp_path / name)
        models[name] = load(tmp_path / name).model
    assert len(models["avg"].buffers) and models["adam"].buffers.digest() == models["avg"].buffers.digest()
    assert models["adam"].params.digest() != models["avg"].params.digest()


@pytest.mark.parametrize("kind", [FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_traffic_is_fedavgs(kind):
    """The server's moments stay at the server."""
    ours, theirs = (check(toy_recipe(algorithm=k(local=ADAM), rounds=3))["traffic"] for k in (kind, FedAvg))
    assert ours == theirs


def test_refusals():
    with pytest.raises(RecipeError, match="beta_2"):
        one_weight_recipe(FedAdam(local=STEP)).changed(["algorithm.beta_2=1.0"])
