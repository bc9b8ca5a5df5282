"""SCAFFOLD by hand: two clients, one weight, two rounds."""

import json

import pytest
import torch
from hand import one_weight_recipe, trained
from toy import ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.scaffold import Scaffold
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, Adam, ExponentialDecay
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tools.check import check
from effuse.transport.state import Snapshots

# one image a batch: client 0 takes three steps an epoch and client 1 takes one
LOCAL = SGD(lr=0.25, batch=1, epochs=1)


def variates(folder) -> tuple[float, ...]:
    """(c, c_0, c_1) after a run."""
    ended = RunFolder(folder).load_checkpoint()
    own = [Snapshots(folder / "clients" / str(k)).read(ended.snapshots.get(k)).get("c_i") for k in (0, 1)]
    return tuple(0.0 if p is None else p["w"].item() for p in (ended.server.c, *own))


@pytest.mark.parametrize("option", ["II", "gradients", None])
def test_two_rounds(option, tmp_path):
    """loss (w - x)^2, lr 1/4: a plain step is w/2 + x/2. Both options agree under plain SGD.

    Round 1, all variates 0. Client 0: 0 -> .5 -> .75 -> .875, tau = 3: c_0 = (0 - .875) / (3/4) = -7/6, which is also the
    mean of its gradients -2, -1, -.5. Client 1: 0 -> -.5, tau = 1: c_1 = .5 / (1/4) = 2. Mean model (.875 - .5) / 2 =
    .1875, c = (-7/6 + 2) / 2 = 5/12. Round 2. Client 0 steps to w/2 + .5 - (7/6 + 5/12)/4 = w/2 + 5/48: .1875 -> 19/96 ->
    13/64 -> 79/384. Client 1 steps to w/2 - .5 - (-2 + 5/12)/4 = w/2 - 5/48: .1875 -> -1/96. Mean (79/384 - 4/384) / 2 =
    75/768 = 25/256. c_0 = -7/6 - 5/12 + (.1875 - 79/384) / (3/4) = -19/12 - 7/288; c_1 = 2 - 5/12 + (.1875 + 1/96) / (1/4)
    = 19/8; c is their mean."""
    algorithm = Scaffold(local=LOCAL, option=option)
    assert trained(one_weight_recipe(algorithm, rounds=1), tmp_path / "one") == pytest.approx(0.1875)
    assert variates(tmp_path / "one") == pytest.approx((5 / 12, -7 / 6, 2.0))
    assert trained(one_weight_recipe(algorithm, rounds=2), tmp_path / "two") == pytest.approx(25 / 256)
    c_0, c_1 = -19 / 12 - 7 / 288, 19 / 8
    assert variates(tmp_path / "two") == pytest.approx(((c_0 + c_1) / 2, c_0, c_1))


def test_option_one_uses_the_gradient_at_the_received_model(tmp_path):
    """The gradients at x = 0, before training: -2 and 2, with the mean 0."""
    algorithm = Scaffold(local=LOCAL, option="I")
    assert trained(one_weight_recipe(algorithm, rounds=1), tmp_path / "one") == pytest.approx(0.1875)
    assert variates(tmp_path / "one") == pytest.approx((0.0, -2.0, 2.0))


def test_option_one_uses_the_clients_batch_size():
    """14, 13 and 13 images are two batches of eight an epoch.

    Two epochs train and one gives the gradient: 3 x 6 in a round.
    """
    recipe = toy_recipe(algorithm=Scaffold(local=SGD(lr=0.25, batch=8, epochs=2), option="I"), rounds=1)
    assert check(recipe)["steps"]["client"] == 18


def test_variates_are_averaged_uniformly_where_models_weigh_by_size(tmp_path):
    """Round 1 as above: the model is (3 x .875 - .5) / 4 = .53125, c still (-7/6 + 2) / 2 = 5/12."""
    assert trained(one_weight_recipe(Scaffold(local=LOCAL, weights="size")), tmp_path) == pytest.approx(0.53125)
    assert variates(tmp_path) == pytest.approx((5 / 12, -7 / 6, 2.0))


def test_the_servers_variate_moves_by_the_share_that_took_part(tmp_path):
    """One client of two: c = (1/2) c_k, and the model is that client's own."""
    ends = set()
    for seed in range(8):
        x = trained(one_weight_recipe(Scaffold(local=LOCAL, cohort=1), seed=seed), tmp_path / str(seed))
        ends.add((round(x, 6), *(round(c, 6) for c in variates(tmp_path / str(seed)))))
    assert ends == {(0.875, -0.583333, -1.166667, 0.0), (-0.5, 1.0, 0.0, 2.0)}


def test_a_late_client_starts_with_a_variate_of_zero(tmp_path):
    """One client of two in each of two rounds. If they take turns, the second starts with c_i = 0, whatever c is.

    Client 0 first: x = .875, c_0 = -7/6, c = -7/12. Client 1 steps to w/2 - .5 + 7/48: .875 -> 1/12, c_1 = 7/12 + 4 (.875 -
    1/12) = 15/4, its gradient there; c = -7/12 + 15/8 = 31/24. Client 1 first: x = -.5, c_1 = 2, c = 1. Client 0 steps to
    w/2 + .5 - 1/4: -.5 -> 0 -> .25 -> .375, c_0 = -1 - .875 / (3/4) = -13/6, the mean of -3, -2 and -1.5; c = 1 - 13/12 =
    -1/12.
    """
    ends = set()
    for seed in range(8):
        x = trained(one_weight_recipe(Scaffold(local=LOCAL, cohort=1), seed=seed, rounds=2), tmp_path / str(seed))
        ends.add((round(x, 5), *(round(c, 5) for c in variates(tmp_path / str(seed)))))
    assert {e for e in ends if e[2] and e[3]} == {(0.08333, 1.29167, -1.16667, 3.75), (0.375, -0.08333, -2.16667, 2.0)}


def test_the_rate_in_option_two_is_the_rounds_own(tmp_path):
    """Rate 1/4 then 1/8: the mean raw gradient comes out of option II in both rounds, of which the first is as above.

    Round 2. Client 0 steps to 3w/4 + .25 - (7/6 + 5/12)/8 = 3w/4 + 5/96: 18/96 -> 18.5/96 -> 18.875/96, where its gradients
    are -2 + 36/96, -2 + 37/96 and -2 + 37.75/96, in the mean -2 + 110.75/288. Client 1 has 2 (.1875 + 1) = 2.375. At 1/4
    instead of 1/8, option II would have half of what both have moved.
    """
    solver = SGD(lr=0.25, batch=1, epochs=1, schedule=ExponentialDecay(rate=0.5))
    for option in ("II", "gradients"):
        trained(one_weight_recipe(Scaffold(local=solver, option=option), rounds=2), tmp_path / option)
        assert variates(tmp_path / option)[1:] == pytest.approx((-2 + 110.75 / 288, 2.375))


def test_a_server_step_of_its_own(tmp_path):
    """eta_g = 2 goes twice as far: 2 x .1875."""
    assert trained(one_weight_recipe(Scaffold(local=LOCAL, eta_g=2.0)), tmp_path) == pytest.approx(0.375)


def test_a_server_step_starts_at_the_model(tmp_path):
    """eta_g = 2 from .375 with c = 5/12: client 0 steps to w/2 + 5/48, so 18/48 -> 14/48 -> 12/48 -> 11/48, client 1 to w/2
    - 5/48 = 4/48. Mean 5/32; .375 + 2 (5/32 - 12/32) = -1/16.
    """
    assert trained(one_weight_recipe(Scaffold(local=LOCAL, eta_g=2.0), rounds=2), tmp_path) == pytest.approx(-1 / 16)


def test_the_servers_variate_starts_at_zero():
    """For any initial weights; the one weight above starts at zero itself."""
    model = ToyUnet().resolved(ToyImages().load("train").shape).initial(Stream((1,)))
    begun = Scaffold(local=LOCAL).setup(model, None)
    assert begun.c.norm() == 0 < begun.model.params.norm() and begun.c.keys() == model.params.keys()


def test_adam_uses_gradients_and_the_first_round_is_fedavgs(tmp_path):
    """Adam with variates of zero steps as in FedAvg. Its mean gradient, not its update, becomes c_i."""
    adam = Adam(lr=0.1, batch=1, epochs=1)
    a = trained(one_weight_recipe(Scaffold(local=adam)), tmp_path / "a")
    b = trained(one_weight_recipe(FedAvg(local=adam, weights="uniform")), tmp_path / "b")
    assert a == b
    # client 1: one step from 0, where its gradient is 2; option II would have (0 + 0.1) / 0.1 = 1
    assert variates(tmp_path / "a")[2] == pytest.approx(2.0)
    trained(one_weight_recipe(Scaffold(local=adam, option="II")), tmp_path / "c")
    assert variates(tmp_path / "c")[2] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("solver", "rule"),
    [
        (SGD(lr=0.1, steps=1), "II"),
        (SGD(lr=0.1, steps=1, momentum=0.9), "gradients"),
        (SGD(lr=0.1, steps=1, weight_decay=0.1), "gradients"),
        (SGD(lr=0.1, steps=1, clip=1.0), "gradients"),
        (Adam(lr=0.1, steps=1), "gradients"),
    ],
)
def test_the_rule_follows_the_solver(solver, rule):
    assert Scaffold(local=solver).rule == rule and Scaffold(local=solver, option="I").rule == "I"


def test_traffic_is_doubled(tmp_path):
    """Two weights down and two up to each of two clients, in three rounds: 24, where FedAvg has 12."""
    run(one_weight_recipe(Scaffold(local=LOCAL), rounds=3), tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["training"]["parameters"] == {"up": 12, "down": 12, "total": 24}
    assert torch.get_num_threads() == 1
