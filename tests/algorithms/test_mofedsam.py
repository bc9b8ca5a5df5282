"""MoFedSAM by hand: two clients, one weight."""

import json

import pytest
from hand import one_weight_recipe, trained
from toy import ToyImages, ToyUnet

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, Adam, ExponentialDecay
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder

STEP = SGD(lr=0.25, batch=4, steps=1)


def direction(folder) -> float:
    return RunFolder(folder).load_checkpoint().server.delta["w"].item()


def test_two_rounds(tmp_path):
    """loss (w - x)^2, lr 1/4, alpha 1/2, rho .1, one step a round, weights by size.

    Round 1 from 0, Delta 0. Client 0 (x = 1): gradient -2, so uphill is w = -.1, where g = -2.2; v = -1.1, y = .275. Client
    1 mirrors it: -.275. Mean (3 x .275 - .275) / 4 = .1375; Delta = -.1375 / (1 x 1/4) = -.55. Round 2 from .1375. Client
    0: uphill .0375, g = -1.925, v = (-1.925 - .55) / 2 = -1.2375, y = .446875. Client 1: uphill .2375, g = 2.475, v =
    (2.475 - .55) / 2 = .9625, y = -.103125. Mean (3 x .446875 - .103125) / 4 = .309375; Delta = -(.309375 - .1375) / (1/4)
    = -.6875.
    """
    algorithm = MoFedSAM(local=STEP, alpha=0.5, rho=0.1)
    assert trained(one_weight_recipe(algorithm, rounds=1), tmp_path / "one") == pytest.approx(0.1375)
    assert direction(tmp_path / "one") == pytest.approx(-0.55)
    assert trained(one_weight_recipe(algorithm, rounds=2), tmp_path / "two") == pytest.approx(0.309375)
    assert direction(tmp_path / "two") == pytest.approx(-0.6875)


def test_published_defaults(tmp_path):
    """alpha .1, rho .1, eta_g 1: g = -2.2, v = -.22, y = .055, mirrored -.055; by size .0275, Delta = -.0275 x 4 = -.11."""
    algorithm = MoFedSAM(local=STEP)
    assert (algorithm.alpha, algorithm.rho, algorithm.eta_g) == (0.1, 0.1, 1.0)
    assert trained(one_weight_recipe(algorithm), tmp_path) == pytest.approx(0.0275)
    assert direction(tmp_path) == pytest.approx(-0.11)


def test_a_server_step_of_its_own(tmp_path):
    """eta_g = 1/2 goes half as far in round 1 above, .06875; the direction is the clients' own, -.55."""
    assert trained(one_weight_recipe(MoFedSAM(local=STEP, alpha=0.5, eta_g=0.5)), tmp_path) == pytest.approx(0.06875)
    assert direction(tmp_path) == pytest.approx(-0.55)


def test_a_longer_server_step_starts_at_the_model(tmp_path):
    """eta_g = 2 goes twice as far in round 1 above, to .275; Delta -.55.

    Client 0: uphill .175, g = -1.65, v = (-1.65 - .55) / 2 = -1.1, y = .55. Client 1: uphill .375, g = 2.75, v = 1.1, y =
    0. By size .4125; .275 + 2 (.4125 - .275) = .55, Delta = -.1375 / (1/4).
    """
    assert trained(one_weight_recipe(MoFedSAM(local=STEP, alpha=0.5, eta_g=2.0), rounds=2), tmp_path) == pytest.approx(0.55)
    assert direction(tmp_path) == pytest.approx(-0.55)


def test_the_direction_starts_at_zero():
    """For any initial weights; the one weight above starts at zero itself."""
    model = ToyUnet().resolved(ToyImages().load("train").shape).initial(Stream((1,)))
    begun = MoFedSAM(local=STEP).setup(model, None)
    assert begun.delta.norm() == 0 < begun.model.params.norm() and begun.delta.keys() == model.params.keys()


def test_the_rate_in_the_direction_is_the_rounds_own(tmp_path):
    """Rate 1/4 then 1/8, alpha 1, hardly any rho: the direction is the mean gradient, in both rounds.

    From 0, g = -2 and 2, y = .5 and -.5: by size .25, Delta -1. From .25, g = -1.5 and 2.5, y = .4375 and -.0625: by size
    .3125, Delta = -(.3125 - .25) / (1/8) = -.5 = (3 x -1.5 + 2.5) / 4.
    """
    solver = SGD(lr=0.25, batch=4, steps=1, schedule=ExponentialDecay(rate=0.5))
    for rounds, x, delta in ((1, 0.25, -1.0), (2, 0.3125, -0.5)):
        recipe = one_weight_recipe(MoFedSAM(local=solver, alpha=1.0, rho=1e-6), rounds=rounds)
        assert trained(recipe, tmp_path / str(rounds)) == pytest.approx(x, abs=1e-5)
        assert direction(tmp_path / str(rounds)) == pytest.approx(delta, abs=1e-5)


def test_tau_counts_batches(tmp_path):
    """Batches of one image, alpha 1, rho 1e-6: 0 -> .875 in three steps and 0 -> -.5 in one; -7/6 and 2, by size -.375."""
    solver = SGD(lr=0.25, batch=1, epochs=1)
    trained(one_weight_recipe(MoFedSAM(local=solver, alpha=1.0, rho=1e-6)), tmp_path)
    assert direction(tmp_path) == pytest.approx((3 * -7 / 6 + 2) / 4, abs=1e-5)


def test_under_adam_the_direction_averages_over_rounds(tmp_path):
    """loss (w - x)^2, Adam of rate .1, alpha 1/2, rho .1, one step a round, weights by size: Delta = (mean g + Delta) / 2.

    Round 1 from 0, Delta 0. Client 0 (x = 1): gradient -2, so uphill is w = -.1, where g = -2.2; v = -1.1, and Adam's first
    step is its rate: y = .1. Client 1 mirrors it: g = 2.2, y = -.1. By size w = (3 x .1 - .1) / 4 = .05, g = (3 x -2.2 +
    2.2) / 4 = -1.1; Delta = (-1.1 + 0) / 2 = -.55. Round 2 from .05. Client 0: gradient -1.9, uphill -.05, g = -2.1, v =
    (-2.1 - .55) / 2 < 0, y = .15. Client 1: gradient 2.1, uphill .15, g = 2.3, v = (2.3 - .55) / 2 > 0, y = -.05. By size w
    = (3 x .15 - .05) / 4 = .1, g = (3 x -2.1 + 2.3) / 4 = -1; Delta = (-1 - .55) / 2 = -.775. Without what Delta was
    before, it would be -1.
    """
    algorithm = MoFedSAM(local=Adam(lr=0.1, batch=4, steps=1), alpha=0.5, rho=0.1)
    for rounds, x, delta in ((1, 0.05, -0.55), (2, 0.1, -0.775)):
        assert trained(one_weight_recipe(algorithm, rounds=rounds), tmp_path / str(rounds)) == pytest.approx(x)
        assert direction(tmp_path / str(rounds)) == pytest.approx(delta)


def test_under_plain_sgd_gradients_and_updates_agree(tmp_path):
    """The two rounds of SGD above: both options give the same mean v."""
    algorithm = MoFedSAM(local=STEP, alpha=0.5, rho=0.1, momentum="gradients")
    for rounds, x, delta in ((1, 0.1375, -0.55), (2, 0.309375, -0.6875)):
        assert trained(one_weight_recipe(algorithm, rounds=rounds), tmp_path / str(rounds)) == pytest.approx(x)
        assert direction(tmp_path / str(rounds)) == pytest.approx(delta)


def test_under_adam_updates_can_be_chosen(tmp_path):
    """Adam's first step has the length of its rate, to .1 and -.1: by size -.05 / .1."""
    adam = Adam(lr=0.1, batch=4, steps=1)
    trained(one_weight_recipe(MoFedSAM(local=adam, alpha=0.5, rho=0.1, momentum="update")), tmp_path)
    assert direction(tmp_path) == pytest.approx(-0.5)


def test_sgd_with_momentum_uses_gradients_too(tmp_path):
    """Two steps of lr 1/4 with momentum .9 go further than plain steps, so the update does not give the mean gradient.

    alpha 1, hardly any rho. Client 0 (x = 1), from 0: g = -2, w = .5; g = -1: mean -1.5. Client 1 mirrors it; by size -.75.
    By the update, w = .5 + (1 + .9 x 2) / 4 = 1.2 would have said -1.2 / (2 x 1/4) = -2.4, by size -1.2.
    """
    solver = SGD(lr=0.25, batch=4, steps=2, momentum=0.9)
    trained(one_weight_recipe(MoFedSAM(local=solver, alpha=1.0, rho=1e-6)), tmp_path)
    assert direction(tmp_path) == pytest.approx(-0.75, abs=1e-5)


def test_without_perturbation_and_momentum_it_is_fedavg(tmp_path):
    """alpha 1 removes Delta from v, and rho of 1e-12 is negligible."""
    solver = SGD(lr=0.25, batch=1, epochs=2)
    a = trained(one_weight_recipe(MoFedSAM(local=solver, alpha=1.0, rho=1e-12), rounds=2), tmp_path / "a")
    b = trained(one_weight_recipe(FedAvg(local=solver), rounds=2), tmp_path / "b")
    assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize(("solver", "up"), [(STEP, 6), (Adam(lr=0.1, batch=4, steps=1), 12)])
def test_traffic(solver, up, tmp_path):
    """Model and direction go down: 2 x 2 x 3 rounds. The model comes up, under Adam with its mean gradient."""
    run(one_weight_recipe(MoFedSAM(local=solver), rounds=3), tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["training"]["parameters"] == {"up": up, "down": 12, "total": 12 + up}
