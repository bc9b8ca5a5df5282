"""The nearest class mean by hand, and under a budget."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from hand import HandImages
from toy import ToyImages, toy_recipe

from effuse.algorithms.nearest_mean import NearestMean, nearest
from effuse.core.errors import FederationError, RecipeError
from effuse.core.model import Model
from effuse.core.privacy import Budget
from effuse.core.recipe import Recipe
from effuse.data.partition import Iid
from effuse.metrics.accuracy import Accuracy
from effuse.models.resnet import Cnn, LinearClassifier
from effuse.runs.driver import run
from effuse.runs.save import load


def recipe(**changes) -> Recipe:
    return dataclasses.replace(toy_recipe(algorithm=NearestMean(noise=0.0), rounds=1), **changes)


def delivered(folder) -> Model:
    return load(folder).model


def test_weights_by_hand(tmp_path):
    """Three white pixels of class 0 and a black one of class 1, at one client: m = 1 and -1, and both biases are -1/2."""
    run(recipe(data=HandImages(), clients=1, partition=Iid()), tmp_path / "run")
    params = delivered(tmp_path / "run").params
    assert params["head.weight"].flatten().tolist() == [1.0, -1.0] and params["head.bias"].tolist() == [-0.5, -0.5]


def test_the_class_of_the_nearest_mean_is_chosen(tmp_path):
    """The means over all clients are those of all images, however these are divided; the answer is that of distances."""
    run(recipe(data=ToyImages(n=60)), tmp_path / "run")
    data = ToyImages(n=60).load("train")
    x = data.floats(data.images).flatten(1)
    means = torch.stack([x[data.labels == c].mean(0) for c in range(len(data.classes))])
    params = delivered(tmp_path / "run").params
    torch.testing.assert_close(params["head.weight"], means, rtol=1e-5, atol=1e-6)
    logits = x @ params["head.weight"].T + params["head.bias"]
    assert torch.equal(logits.argmax(1), torch.cdist(x, means).argmin(1))


def test_a_class_that_nobody_has_is_never_chosen():
    """Its mean would be grey, which is near to many images. Two pixels within [-1, 1] give an answer of -2 - 1 at least."""
    weight, bias = nearest(torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.tensor([4.0, 0.2]))
    assert weight.tolist() == [[1.0, -1.0], [0.0, 0.0]] and bias.tolist() == [-1.0, -4.0]


def test_silence_is_an_error():
    fed = SimpleNamespace(t=3, clients=(0,), ask=lambda job, clients: iter(()))
    with pytest.raises(FederationError, match="round 4: no client told its class means"):
        NearestMean().round(None, fed)


def test_the_budget_is_spent_on_the_means(tmp_path):
    budget = Budget(epsilon=20.0, delta=1e-3, accountant="rdp")
    private = recipe(algorithm=NearestMean(), budget=budget, data=ToyImages(n=400))
    private = dataclasses.replace(private, evaluate=dataclasses.replace(private.evaluate, metrics=(Accuracy(),)))
    result = run(private, tmp_path / "run")
    spent = result.privacy["clients"]["0"]
    assert spent["releases"] == 1 and 19.9 < spent["epsilon"] <= 20.0 and result.metrics["accuracy"].value > 0.9


def test_another_network_and_more_rounds(tmp_path):
    with pytest.raises(RecipeError, match=re.escape("not cnn; set model=linear_classifier()")):
        run(recipe(model=Cnn(widths=(4,), groups=2)), tmp_path / "run")
    assert NearestMean().warnings(1) == [] and "set rounds=1" in NearestMean().warnings(3)[0]
    assert isinstance(recipe().model, LinearClassifier)
