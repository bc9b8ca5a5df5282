"""FedDifRC's tables: printed numbers, every method's recipe, the comparison and its tuning."""

import dataclasses
import statistics

import pytest
import torch

from effuse.algorithms.shared.guides import Own
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.errors import RecipeError
from effuse.core.federation import SETUP_T
from effuse.models.resnet import Resnet
from effuse.recipes import find_recipe, find_table, tables
from effuse.recipes.feddifrc import printed
from effuse.recipes.feddifrc.comparison import CHOSEN, TRIALS
from effuse.recipes.feddifrc.methods import BESIDE, NETWORK
from effuse.runs.driver import run
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction
from effuse.transport.refusals import hollow_model
from effuse.transport.rehearsal import Rehearsal

NUMBERED = [f"feddifrc.table{n}" for n in range(1, 17)]
SHAPES = {  # side and classes
    "cifar10": (32, 10),
    "cifar100": (32, 100),
    "tiny": (64, 200),
    "digits5": (32, 10),
    "office": (32, 10),
    "ham10000": (64, 7),
    "eurosat": (64, 10),
}
SHORT = ["rounds=2", "data=some(digits(), 300)", "clients=7", "threads=1"]
RIVALS = ("fedprox", "moon", "fedproto", "fednh", "feddisco", "fedcda", "fedrcl", "feddda", "ridge", *BESIDE)


@pytest.mark.parametrize("name", [*NUMBERED, "feddifrc.comparison", "feddifrc.normalised", "feddifrc.tuned"])
def test_every_cell_is_a_recipe_at_every_scale(name, tmp_path):
    """Recipes read no data and no network, so that a table may be listed where neither is."""
    assert name in tables()
    table = find_table(name)[1]
    for scale in table.scales:
        planned = Reproduction(name, table, tmp_path, scale).planned
        assert len(planned) == len(table.cells) >= 5
        recipes = [plan.recipe for plan in planned.values()]
        for recipe in recipes:
            recipe.algorithm.ready(recipe.clients)
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


def test_fedrcl_beside_a_guide_in_table_6():
    """At NID1 0.05: 82.30 with drawn images, 80.95 held to features, 81.52 with both; FedDisc alone has no recipe."""
    cells = {cell.name: cell for cell in find_table("feddifrc.table6")[1].cells}
    for name, printed_number, drawn, guide in (
        ("fedrcl_drawn", 0.8230, "runs/guide/model", None),
        ("fedrcl_l2", 0.8095, None, "stable_diffusion"),
        ("fedrcl_both", 0.8152, "runs/guide/model", "stable_diffusion"),
    ):
        cell = cells[f"{name}-nid1-0.05-0"]
        algorithm = find_recipe(cell.recipe.replace("{scale}", "paper"))[1].algorithm
        assert cell.printed == pytest.approx(printed_number)
        assert (algorithm.draws and algorithm.draws.folder, algorithm.guide and algorithm.guide.name) == (drawn, guide)
        assert (algorithm.near, algorithm.beta, algorithm.pull, algorithm.t) == (0.6, 1.0, 1.0, 150 if guide else 50)
    with pytest.raises(RecipeError, match='"fedrcl_drawn" needs the folder of a network'):
        find_recipe('feddifrc.classifier("fedrcl_drawn")')


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


@pytest.mark.parametrize("method", [*RIVALS, "feddifrc"])
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


@pytest.mark.parametrize(("scale", "rounds", "epochs"), [("paper", 100, 10), ("scaled", 40, 5)])
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_cifar_without_labels(data, scale, rounds, epochs):
    """10 clients, 100 rounds of 10 epochs in batches of 64 are the paper's; FedEMA's solver is that of its code, for all."""
    for method in ("fedema", "fedlid", "feddifrc"):
        recipe = find_recipe(f'feddifrc.unlabelled("{method}", "{data}", scale="{scale}")')[1]
        local = recipe.algorithm.local
        assert (recipe.clients, recipe.rounds, local.epochs, local.batch) == (10, rounds, epochs, 64)
        assert (local.lr, local.momentum, local.weight_decay, local.ragged) == (0.032, 0.9, 5e-4, "drop")
        assert local.ema == (0.99 if method == "fedema" else None)
        if method != "feddifrc":
            assert (recipe.model.hidden, recipe.model.width, recipe.model.predictor) == (4096, 2048, method == "fedema")


def classifiers():
    """Every method and data set that the tables pair, with the call of one cell."""
    found = {}
    for name in (*NUMBERED, "feddifrc.comparison"):
        for cell in find_table(name)[1].cells:
            if cell.recipe.startswith("feddifrc.classifier("):
                method, data = [word.strip('" ') for word in cell.recipe.partition("(")[2].split(",")[:2]]
                found.setdefault((method, data), cell.recipe.replace("{scale}", "paper"))
    return [pytest.param(call, data, id=f"{method}-{data}") for (method, data), call in sorted(found.items())]


@pytest.mark.parametrize(("call", "data"), classifiers())
def test_every_method_has_the_network_that_it_needs(call, data):
    """Set up on shapes, an untrained guide in the place of a folder's: levels, features, a cosine head, a projection."""
    side, classes = SHAPES[data]
    images = torch.zeros(14, 3, side, side, dtype=torch.uint8)
    shard = Shard.whole(Dataset(images, torch.arange(14) % classes, tuple(map(str, range(classes)))))
    recipe = find_recipe(call)[1]
    untrained = NETWORK.resolved(Shape(side, 3, classes))
    algorithm, model = recipe.algorithm, recipe.model
    if algorithm.name == "fed3r":
        model = dataclasses.replace(model, network=untrained)
    elif algorithm.name == "feddda":
        algorithm = dataclasses.replace(algorithm, guide=untrained)
    elif algorithm.name == "fedrcl_guided":
        seen = Own(network=untrained, reduce="random") if algorithm.guide else None
        algorithm = dataclasses.replace(algorithm, guide=seen, draws=untrained if algorithm.draws else None)
    elif algorithm.name == "feddifrc":
        algorithm = dataclasses.replace(algorithm, guide=Own(network=untrained, reduce="random"))
    recipe = dataclasses.replace(recipe, algorithm=algorithm, model=model.resolved(Shape(side, 3, classes)))
    fed = Rehearsal(recipe, [shard] * recipe.clients)
    fed.begin(SETUP_T, 0)
    recipe.algorithm.setup(hollow_model(recipe), fed)
    if algorithm.name == "moon":
        assert recipe.model.projection in (256, 512), "MOON compares projections"


def test_every_network_of_the_comparison_has_the_same_projection():
    """So that class vectors and means, negative half of the time, can be reached; the ridge's is the guide itself."""
    calls = [c.recipe.replace("{scale}", "scaled") for c in find_table("feddifrc.comparison")[1].cells]
    recipes = [find_recipe(call)[1] for call in calls if "classifier(" in call and '"ridge"' not in call]
    assert {dataclasses.replace(recipe.model, head="linear") for recipe in recipes} == {
        Resnet(blocks=(1, 1, 1, 1), projection=512)
    }
    guides = [recipe.algorithm.guide for recipe in recipes if recipe.algorithm.name == "feddifrc"]
    assert {guide.pool for guide in guides if guide.name == "own"} == {"mean"}
    assert {cell.recipe.count("projected=True") for cell in find_table("feddifrc.table8")[1].cells} == {1}
    alone = find_recipe('feddifrc.classifier("feddifrc", "cifar10", "nid2", "paper", "sd")')[1]
    assert alone.model.projection is None and alone.algorithm.guide.pool == "l2"


@pytest.mark.parametrize(("clients", "batches"), [(10, 3), (20, 3), (30, 3), (50, 5), (100, 10)])
def test_fedcda_compares_ten_clients_at_most_in_table_14(clients, batches, tmp_path):
    """3^17 choices of 50 clients in three batches are refused; 3^10 = 59,049 are below the limit of 100,000."""
    table = Reproduction("feddifrc.table14", find_table("feddifrc.table14")[1], tmp_path)
    recipe = table.planned[f"fedcda-{clients}-0"].recipe
    assert (recipe.clients, recipe.algorithm.batches) == (clients, batches)


def test_label_shift_has_its_ancestors_mask_and_minimum():
    """Who holds an equal share gets no images of later classes, and everybody has ten; also under a long tail."""
    for scenario in ("nid1-0.05", "tail-100"):
        partition = find_recipe(f'feddifrc.classifier("fedavg", "cifar10", "{scenario}", "paper")')[1].partition
        skew = partition if scenario == "nid1-0.05" else partition.then
        assert skew.mask and skew.minimum == 10


@pytest.mark.parametrize(
    ("data", "sizes", "classes", "each", "used"),
    [
        ("cifar10", "equal", 10, 5000, 31_780),
        ("cifar100", "shared", 100, 500, 50_000),
        ("tiny", "shared", 200, 500, 100_000),
    ],
)
def test_sizes_of_nid2(data, sizes, classes, each, used):
    """Equal sizes: 5000 // 11 = 454, times 10 classes and 7 clients. Of 500 they would be 4 x 100 x 7 and 2 x 200 x 7."""
    partition = find_recipe(f'feddifrc.classifier("fedavg", "{data}", "nid2", "paper")')[1].partition
    assert partition.sizes == sizes
    labels = torch.arange(classes).repeat(each)
    images = torch.empty(len(labels), 1, 1, 1, dtype=torch.uint8, device="meta")
    dataset = Dataset(images, labels, tuple(map(str, range(classes))))
    assert sum(len(rows) for rows in partition.split(dataset, 7, 0)) == used
    if sizes == "shared":
        equal = dataclasses.replace(partition, sizes="equal").split(dataset, 7, 0)
        assert sum(len(rows) for rows in equal) == 2_800


def test_fedavg_for_longer_is_longer_at_every_scale(tmp_path):
    """Half as many rounds again: 60 for 40, 8 for 5."""
    table = find_table("feddifrc.comparison")[1]
    for scale, rounds in (("scaled", 60), ("smoke", 8)):
        planned = Reproduction("feddifrc.comparison", table, tmp_path, scale).planned
        assert planned["nid1-0.05-fedavg-longer-0"].recipe.rounds == rounds


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
    trials = {name: {k: v for k, v in TRIALS.items() if k.startswith(f"{name}-")} for name in ("both", "vectors")}
    assert list(trials["both"].values()) == list(trials["vectors"].values()) and len(trials["both"]) == 3
    cells = find_table("feddifrc.tuned")[1].cells
    assert all("seed=100" in cell.settings and "True" in cell.recipe for cell in cells)
    recipe = find_recipe('feddifrc.classifier("fedprox", validation=True)')[1]
    assert recipe.data.name == "validation" and recipe.data.share == 0.2
    with pytest.raises(RecipeError, match="seed 3 is for results"):
        find_table("feddifrc.tuned(seed=3)")
    fewer = find_table('feddifrc.tuned(methods=["both", "vectors"], longer=0.25)')[1]
    assert len(fewer.cells) == 1 + 2 * 3 * 5
    trial = find_recipe(fewer.cells[-1].recipe.replace("{scale}", "scaled"))[1]
    assert trial.rounds == 10 and trial.algorithm.guide.name == "vectors"
    with pytest.raises(RecipeError, match="no trials of 'fedavg'"):
        find_table('feddifrc.tuned(methods=["fedavg"])')
    for name in ("comparison", "normalised", "table3"):
        with pytest.raises(RecipeError, match="seeds from 100 on are for tuning"):
            find_table(f"feddifrc.{name}(seeds=[100])")


def test_the_comparison_takes_what_the_trials_have_chosen(monkeypatch):
    """The oracle has what the own guide has; a control's own setting comes last and wins; trials take nothing."""
    monkeypatch.setitem(CHOSEN, "both", ("algorithm.tdcl=0.3", "algorithm.tau=0.1"))
    cells = {cell.name: cell.settings for cell in find_table("feddifrc.comparison")[1].cells}
    both = ("seed=0", "algorithm.tdcl=0.3", "algorithm.tau=0.1")
    assert cells["nid1-0.05-both-0"] == cells["nid1-0.05-oracle-0"] == both
    assert cells["nid1-0.05-tau-0.2-0"] == (*both, "algorithm.tau=0.2") and cells["nid1-0.05-vectors-0"] == ("seed=0",)
    trial = next(cell for cell in find_table("feddifrc.tuned")[1].cells if cell.labels["method"] == "both-ndcr-0.1")
    assert trial.settings == ("seed=100", "algorithm.ndcr=0.1")


def test_the_comparison_has_controls_on_every_seed_and_rivals_on_the_first():
    cells = find_table("feddifrc.comparison")[1].cells
    by_seed = {seed: {c.labels["method"] for c in cells if c.labels["seed"] == seed} for seed in range(6)}
    paired = {"guide", "fedavg", "fedavg-iid", "both", "vectors", "oracle"}
    assert all(by_seed[seed] == paired for seed in range(1, 6)) and by_seed[0] > {*paired, "oracle-guide"}
    oracle = next(c for c in cells if c.name == "nid1-0.05-oracle-2")
    assert '"{out}/nid1-0.05-oracle-guide-0/model"' in oracle.recipe, "data in one place know no partition"
    assert set(RIVALS) < by_seed[0]
    both = next(c for c in cells if c.name == "nid1-0.05-both-2")
    assert '"own", "{out}/nid1-0.05-guide-2/model", ' in both.recipe
    assert next(c for c in cells if c.labels["method"] == "fedavg-iid").recipe.startswith(
        'feddifrc.classifier("fedavg", "cifar10", "iid"'
    )
