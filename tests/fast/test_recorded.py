"""Whole federations on recorded steps, replayed on a CPU, against eager ones. Runs of a process share their machines."""

import functools

import pytest
from private_fits import private
from recorded import Speckled, assert_alike, noted_recordings, outcome, play_on_a_cpu, ragged_recipe
from toy import ADAM, ALGORITHMS, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.errors import TrainingError
from effuse.core.privacy import Budget
from effuse.core.solvers import Adam
from effuse.diffusion.heun import Heun
from effuse.fast import speed
from effuse.fast.graph.captured import Captured
from effuse.fast.graph.private import PrivateSteps
from effuse.fast.graph.step import TrainingStep
from effuse.machines.eager import Eager
from effuse.models.resnet import Cnn
from effuse.models.unet import Unet
from effuse.runs import rounds
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.edm import Edm

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


@pytest.fixture
def fast(monkeypatch):
    """Turns recorded machines on and off; three clients at a time."""

    def machines(recipe, place, size):
        if not chosen["fast"]:
            return [Eager(place)]
        found = speed._captured(recipe, place, compiled=False)
        for machine in found[1:]:
            machine.meter = found[0].meter
        return found

    chosen = {"fast": True}
    play_on_a_cpu(monkeypatch)
    monkeypatch.setattr(rounds, "machines_for", machines)
    speed.REUSABLE.clear()
    yield lambda on: chosen.update(fast=on)
    speed.REUSABLE.clear()


@pytest.fixture
def made(monkeypatch):
    """All recorded machines of the test."""
    found, begin = [], Captured.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Captured, "__init__", noted)
    return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The outcome of a recipe, run once by this process however many tests compare with it."""
    return functools.cache(lambda recipe: outcome(recipe, tmp_path_factory.mktemp("eager")))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_recorded_and_eager(name, fast, made, eager, tmp_path, monkeypatch):
    """Three runs on the same machines equal eager runs: the algorithm, FedAvg on mirrored images, and it on moved ones."""
    recipe = ragged_recipe(ALGORITHMS[name])
    fedavg = ragged_recipe(FedAvg(local=ADAM), data=Speckled(flip=True)).changed(["algorithm.local.lr=0.003"])
    # black borders give an autoencoder gradients that are rounding alone, which Adam divides by their own size
    shift = 0 if name.startswith("fedcvae") else 1
    recipes = [recipe, fedavg, recipe.changed(["seed=7", f"data=speckled(flip=True, shift={shift})"])]
    results = []
    with monkeypatch.context() as patch:
        recorded = noted_recordings(patch)
        for i, each in enumerate(recipes):
            recorded.clear()
            results.append(outcome(each, tmp_path / f"fast-{i}"))
            assert len(recorded) == len({*recorded}), "nothing is recorded twice in a run"
    assert made == speed.REUSABLE, "all on the same machines"
    fast(False)
    for each, found in zip(recipes, results):
        assert_alike(found, eager(each))


def test_a_run_that_diverges_leaves_its_machines_to_the_next(fast, made, tmp_path):
    """Clients diverge to infinity. What they leave in buffers and moments does not change the next run."""
    recipe = ragged_recipe(FedAvg(local=Adam(lr=1e-2, batch=8, epochs=1, state="kept")), clients=5)
    with pytest.raises(TrainingError):
        run(recipe.changed(["algorithm.local=sgd(lr=1e30, batch=8, epochs=2)"]), tmp_path / "lost")
    assert made == speed.REUSABLE
    with pytest.raises(TrainingError):
        run(recipe.changed(["algorithm.local.lr=1e30"]), tmp_path / "lost too")
    result = outcome(recipe, tmp_path / "fast")
    assert made == speed.REUSABLE and len(made) == 5
    fast(False)
    assert_alike(result, outcome(recipe, tmp_path / "eager"))


PRIVATE = [
    "fedavg, kept optimiser",
    "fedprox",
    "moon",
    "centralised",
    "feddiffuse, usplit",
    "scaffold, adam",
    "a frozen network and columns",
    "fednh, part of the clients",
]


@pytest.mark.parametrize("name", PRIVATE)
def test_private_algorithms_recorded_and_eager(name, fast, made, tmp_path, monkeypatch):
    """One round of clients of unequal sizes. The noise of a second would be keyed by weights that differ by rounding."""
    budget = Budget(epsilon=1000.0, delta=1e-3, accountant="rdp")
    recipe = ragged_recipe(private(ALGORITHMS[name], clip=0.5), budget=budget, rounds=1)
    with monkeypatch.context() as patch:
        recorded = noted_recordings(patch)
        result = outcome(recipe, tmp_path / "fast")
        assert len(recorded) == len({*recorded}), "nothing is recorded twice"
        assert any(entry[1] is PrivateSteps for entry in recorded)
    fast(False)
    assert_alike(result, outcome(recipe, tmp_path / "eager"))


@pytest.mark.parametrize("budget", [None, Budget(epsilon=1000.0, delta=1e-3, accountant="rdp")], ids=["plain", "private"])
def test_edm_recorded_and_eager(budget, fast, made, tmp_path):
    """Float time steps, and a network that is told of augmentation; the FID is that of Heun's samples."""
    algorithm = FedAvg(local=ADAM) if budget is None else private(FedAvg(local=ADAM), clip=0.5)
    net = Unet(widths=(8,), layers=1, attention=(), middle_attention=False, groups=4)
    recipe = ragged_recipe(
        algorithm, model=net, task=Edm(augment=0.5), sampler=Heun(steps=3, batch=8), budget=budget, rounds=1
    )
    result = outcome(recipe, tmp_path / "fast")
    kinds = {type(step) for machine in made for step in machine._steps.values()}
    assert kinds == {PrivateSteps if budget else TrainingStep}
    fast(False)
    assert_alike(result, outcome(recipe, tmp_path / "eager"))


def test_networks_of_an_algorithm_keep_their_recordings(fast, made, tmp_path):
    """A classifier and two kinds of generators: a second run with another seed records nothing."""
    recipe = toy_recipe(
        algorithm=ALGORITHMS["feddiff, two kinds of networks"], model=Cnn(widths=(4,), groups=2), task=Classify()
    )
    run(recipe, tmp_path / "first")
    before = [machine.captures for machine in made]
    run(recipe.changed(["seed=7"]), tmp_path / "second")
    assert [machine.captures for machine in made] == before
    trained = {key[0] for machine in made for key in machine._steps}
    assert trained == set(recipe.resolved(recipe.data.load("train")).networks) and len(trained) == 3
    run(ragged_recipe(FedAvg(local=ADAM)), tmp_path / "one")
    assert {key[0].name for machine in made for key in machine._steps} == {"toy_unet"}, "the others are freed at once"
