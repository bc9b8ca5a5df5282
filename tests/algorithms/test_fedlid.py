"""FedLID's stand-in: SimCLR's loss at the algorithm's temperature, and what it refuses."""

import dataclasses

import pytest
import torch
from private_fits import private
from toy import ADAM, SMALL, toy_recipe

from effuse.algorithms.fedlid import FedLID, contrasted
from effuse.core.algorithm import Algorithm
from effuse.core.errors import EffuseError, RecipeError
from effuse.core.model import Net
from effuse.core.privacy import Budget
from effuse.core.registry import plain, registry
from effuse.core.task import Batch
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.views import Views, told_apart
from effuse.tools.check import check


def test_its_loss_is_simclrs_at_its_own_temperature():
    task, x = Views(T=0.5), torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.zeros(3), task, task.draw(3, x.shape[1:], torch.zeros(3), torch.Generator().manual_seed(1)))
    net = Net(dataclasses.replace(SMALL, side=4, channels=1, classes=5).build())
    z = net(task.seen(batch))
    found = contrasted(net, batch, {"T": torch.tensor(0.04)})
    torch.testing.assert_close(found, told_apart(z, None, 0.04).mean())
    assert abs(found - told_apart(z, None, 0.5).mean()) > 0.01


def test_its_temperature_is_fedlids():
    assert FedLID(local=ADAM).T == 0.04


def test_it_is_called_a_stand_in():
    """`effuse list` shows this sentence."""
    assert (registry(Algorithm)[plain("fedlid")].__doc__ or "").startswith("A stand-in for FedLID")


def test_a_run_moves_by_its_temperature(tmp_path):
    digests = {run(toy_recipe(algorithm=FedLID(local=ADAM, T=T)), tmp_path / str(T)).weights_sha256 for T in (0.04, 0.5)}
    assert len(digests) == 2


def test_another_task_is_refused():
    recipe = dataclasses.replace(toy_recipe(algorithm=FedLID(local=ADAM)), task=Classify(), model=SMALL)
    with pytest.raises(
        RecipeError, match=r"task: fedlid compares two views of each image; set task=views\(\), not classify"
    ):
        check(recipe)


def test_a_budget_is_refused_also_without_batchnorm(tmp_path):
    """SMALL has GroupNorm only: the loss itself compares images."""
    budget = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
    recipe = toy_recipe(algorithm=private(FedLID(local=ADAM)), budget=budget)
    with pytest.raises(EffuseError, match="the loss contrasted compares the images of a batch"):
        run(dataclasses.replace(recipe, model=SMALL), tmp_path / "run")
