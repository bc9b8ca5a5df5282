"""`effuse worth`: a site's own model beside the federated one."""

import json

import pytest

from effuse.core.recipe import Recipe, read_manifest
from effuse.tools.worth import Compared

METRICS = "--metrics '[kid(n=40, encoder=pixels())]'"


@pytest.fixture(scope="module")
def federated(effuse, shrunk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worth") / "run"
    assert effuse(f"run demo {shrunk} --out {folder} --quiet").code == 0
    return folder


def test_a_site_trains_as_its_federation_does_and_keeps_the_result(effuse, federated, tmp_path):
    """100 images of the site: one client, the same solver and rounds; both models on the same test images."""
    answer = effuse(f"worth {federated} --data 'some(digits(), n=100)' --out mine {METRICS} --json")
    assert answer.code == 0, answer.err
    (line,) = answer.json
    assert line["metric"] == "kid_pixels"
    report = json.loads((tmp_path / "mine/worth.json").read_text())
    for name in ("federated", "alone"):
        assert report[name]["kid_pixels"]["value"] == line[name]
        assert report[name]["kid_pixels"]["protocol"]["reference"] == 355  # digits of the test set
    assert line["better"] == ("federated" if line["federated"] < line["alone"] else "alone")
    before, after = (Recipe.restore(read_manifest(run)["recipe"]) for run in (federated, tmp_path / "mine/run"))
    assert (after.clients, after.rounds, after.algorithm.local) == (1, before.rounds, before.algorithm.local)
    assert len(after.data.load("train")) == 100
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_a_private_recipe_is_compared_without_noise(effuse, federated, tmp_path):
    """What does not leave the site needs no noise."""
    budget = "--set 'budget=budget(epsilon=8.0)' --set 'algorithm.local.privacy=dp_sgd()'"
    answer = effuse(f"worth {federated} --data 'some(digits(), n=30)' --out mine {METRICS} {budget} --json")
    assert answer.code == 0, answer.err
    recipe = Recipe.restore(read_manifest(tmp_path / "mine/run")["recipe"])
    assert recipe.budget is None and recipe.algorithm.local.privacy is None


def test_classes_are_matched_by_name(effuse, federated, tmp_path):
    """A site's folder has some of the classes; one that the federation does not know is refused."""
    from PIL import Image

    for name in ("3", "8"):
        for i in range(10):
            path = tmp_path / "scans" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * i).save(path)
    data = """--data 'folder("scans")' --out mine --metrics '[kid(n=20, encoder=pixels())]'"""
    assert effuse(f"worth {federated} {data}").code == 0
    recipe = Recipe.restore(read_manifest(tmp_path / "mine/run")["recipe"])
    assert set(recipe.data.load("train").labels.tolist()) == {3, 8}
    (tmp_path / "scans/8").rename(tmp_path / "scans/eight")
    assert "the federation has no class 'eight'" in effuse(f"worth {federated} {data} --out other").sentence


def test_refusals(effuse, federated):
    assert "has no metrics to compare by" in effuse(f"worth {federated}").sentence
    answer = effuse(f"worth {federated} {METRICS} --set 'algorithm=local_only(local=adam(lr=1e-3, steps=1))'")
    assert "leaves each client a model of its own" in answer.sentence


def test_what_is_better():
    """Less FID is better, more accuracy is; diversity is better near that of real images, so it is not ranked."""
    assert Compared("fid_pixels", 1.0, 2.0).better == "federated"
    assert Compared("accuracy", 0.8, 0.9).better == "alone"
    assert Compared("accuracy", 0.9, 0.9).better == Compared("diversity", 1.0, 2.0).better == "-"
