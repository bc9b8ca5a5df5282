"""Solvers: the amount of work of a fit, the learning rates over rounds, and the optimisers."""

import math

import pytest
import torch

from effuse.algorithms.fedavg import FedAvg
from effuse.core.privacy import DpSgd
from effuse.core.solvers import SGD, Adam, AdamW, Constant, CosineDecay, ExponentialDecay, Solver
from effuse.core.spec import spec


@pytest.mark.parametrize(
    "work, size, steps, images",
    [
        ({"epochs": 3}, 10, 9, 30),  # batches of 4, 4, 2, three times
        ({"epochs": 3}, 8, 6, 24),
        ({"epochs": 1}, 3, 1, 3),  # one batch with fewer than 4 images
        ({"steps": 2}, 10, 2, 8),
        ({"steps": 3}, 10, 3, 10),  # exactly one epoch: 4 + 4 + 2
        ({"steps": 7}, 10, 7, 24),  # two epochs of 10, then a full batch of 4
        ({"steps": 8}, 10, 8, 28),
        ({"steps": 5}, 3, 5, 15),  # every batch has 3 images
        ({"steps": 5}, 4, 5, 20),
    ],
)
def test_steps_and_images_with_small_last_batches(work, size, steps, images):
    solver = SGD(lr=0.1, batch=4, **work)
    assert (solver.steps_on(size), solver.images_on(size)) == (steps, images)


@pytest.mark.parametrize(
    "work, size, steps, images",
    [
        ({"epochs": 3}, 10, 6, 24),  # 4 + 4, three times
        ({"epochs": 3}, 8, 6, 24),
        ({"epochs": 2}, 3, 2, 6),  # the only batch stays
        ({"steps": 5}, 10, 5, 20),
        ({"steps": 3}, 3, 3, 9),
    ],
)
def test_ragged_batches_may_be_dropped(work, size, steps, images):
    solver = SGD(lr=0.1, batch=4, ragged="drop", **work)
    assert (solver.steps_on(size), solver.images_on(size)) == (steps, images)


@pytest.mark.parametrize(
    "work, size, ragged",
    [
        ({"epochs": 3}, 10, True),
        ({"epochs": 3}, 8, False),
        ({"epochs": 3}, 3, True),
        ({"steps": 2}, 10, False),  # the first two of 4 + 4 + 2
        ({"steps": 3}, 10, True),
        ({"steps": 7}, 8, False),
        ({"epochs": 3, "ragged": "drop"}, 10, False),
        ({"epochs": 3, "ragged": "drop"}, 3, True),
    ],
)
def test_whether_a_batch_is_ragged(work, size, ragged):
    assert SGD(lr=0.1, batch=4, **work).ragged_on(size) == ragged


def test_poisson_batches_are_never_ragged():
    """10 units in batches of 4: q = 1/3 and three steps an epoch, also where ragged batches are dropped."""
    solver = SGD(lr=0.1, batch=4, epochs=2, ragged="drop", privacy=DpSgd())
    assert (solver.steps_on(10), solver.rate_on(10)) == (6, 1 / 3)


@pytest.mark.parametrize("work", [{}, {"epochs": 1, "steps": 1}])
def test_either_epochs_or_steps(work):
    with pytest.raises(ValueError, match="needs either epochs or steps, and not both"):
        Adam(lr=0.1, **work)


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0.0}, {"lr": -1.0}, {"batch": 0}, {"steps": 0}, {"clip": 0.0}, {"ema": 1.0}, {"ema": 0.0}, {"state": "lost"}],
)
def test_bounds(wrong):
    with pytest.raises(ValueError):
        SGD(**{"lr": 0.1, "steps": 1} | wrong)


def test_constant():
    assert [Constant().factor(t, 3) for t in range(3)] == [1.0, 1.0, 1.0]


def test_cosine_decay_by_hand():
    """(1 + cos(pi * t / 4)) / 2 is 1, 0.853..., 1/2, 0.146...; with a floor of 1/2 it is squeezed into [1/2, 1]."""
    factors = [CosineDecay().factor(t, 4) for t in range(4)]
    assert factors == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert [CosineDecay(floor=0.5).factor(t, 4) for t in (0, 2)] == pytest.approx([1.0, 0.75])
    assert CosineDecay(floor=0.1).factor(9, 4) == pytest.approx(0.1), "after the last round it stays at the floor"


def test_cosine_decay_warms_up_first():
    """Three rounds of warm-up have 1/4, 2/4, 3/4; half a cosine follows over the other four rounds."""
    decay = CosineDecay(warmup=3)
    assert [decay.factor(t, 7) for t in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert decay.factor(5, 7) == pytest.approx(0.5)
    assert CosineDecay(warmup=2).factor(2, 2) == 1.0, "a run with only warm-up rounds does not divide by zero"


def test_exponential_decay():
    assert [ExponentialDecay(rate=0.5).factor(t, 9) for t in range(3)] == [1.0, 0.5, 0.25]


def test_each_solver_makes_the_optimiser_of_its_name():
    weight = [torch.nn.Parameter(torch.ones(1))]
    kinds = {}
    for solver in (SGD(lr=0.1, steps=1, momentum=0.9, weight_decay=0.2), Adam(lr=0.1, steps=1), AdamW(lr=0.1, steps=1)):
        optimiser = solver.optimiser(weight, 0.05)
        kinds[type(solver)] = type(optimiser)
        assert optimiser.param_groups[0]["lr"] == 0.05, "the scheduled rate"
        assert optimiser.param_groups[0]["weight_decay"] == solver.weight_decay
    assert kinds == {SGD: torch.optim.SGD, Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}
    assert SGD(lr=0.1, steps=1, momentum=0.9).optimiser(weight, 1.0).param_groups[0]["momentum"] == 0.9
    group = Adam(lr=0.1, steps=1, betas=(0.5, 0.6), eps=1e-3).optimiser(weight, 1.0).param_groups[0]
    assert group["betas"] == (0.5, 0.6) and group["eps"] == 1e-3


@spec
class TwiceTrained(FedAvg):
    """An algorithm with two solvers, one of them optional."""

    remote: Solver | None = None


def test_the_solvers_of_an_algorithm_are_its_keys_that_are_solvers():
    local, remote = SGD(lr=0.1, steps=1), Adam(lr=0.2, steps=2)
    assert TwiceTrained(local=local).solvers() == [local]
    assert TwiceTrained(local=local, remote=remote).solvers() == [local, remote]
