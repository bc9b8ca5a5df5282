"""FedAvg and FedProx by hand: two clients, one weight."""

import pytest
import torch
from hand import one_weight_recipe, trained

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedprox import FedProx
from effuse.core.errors import EffuseError
from effuse.core.solvers import SGD, Adam, ExponentialDecay

STEP = SGD(lr=0.5, batch=4, steps=1)


def test_weights_by_size(tmp_path):
    """w = 0; client 0 has three images of value 1, client 1 one of value -1; loss (w - x)^2, lr 0.5.

    One step of each: w - 0.5 * 2 (w - x) = x, so 1 and -1. By size: (3 * 1 + 1 * -1) / 4 = 0.5.
    """
    assert trained(one_weight_recipe(FedAvg(local=STEP)), tmp_path) == pytest.approx(0.5)


def test_uniform_weights(tmp_path):
    """The same clients, equally: (1 - 1) / 2 = 0."""
    assert trained(one_weight_recipe(FedAvg(local=STEP, weights="uniform")), tmp_path) == pytest.approx(0.0)


def test_two_rounds(tmp_path):
    """lr 0.25 moves half way.

    Round 1: 0.5 and -0.5, mean 0.25. Round 2: 0.625 and -0.375, (3 * 0.625 - 0.375) / 4 = 0.375.
    """
    solver = SGD(lr=0.25, batch=4, steps=1)
    assert trained(one_weight_recipe(FedAvg(local=solver), rounds=2), tmp_path) == pytest.approx(0.375)


def test_the_learning_rate_follows_its_schedule(tmp_path):
    """lr 0.5 then 0.25. Round 1 ends at 0.5. Round 2 moves half way to 1 and -1: 0.75 and -0.25, (2.25 - 0.25) / 4 = 0.5."""
    solver = SGD(lr=0.5, batch=4, steps=1, schedule=ExponentialDecay(rate=0.5))
    assert trained(one_weight_recipe(FedAvg(local=solver), rounds=2), tmp_path) == pytest.approx(0.5)


def test_fedprox_holds_clients_back(tmp_path):
    """Two steps, lr 0.25, mu = 1.

    Client 0: w = 0.5 after step 1, where y = x and the penalty is zero. Step 2's gradient is 2 (0.5 - 1) + 1 * 0.5 = -0.5,
    so 0.625. Client 1 mirrors it: -0.625. By size: (3 * 0.625 - 0.625) / 4 = 0.3125. FedAvg reaches 0.75 and -0.75: 0.375.
    """
    solver = SGD(lr=0.25, batch=4, steps=2)
    assert trained(one_weight_recipe(FedProx(local=solver, mu=1.0)), tmp_path / "a") == pytest.approx(0.3125)
    assert trained(one_weight_recipe(FedAvg(local=solver)), tmp_path / "b") == pytest.approx(0.375)


def test_fedprox_without_mu_is_fedavg(tmp_path):
    solver = Adam(lr=0.1, batch=2, epochs=2)
    a = trained(one_weight_recipe(FedProx(local=solver, mu=0.0), rounds=2), tmp_path / "a")
    b = trained(one_weight_recipe(FedAvg(local=solver), rounds=2), tmp_path / "b")
    assert a == b


def test_a_cohort_of_one_is_that_client(tmp_path):
    """The step of the sampled client ends at its own data: 1 or -1."""
    ends = {trained(one_weight_recipe(FedAvg(local=STEP, cohort=1), seed=s), tmp_path / str(s)) for s in range(8)}
    assert ends == {1.0, -1.0}


def test_a_fraction_is_a_share_of_the_clients(tmp_path):
    ends = {trained(one_weight_recipe(FedAvg(local=STEP, cohort=0.5), seed=s), tmp_path / str(s)) for s in range(8)}
    assert ends == {1.0, -1.0}


def test_a_cohort_larger_than_the_federation_is_refused(tmp_path):
    with pytest.raises(EffuseError, match="algorithm.cohort: 3 clients a round, but there are 2; lower it or raise clients"):
        trained(one_weight_recipe(FedAvg(local=STEP, cohort=3)), tmp_path)


def test_per_step_ema_is_refused():
    with pytest.raises(EffuseError, match="double the upload; use the recipe's `ema`"):
        FedAvg(local=SGD(lr=0.1, steps=1, ema=0.9))
    assert torch.get_num_threads() == 1
