"""FedDifRC's tables: printed numbers, every method's recipe, the comparison and its tuning."""

import statistics

import pytest

from effuse.core.errors import RecipeError
from effuse.recipes import find_recipe, find_table, tables
from effuse.recipes.feddifrc import printed
from effuse.recipes.feddifrc.comparison import TRIALS
from effuse.runs.driver import run
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction

NUMBERED = [f"feddifrc.table{n}" for n in range(1, 17)]
SHORT = ["rounds=2", "data=some(digits(), 300)", "clients=7", "threads=1"]
METHODS = ("fedprox", "moon", "fedproto", "fednh", "feddisco", "fedcda", "fedrcl", "feddda", "ridge", "feddifrc")


@pytest.mark.parametrize("name", [*NUMBERED, "feddifrc.comparison", "feddifrc.normalised", "feddifrc.tuned"])
def test_every_cell_is_a_recipe_at_every_scale(name, tmp_path):
    """Recipes read no data and no network, so that a table may be listed where neither is."""
    assert name in tables()
    table = find_table(name)[1]
    for scale in table.scales:
        planned = Reproduction(name, table, tmp_path, scale).planned
        assert len(planned) == len(table.cells) >= 5
        recipes = [plan.recipe for plan in planned.values()]
        if scale == "smoke":
            assert all("digits()" in str(recipe.data) for recipe in recipes), "a smoke run needs no files"


def test_printed_numbers_by_their_sums():
    """The averages of Table 1's label shift: 80.41, 82.81, 82.40, 84.29; 60.46, 61.31, 62.25 of its long tails."""
    means = [round(statistics.fmean(row[:4]), 2) for row in printed.TABLE_1.values()]
    assert means == pytest.approx([80.41, 82.81, 82.40, 84.29], abs=0.011)
    tails = [statistics.fmean(printed.TABLE_1[name][4:]) for name in ("none", "tdcl", "both")]
    assert tails == pytest.approx([60.46, 61.31, 62.25], abs=0.006)
    for rows in printed.TABLE_11.values():
        for method, row in rows.items():
            assert statistics.fmean(row[:4]) == pytest.approx(row[4], abs=0.013), method  # FedDisco's is 81.36
    assert [statistics.fmean(row) for row in printed.TABLE_16.values()] == pytest.approx([84.23, 84.29, 84.27], abs=0.011)


def test_tables_agree_where_they_repeat_a_number():
    full = printed.LABELS["cifar10"]["feddifrc"]
    assert full == printed.TABLE_1["both"][:4] == printed.TABLE_16["1-5"]
    assert [row[-1] for row in printed.TABLE_2.values()] == list(full)
    assert printed.TABLE_10["cifar10"]["fedavg"] == printed.TABLE_1["none"][4:]
    assert printed.TABLE_13["tiny"][1] == printed.TABLE_14["feddifrc"][0] == printed.TABLE_15["feddifrc"][2] == 45.28
    assert [printed.TABLE_6["feddifrc"][k] for k in (0, 1, 2)] == [full[0], full[1], full[3]]


def test_a_cell_has_its_printed_number_and_settings():
    """Table 1, TDCL alone at NID1 0.2: 86.03. Table 12: 5 rounds to 20 % with 15 and 52 beside it."""
    cells = {cell.name: cell for cell in find_table("feddifrc.table1")[1].cells}
    assert cells["tdcl-nid1-0.2-1"].printed == pytest.approx(0.8603)
    assert cells["tdcl-nid1-0.2-1"].settings == ("seed=1", "algorithm.ndcr=0.0")
    assert cells["ndcr-tail-10-0"].printed is None, "lost"
    rounds = {cell.name: cell for cell in find_table("feddifrc.table12")[1].cells}["fedavg-cifar10-0"]
    assert (rounds.metric, rounds.printed) == ("rounds_to_0.2", 5)
    assert rounds.beside == {"rounds_to_0.4": 15, "rounds_to_0.8": 52}


def test_the_papers_protocol():
    """ResNet-10 with BatchNorm, 100 rounds of 10 epochs, Stable Diffusion at step 150; 10 clients, or 7 in NID2."""
    recipe = find_recipe('feddifrc.classifier("feddifrc", "cifar10", "nid1-0.05", "paper", "sd")')[1]
    assert (recipe.rounds, recipe.algorithm.local.epochs, recipe.clients, recipe.algorithm.t) == (100, 10, 10, 150)
    assert recipe.model.norm == "batch" and recipe.model.blocks == (1, 1, 1, 1)
    local = recipe.algorithm.local
    assert (local.lr, local.momentum, local.weight_decay, local.batch) == (0.01, 0.9, 1e-5, 64)
    assert recipe.algorithm.guide.name == "stable_diffusion" and recipe.algorithm.guide.stages == (2, 3, 4)
    scaled = find_recipe('feddifrc.classifier("fedcda", "cifar10", "nid2", "scaled")')[1]
    assert (scaled.rounds, scaled.algorithm.local.epochs, scaled.clients, scaled.model.norm) == (40, 5, 7, "group")
    assert scaled.algorithm.warmup == 20, "half of the rounds"
    domains = find_recipe('feddifrc.classifier("fedavg", "office", "domains", "paper", root="pictures")')[1]
    assert domains.clients == 10 and domains.partition.per_domain == (3, 2, 2, 3)
    assert domains.evaluate.metrics[-1].keys[1:] == tuple(f"accuracy_{name}" for name in printed.DOMAINS["office"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_rehearsed(method):
    """On digits and on shapes, with an untrained guide where the method has one."""
    recipe = find_recipe(f'feddifrc.classifier("{method}", "cifar10", "nid2", "smoke", "own")')[1].changed(SHORT)
    assert check(recipe, method)["traffic"]["bytes"]["total"] > 0


@pytest.mark.parametrize("method", ["fedema", "fedlid", "feddifrc"])
def test_every_method_without_labels_can_be_rehearsed(method):
    recipe = find_recipe(f'feddifrc.unlabelled("{method}", scenario="nid2", scale="smoke")')[1].changed(SHORT)
    assert check(recipe, method)["traffic"]["bytes"]["total"] > 0
    with pytest.raises(RecipeError, match="uses no labels" if method != "feddifrc" else "needs labels"):
        find_recipe(
            f'feddifrc.{"classifier" if method != "feddifrc" else "unlabelled"}("{method}")'.replace(
                'unlabelled("feddifrc")', 'unlabelled("fedavg")'
            )
        )


def test_the_guide_is_trained_on_the_partition_of_its_classifiers():
    for scenario in ("nid1-0.05", "nid2", "tail-100"):
        guide = find_recipe(f'feddifrc.own_guide("cifar10", "{scenario}")')[1]
        classifier = find_recipe(f'feddifrc.classifier("fedavg", "cifar10", "{scenario}")')[1]
        assert (guide.clients, guide.partition, guide.seed) == (classifier.clients, classifier.partition, classifier.seed)
    assert find_recipe('feddifrc.own_guide("cifar10", central=True)')[1].algorithm.name == "centralised"


def test_a_guide_without_a_folder_is_refused():
    with pytest.raises(RecipeError, match='"own" needs the folder of a network; run feddifrc.own_guide'):
        find_recipe('feddifrc.classifier("feddifrc", guide="own")')
    with pytest.raises(RecipeError, match="cifar10 has no domains"):
        find_recipe('feddifrc.classifier("fedavg", "cifar10", "domains")')


def test_a_smoke_cell_of_the_comparison_runs(tmp_path):
    """Class vectors on NID2: two rounds, with the figures that a table shows."""
    recipe = find_recipe('feddifrc.classifier("feddifrc", "cifar10", "nid2", "smoke", "vectors")')[1]
    result = run(recipe.changed([*SHORT, "rounds=5"]), tmp_path / "run")
    assert {"accuracy", "class_accuracy", "class_accuracy_lowest"} <= set(result.metrics)
    assert {"accuracy_last5", "accuracy_best"} <= set(result.figures)


def test_tuning_has_equal_trials_on_its_own_seeds_and_images():
    assert {len(values) for _, values in TRIALS.values()} == {5}
    cells = find_table("feddifrc.tuned")[1].cells
    assert all("seed=100" in cell.settings and "True" in cell.recipe for cell in cells)
    recipe = find_recipe('feddifrc.classifier("fedprox", validation=True)')[1]
    assert recipe.data.name == "validation" and recipe.data.share == 0.2
    with pytest.raises(RecipeError, match="seed 3 is for results"):
        find_table("feddifrc.tuned(seed=3)")
    for name in ("comparison", "normalised", "table3"):
        with pytest.raises(RecipeError, match="seeds from 100 on are for tuning"):
            find_table(f"feddifrc.{name}(seeds=[100])")


def test_the_comparison_has_controls_on_every_seed_and_rivals_on_the_first():
    cells = find_table("feddifrc.comparison")[1].cells
    by_seed = {seed: {c.labels["method"] for c in cells if c.labels["seed"] == seed} for seed in range(6)}
    paired = {"guide", "oracle-guide", "fedavg", "fedavg-iid", "both", "vectors", "oracle"}
    assert all(by_seed[seed] == paired for seed in range(1, 6)) and by_seed[0] > paired
    assert {"fedprox", "moon", "fedproto", "fednh", "feddisco", "fedcda", "fedrcl", "feddda", "ridge"} < by_seed[0]
    both = next(c for c in cells if c.name == "nid1-0.05-both-2")
    assert both.recipe.endswith('"own", "{out}/nid1-0.05-guide-2/model")')
    assert next(c for c in cells if c.labels["method"] == "fedavg-iid").recipe.startswith(
        'feddifrc.classifier("fedavg", "cifar10", "iid"'
    )
