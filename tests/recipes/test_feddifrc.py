"""FedDifRC's recipes on digits: one federation for guide and classifiers, and from one to the other in a table."""

import pytest

from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.shared.guides import Own, Vectors
from effuse.core.errors import RecipeError
from effuse.recipes import find_recipe, find_table
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction

LITTLE = ["rounds=1", "algorithm.local.epochs=None", "algorithm.local.steps=1", "threads=1"]


@pytest.mark.parametrize(("scenario", "clients"), [("dirichlet", 10), ("nid2", 7)])
def test_guide_and_classifiers_have_the_same_clients(scenario, clients):
    """Same data, partition and seed, so every client trains both networks on its own images."""
    recipes = [find_recipe(f'feddifrc.{name}"{scenario}")')[1] for name in ("guide(", 'guided("vectors", ')]
    guide, guided = (check(recipe)["partition"] for recipe in recipes)
    assert guide == guided and len(guide["sizes"]) == clients
    if scenario == "nid2":
        assert guide["sizes"] == [120] * 7


def test_every_cell_has_its_own_guide(tmp_path):
    table = Reproduction("feddifrc.digits", find_table("feddifrc.digits")[1], tmp_path)
    assert len(table.planned) == 2 * 3 * 6
    for name, plan in table.planned.items():
        algorithm, labels = plan.recipe.algorithm, plan.cell.labels
        assert plan.recipe.seed == labels["seed"]
        if not isinstance(algorithm, FedDifRC):
            assert labels["method"] in ("guide", "fedavg")
            continue
        wanted = {"own_tdcl": (1.0, 0.0), "own_ndcr": (0.0, 1.0)}.get(labels["method"], (1.0, 1.0))
        assert (algorithm.tdcl, algorithm.ndcr) == wanted
        if labels["method"] == "vectors":
            assert isinstance(algorithm.guide, Vectors)
        else:
            before = f"{labels['scenario']}-guide-{labels['seed']}"
            assert algorithm.guide.network.folder == f"{tmp_path}/{before}/model"
            names = list(table.planned)
            assert names.index(before) < names.index(name), "cells are run in order"


def test_from_guide_to_classifier(tmp_path):
    """One step each: the classifier is held to the guide that the run before it has saved."""
    guide = find_recipe("feddifrc.guide")[1].changed([*LITTLE, "evaluate.metrics=[]", "evaluate.grid=0"])
    run(guide, tmp_path / "guide")
    source = f'feddifrc.guided("own", folder="{tmp_path}/guide/model")'
    recipe = find_recipe(source)[1].changed(LITTLE)
    assert isinstance(recipe.algorithm.guide, Own)
    own, vectors = (
        run(recipe, tmp_path / "own"),
        run(find_recipe("feddifrc.guided")[1].changed(LITTLE), tmp_path / "vectors"),
    )
    assert own.weights_sha256 != vectors.weights_sha256
    assert own.traffic.bytes.down > vectors.traffic.bytes.down + 10 * 4 * 600_000, "ten clients are sent the guide"


def test_an_own_guide_needs_a_folder():
    with pytest.raises(RecipeError, match='"own_tdcl" needs the folder of a guide\'s model; run feddifrc.guide'):
        find_recipe('feddifrc.guided("own_tdcl")')
    with pytest.raises(RecipeError, match="seeds from 100 on are for tuning"):
        find_table("feddifrc.digits(seeds=[100])")


LABEL_FREE = ["rounds=1", "threads=1", "algorithm.local.epochs=None", "algorithm.local.steps=1"]


@pytest.mark.parametrize("method", ["fedema", "fedlid", "feddifrc"])
def test_features_without_labels(method, tmp_path):
    """A step each. All three end in an encoder with the same 64 features; FedDifRC's guide knows no class."""
    folder = ""
    if method == "feddifrc":
        guide = find_recipe("feddifrc.guide(labels=False)")[1].changed([*LITTLE, "evaluate.metrics=[]", "evaluate.grid=0"])
        run(guide, tmp_path / "guide")
        folder = f', folder="{tmp_path}/guide/model"'
    recipe = find_recipe(f'feddifrc.labelfree("{method}"{folder})')[1].changed(LABEL_FREE)
    run(recipe, tmp_path / "run")
    arch = load(tmp_path / "run").model.arch
    assert arch.hollow_net()(*arch.example(), give="features").shape == (1, 64)


def test_a_guide_without_labels_needs_a_folder():
    with pytest.raises(RecipeError, match=r"needs the folder of a guide's model; run feddifrc.guide\(labels=False\)"):
        find_recipe('feddifrc.labelfree("feddifrc")')
