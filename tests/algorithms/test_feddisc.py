"""FedDISC by hand: prototypes, centroids, what images are drawn from, and a run with a folder of random components."""

import dataclasses

import pytest
import torch
from tiny_sd import tiny_unclip
from toy import SMALL, ToyImages, toy_recipe

from effuse.algorithms.feddisc import FedDISC, Imagined, Told, centroids, means
from effuse.core.data import Shard
from effuse.core.errors import RecipeError, TrainingError
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.metrics.accuracy import Accuracy
from effuse.models.headed import Embedded
from effuse.models.unclip import UnClip
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.tools.check import check

DISC = FedDISC(labelled=ToyImages(n=6), K=2, each=2, steps=2, prompt="a photo of a {}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Embedded(network=UnClip(folder=str(tiny_unclip(tmp_path_factory.mktemp("tiny") / "unclip"))))


def recipe_of(model, **keys):
    base = toy_recipe(rounds=1, data=ToyImages(n=18))
    evaluate = Evaluate(grid=0, metrics=(Accuracy(),))
    algorithm = dataclasses.replace(DISC, **keys)
    return dataclasses.replace(base, algorithm=algorithm, model=model, task=Classify(), sampler=None, evaluate=evaluate)


def test_prototypes_by_hand():
    """Class 0 has (1, 0) and (0.6, 0.8): the mean (0.8, 0.4) has length 0.894427; class 1 has no image."""
    found = means(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([0, 0]), 2)
    torch.testing.assert_close(found, torch.tensor([[0.894427, 0.447214], [0.0, 0.0]]), rtol=1e-5, atol=0)


def test_centroids_by_hand():
    """0, 2, 10 and 12 have the centroids 1 and 11; two rows are their own."""
    rows = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
    assert sorted(centroids(rows, 2, 0).flatten().tolist()) == [1.0, 11.0]
    assert torch.equal(centroids(rows[:2], 2, 0), rows[:2])


def test_what_images_are_drawn_from():
    """Client 0 has two centroids of class 0, client 1 one of class 1. Each moves a quarter to the class's mean.

    Two images from each: 0.75 * 4 + 0.25 * 8 = 5, 0.75 * 12 + 2 = 11, and 0.75 * 20 + 0.25 * 40 = 25.
    """
    algorithm = dataclasses.replace(DISC, mix=0.25)
    first = Told(torch.tensor([[[4.0], [12.0]], [[0.0], [0.0]]]), torch.tensor([2, 0]), torch.tensor([[8.0], [0.0]]))
    second = Told(torch.tensor([[[0.0], [0.0]], [[20.0], [0.0]]]), torch.tensor([0, 1]), torch.tensor([[0.0], [40.0]]))
    x, labels = algorithm.conditions([first, second], Stream((0,)))
    assert x.flatten().tolist() == [5.0, 5.0, 11.0, 11.0, 25.0, 25.0] and labels.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_a_run_from_a_folder(model, engine, tmp_path):
    """The head alone is the model: 2 x 8 + 2 values. Every centroid gives two images."""
    found = run(recipe_of(model), tmp_path / "run", engine=engine)
    drawn = RunFolder(tmp_path / "run").records()[0].noted["drawn"]
    assert found.parameters == 18 and 3 * 2 <= drawn <= 3 * 2 * 2 * 2
    again = run(recipe_of(model), tmp_path / "again")
    assert found.weights_sha256 == again.weights_sha256 != run(recipe_of(model, level=5), tmp_path / "b").weights_sha256
    head = load(tmp_path / "run").model.params
    assert head["head.weight"].abs().sum() > 0


def test_labels_of_clients_are_not_used(model, tmp_path, monkeypatch):
    """Their clients' labels exchanged, the same centroids are told."""
    a = run(recipe_of(model), tmp_path / "a")
    monkeypatch.setattr(Shard, "labels", property(lambda self: 1 - self.dataset.labels[self.rows]))
    assert run(recipe_of(model), tmp_path / "b").weights_sha256 == a.weights_sha256


def test_noise_changes_what_is_told(model, tmp_path):
    plain, noisy = (run(recipe_of(model, noise=n), tmp_path / str(n)).weights_sha256 for n in (0.0, 1.0))
    assert plain != noisy


def test_traffic_is_known_before_a_run(model):
    """Up, three clients: 2 x 2 x 8 numbers of centroids and 2 x 8 of means in fp32, and two counts of 8 bytes."""
    found = check(recipe_of(model))["traffic"]["bytes"]
    assert found["up"] == 3 * (4 * (32 + 16) + 16)


def test_what_cannot_work_is_refused(model):
    with pytest.raises(RecipeError, match=r"model: FedDISC needs embedded.*, which draws images; got cnn"):
        check(dataclasses.replace(recipe_of(model), model=SMALL))
    with pytest.raises(TrainingError, match="nothing is trained"):
        Imagined(channels=4, side=8, width=8).loss(None, None)
    assert "set rounds=1" in DISC.warnings(2)[0] and not DISC.warnings(1)
