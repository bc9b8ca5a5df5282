"""Fed3R: the head that clients' moments give is the ridge regression of all images in one place."""

import dataclasses

import pytest
import torch
from hand import HandImages, HandSplit
from toy import SMALL, TOY_GUIDE, TOY_NOISE, ToyScores, toy_recipe

from effuse.algorithms.fed3r import Fed3R
from effuse.core.errors import RecipeError
from effuse.core.privacy import Budget
from effuse.core.recipe import Evaluate
from effuse.data.partition import NID2, Iid
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.linear_probe import moments, ridge
from effuse.models.headed import Headed
from effuse.models.pretrained import FromPretrained
from effuse.models.resnet import LinearClassifier
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tools.check import check


def recipe(**changes):
    return dataclasses.replace(toy_recipe(algorithm=Fed3R(penalty=0.5), rounds=1), **changes)


def delivered(folder):
    return load(folder).model.params


def test_two_clients_by_hand(tmp_path):
    """Client 0 has x = 1 three times (class 0), client 1 has x = -1 (class 1): mean 0.5, variance 1 - 0.25 = 0.75.

    cov(x, y_0) = 0.75 - 0.75 * 0.5 = 0.375, so w_0 = 0.375 / 0.75 / (1 + 0.5) = 1/3 and b_0 = 0.75 - 1/6 = 7/12.
    Class 1 has -1/3 and 0.25 + 1/6 = 5/12. Either client alone knows one class only.
    """
    run(recipe(data=HandImages(), clients=2, partition=HandSplit(), model=LinearClassifier()), tmp_path / "run")
    found = delivered(tmp_path / "run")
    assert found["head.weight"].flatten().tolist() == pytest.approx([1 / 3, -1 / 3])
    assert found["head.bias"].tolist() == pytest.approx([7 / 12, 5 / 12])


def test_the_head_is_that_of_all_images_whatever_the_skew(tmp_path):
    """Dealt evenly, and by NID2: both heads are the ridge regression of the features of all 40 images."""
    for name, partition in (("iid", Iid()), ("nid2", NID2(biased=2))):
        run(recipe(partition=partition), tmp_path / name)
    opened = load(tmp_path / "iid")
    net = opened.machine.load(opened.model).eval()
    data = opened.recipe.data.load("train")
    with torch.no_grad():
        head = ridge(moments(net(data.floats(data.images), give="features"), data.labels, 2), 0.5)
    for name in ("iid", "nid2"):
        found = delivered(tmp_path / name)
        torch.testing.assert_close(found["head.weight"], head.weight.float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["head.bias"], head.bias.float(), rtol=1e-4, atol=1e-6)


def test_on_the_stages_of_a_guide(tmp_path):
    """The head is as wide as the stages, 16 + 1 channels; the guide's weights stay, and the saved model opens again."""
    trained = toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1)
    run(trained, tmp_path / "guide")
    model = Headed(network=FromPretrained(folder=str(tmp_path / "guide/model")), stages=(0, 1))
    measured = recipe(model=model, evaluate=Evaluate(grid=0, metrics=(Accuracy(),)))
    for engine in ("simulator", "loopback"):
        result = run(measured, tmp_path / engine, engine=engine)
        assert result.metrics["accuracy"].value == 1.0, "dark and light squares are told apart"
    found, guide = delivered(tmp_path / "loopback"), load(tmp_path / "guide").model.params
    assert found["head.weight"].shape == (2, 17)
    assert all(torch.equal(found[f"network.{name}"], value) for name, value in guide.items())
    assert delivered(tmp_path / "simulator").digest() == found.digest()


def test_what_cannot_work_is_refused():
    with pytest.raises(RecipeError, match="model: toy_scores is no classifier with features"):
        check(recipe(model=ToyScores()), "toy")
    with pytest.raises(RecipeError, match="job 'tell' of fed3r does not say that its reply is covered"):
        check(recipe(budget=Budget(epsilon=1.0, delta=1e-5)), "toy")
    assert "set rounds=1" in Fed3R().warnings(2)[0] and not Fed3R().warnings(1)


def test_traffic_is_one_message_of_moments():
    """Up: 16 features give 256 + 2 * 16 + 2 = 290 numbers of 8 bytes; down: the model."""
    found = check(recipe(clients=1, partition=Iid()), "toy")
    assert found["traffic"]["bytes"]["up"] == 8 * 290
    assert SMALL.resolved(recipe().data.load("train").shape).hollow_net().head.in_features == 16
