"""One-shot ensemble: every client's own network, sent once and joined."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from toy import ADAM, ALGORITHMS, SMALL, toy_recipe

from effuse.algorithms.ensemble import OneShotEnsemble
from effuse.core.data import Dataset, Partition
from effuse.core.errors import FederationError, RecipeError
from effuse.core.solvers import Adam, CosineDecay
from effuse.core.spec import spec
from effuse.machines.eager import Eager
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tools.check import check


@spec
class Unequal(Partition):
    """One client with one image, one with ten, and one with the rest."""

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(dataset)), [1, 11])


def members(folder):
    """The members' parameters of a run's model."""
    model = load(folder).model
    names = range(len(model.arch.members))
    return [{k.partition(".")[2]: v for k, v in model.params.items() if k.startswith(f"{n}.")} for n in names]


def test_each_client_sends_a_network_of_its_own_once(tmp_path):
    """Nothing but an architecture goes down, three networks come up, and the second round changes nothing.

    Whoever trains with a tiny rate ends at its first weights, which differ between clients.
    """
    recipe = toy_recipe(algorithm=OneShotEnsemble(local=Adam(lr=1e-12, batch=8, epochs=1)), rounds=2)
    result = run(recipe, tmp_path / "run")
    own = members(tmp_path / "run")
    assert len(own) == 3
    firsts = {own[k]["stages.0.weight"].numpy().tobytes() for k in range(3)}
    assert len(firsts) == 3, "each begins with its own weights"
    arch = SMALL.resolved(recipe.data.load("train").shape)
    size = sum(p.numel() for p in arch.build().parameters())
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert [(r["parameters"]["up"], r["parameters"]["down"]) for r in ledger["per_round"]] == [(3 * size, 0), (0, 0)]
    assert result.parameters == 3 * size and result.pruned is None
    assert [r.noted for r in RunFolder(tmp_path / "run").records()] == [{"members": 3}, None]


def test_networks_go_to_the_clients_in_turn(tmp_path):
    """Four clients, three networks: the fourth trains the first one again."""
    algorithm = ALGORITHMS["ensemble, different networks, a majority"]
    run(toy_recipe(algorithm=algorithm, clients=4, rounds=1), tmp_path / "run")
    arch = load(tmp_path / "run").model.arch
    assert [m.name for m in arch.members] == ["toy_scores", "cnn", "cnn", "toy_scores"] and arch.vote == "majority"


def test_a_client_with_too_few_images_does_not_train(tmp_path):
    """Of clients with 1, 10 and 29 images, two have at least 10; nobody has 30."""
    algorithm = OneShotEnsemble(local=ADAM, least=10)
    recipe = toy_recipe(algorithm=algorithm, partition=Unequal(), rounds=1)
    run(recipe, tmp_path / "two")
    ledger = json.loads((tmp_path / "two" / "ledger.json").read_text())
    assert len(members(tmp_path / "two")) == 2
    assert ledger["training"]["parameters"]["up"] == load(tmp_path / "two").model.params.numel
    with pytest.raises(FederationError, match="no client has 30 images to train on; lower algorithm.least"):
        run(dataclasses.replace(recipe, algorithm=dataclasses.replace(algorithm, least=30)), tmp_path / "none")


def test_only_the_memory_of_a_network_that_was_pruned_is_freed(tmp_path, monkeypatch):
    """The ensemble replaces the run's model as what is delivered, but its members' network is still used."""
    freed = []
    monkeypatch.setattr(Eager, "forget", lambda machine, arch: freed.append(arch.name))
    run(toy_recipe(algorithm=OneShotEnsemble(local=ADAM)), tmp_path / "ensemble")
    assert freed == []
    run(toy_recipe(algorithm=ALGORITHMS["fedphd, pruned in the middle"], rounds=4), tmp_path / "pruned")
    assert freed == ["toy_unet"]


def test_networks_of_images_are_refused_before_any_client_trains(tmp_path):
    recipe = dataclasses.replace(toy_recipe(), algorithm=OneShotEnsemble(local=ADAM))
    with pytest.raises(RecipeError, match="model: toy_unet returns images; an ensemble joins classifiers"):
        run(recipe, tmp_path / "run")


def test_further_rounds_and_kept_moments_have_no_use():
    (warning,) = [w for w in check(toy_recipe(algorithm=OneShotEnsemble(local=ADAM)))["warnings"] if "rounds=2" in w]
    assert warning.endswith("set rounds=1")
    assert not any("rounds" in w for w in check(toy_recipe(algorithm=OneShotEnsemble(local=ADAM), rounds=1))["warnings"])
    for wrong in ({"state": "kept"}, {"schedule": CosineDecay()}):
        with pytest.raises(RecipeError, match="algorithm.local: .*leave out schedule and state"):
            OneShotEnsemble(local=Adam(lr=1e-2, epochs=1, **wrong))


def test_the_ensemble_classifies(tmp_path):
    """Dark and light squares: each client alone learns them in a few epochs."""
    recipe = toy_recipe(algorithm=OneShotEnsemble(local=Adam(lr=3e-2, batch=8, epochs=8)), rounds=1)
    assert run(recipe, tmp_path / "run").metrics["accuracy"].value == 1.0
    x = torch.linspace(-1, 1, 5)[:, None, None, None].expand(-1, 1, 4, 4)
    model, machine = load(tmp_path / "run").model, Eager(torch.device("cpu"))
    assert machine.load(model).eval()(x).shape == (5, 2)
