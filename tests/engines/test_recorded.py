"""Whole federations on recorded steps, played on a CPU, against eager ones: runs of one process follow each other on the same machines."""

import json
import types

import pytest
import torch
from toy import ADAM, ALGORITHMS, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.captured import Captured
from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import TrainingError
from effuse.core.machine import Eager
from effuse.core.recipe import Evaluate
from effuse.core.recording import WARM_UP
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.data.dirichlet import QuantitySkew
from effuse.diffusion.samplers import Ddim
from effuse.engines import device, rounds
from effuse.engines.driver import run
from effuse.engines.folder import RunFolder
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


@spec
class Speckled(Source):
    """Seventy images that are their own mirror images nowhere."""

    flip: bool = False

    def load(self, split: Split) -> Dataset:
        n = 70 if split == "train" else 8
        pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
        return Dataset(pixels, torch.arange(n) % 2, ("dark", "light"), flip=self.flip and split == "train")


@pytest.fixture
def fast(monkeypatch):
    """Turns recorded machines on and off; three clients at a time."""
    import diffusers.models  # noqa: F401 (which looks at torch's Stream when it is imported)

    def recorded(self, step, stream):
        for _ in range(WARM_UP):
            step()
        return types.SimpleNamespace(replay=torch.enable_grad()(step))

    def machines(recipe, place, size):
        if not chosen["fast"]:
            return [Eager(place, recipe.task)]
        found = device._captured(recipe, place, compiled=False)
        for machine in found[1:]:
            machine.meter = found[0].meter
        return found

    chosen = {"fast": True}
    monkeypatch.setattr(Captured, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(rounds, "machines_for", machines)
    device.KEPT.clear()
    yield lambda on: chosen.update(fast=on)
    device.KEPT.clear()


@pytest.fixture
def made(monkeypatch):
    """Every recorded machine that was made."""
    found, begin = [], Captured.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Captured, "__init__", noted)
    return found


def recipe_of(algorithm, **changes):
    """Clients of unequal sizes, so that batches are ragged; no dropout, whose masks depend on a batch's padding."""
    values = dict(
        algorithm=algorithm, model=ToyUnet(dropout=0.0), data=Speckled(), partition=QuantitySkew(beta=2.0), rounds=3,
        sampler=Ddim(steps=3, batch=8),
        evaluate=Evaluate(grid=0, every=2, metrics=(FID(n=20, encoder=Pixels(side=2), split="train"),)),
    )  # fmt: skip
    return toy_recipe(**(values | changes))


def outcome(recipe, path):
    """The losses, the counts and the numbers that a run leaves, and its model."""
    result = run(recipe, path)
    lines = [json.loads(x) for x in (path / "rounds.jsonl").read_text().splitlines()]
    counts = [(x["images"], x["evaluations"], x["traffic"]["bytes"]) for x in lines]
    server = RunFolder(path).load_checkpoint().server
    return [x["loss"] for x in lines if x["loss"] is not None], counts, result["metrics"], server.model.params


def assert_alike(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    assert ours[1] == theirs[1]
    for name in theirs[2]:
        assert ours[2][name]["value"] == pytest.approx(theirs[2][name]["value"], rel=1e-2), name
    assert (ours[3] - theirs[3]).norm() < 1e-3 * theirs[3].norm()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_recorded_and_eager(name, fast, made, tmp_path):
    """The algorithm, FedAvg at another rate on mirrored images, the algorithm on those, too: on the same machines, each as by itself."""
    recipe = recipe_of(ALGORITHMS[name])
    fedavg = recipe_of(FedAvg(local=ADAM), data=Speckled(flip=True)).changed(["algorithm.local.lr=0.003"])
    recipes = [recipe, fedavg, recipe.changed(["seed=7", "data=speckled(flip=True)"])]
    ours = [outcome(each, tmp_path / f"fast-{i}") for i, each in enumerate(recipes)]
    assert made == device.KEPT, "all on the same machines"
    fast(False)
    for i, (each, found) in enumerate(zip(recipes, ours)):
        assert_alike(found, outcome(each, tmp_path / f"eager-{i}"))


def test_a_run_that_diverges_leaves_its_machines_to_the_next(fast, made, tmp_path):
    """Clients at a rate that ends in infinity; what they leave in buffers and moments changes nothing for the next run."""
    recipe = recipe_of(FedAvg(local=Adam(lr=1e-2, batch=8, epochs=1, state="kept")), clients=5)
    with pytest.raises(TrainingError):
        run(recipe.changed(["algorithm.local=sgd(lr=1e30, batch=8, epochs=2)"]), tmp_path / "lost")
    assert made == device.KEPT
    with pytest.raises(TrainingError):
        run(recipe.changed(["algorithm.local.lr=1e30"]), tmp_path / "lost too")
    ours = outcome(recipe, tmp_path / "fast")
    assert made == device.KEPT and len(made) == 5
    fast(False)
    assert_alike(ours, outcome(recipe, tmp_path / "eager"))
