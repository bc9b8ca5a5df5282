"""Our recipe for CIFAR-10: its limits of images and traffic, its changes and tables, and smoke runs of every kind."""

import dataclasses

import pytest
import torch

from effuse.algorithms.centralised import Centralised
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.data.sources import Digits
from effuse.metrics.fidelity import FID, KID
from effuse.models.unet import Unet
from effuse.pruning.prune import group_weights
from effuse.recipes import find_recipe, find_table
from effuse.recipes.cifar10.methods import AVERAGES, CHANGES, CHOSEN, PASSES, START, cifar10, local_of, with_change
from effuse.recipes.cifar10.tables import OURS, TRIED
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction
from effuse.transport.refusals import refuse

# labels with CIFAR-10's sizes need no file
LABELS = ["data=labels(sizes=[5000]*10, side=32, channels=3)", "evaluate.metrics=[]"]
TABLES = ("controls", "final", "ablation", "methods")
SCALES = ("paper", "scaled", "smoke")


def planned(table: str, out, scale: str | None = None):
    name, found = find_table(table)
    return Reproduction(name, found, out, scale).planned


def sent(recipe, rounds: int) -> int:
    """Bytes over all links in both directions, rehearsed."""
    return check(recipe.changed([*LABELS, f"rounds={rounds}"]))["traffic"]["bytes"]["total"]


def test_a_tenth_of_the_papers_images():
    """FedPhD: 10,000 rounds of an epoch on a fifth of 50,000 images. Ours: 200 passes over them at most, however dealt.

    Half an epoch is 10 steps of 128, a round 5,120 images: 1,953 of them are 9,999,360.
    """
    limit = 10_000 * 50_000 // 5 // 10
    assert limit == PASSES["paper"] * 50_000 == 10_000_000
    for change in ("rate-2e-4", "epochs-5", "short", "server-fedphd-44", "batch-64"):
        recipe = cifar10(with_change(CHOSEN, change))
        assert recipe.rounds * 4 * local_of(recipe).images_on(2_500) == pytest.approx(limit, rel=1e-4), change
    pooled = find_recipe("cifar10.centralised")[1]
    assert isinstance(pooled.algorithm, Centralised) and pooled.rounds * 50_000 == limit


def test_a_tenth_of_the_papers_traffic():
    """FedPhD's paper setting is pruned in round 20 of 10,000; cycles of five rounds after it send equal bytes.

    So the whole run sends what 25 rounds do, and 1,995 times what 30 send beyond them: 7.19 TB, as its full rehearsal says.
    Ours sends equal bytes in every round. A network of 20,118,915 weights: 1,000 rounds, four clients, both ways.
    """
    paper = find_recipe("fedphd")[1]
    assert paper.algorithm.R_s == 20 and paper.rounds == 10_000
    begun, later = sent(paper, 25), sent(paper, 30)
    whole = begun + (paper.rounds - 25) // 5 * (later - begun)
    assert whole == 7_190_060_595_936
    ours = cifar10()
    assert sent(ours, 2) * ours.rounds // 2 == 1_000 * 4 * 2 * 4 * 20_118_915 == 643_805_280_000
    for change in ("rate-2e-4", "short", "labelled", "server-momentum"):
        recipe = cifar10(with_change(CHOSEN, change))
        assert sent(recipe, 2) * recipe.rounds / 2 < whole / 10, change


def test_the_setting_is_fedphds():
    """Clients, classes, cohort, split and number of images of the FID are the paper's; the model sees no class."""
    ours, paper = cifar10(), find_recipe("fedphd")[1]
    for key in ("clients", "partition"):
        assert getattr(ours, key) == getattr(paper, key)
    assert ours.algorithm.cohort == paper.algorithm.cohort and not ours.model.conditional
    assert ours.evaluate.metrics == (FID(n=30_000, split="train"), KID(n=30_000, split="train"))
    assert paper.evaluate.metrics == ours.evaluate.metrics[:1]
    assert cifar10(with_change(CHOSEN, "labelled")).model.conditional


def test_the_average_spans_a_share_of_the_rounds():
    """A tenth of 1,000 rounds is 100: ema = 0.99. FedPhD's cloud renews its model every fifth round: 20 models, 0.95."""
    assert cifar10().ema == pytest.approx(0.99)
    assert cifar10(scale="scaled").ema == pytest.approx(0.9)
    assert cifar10(with_change(CHOSEN, "server-fedphd")).ema == pytest.approx(0.95)
    assert find_recipe("cifar10.centralised")[1].ema == pytest.approx(0.95)
    assert cifar10(with_change(CHOSEN, "without-average-10th")).ema is None


def test_changes_replace_their_family():
    names = ("rate-5e-4", "task-edm", "augment")
    assert with_change(names, "rate-1e-3") == ("rate-1e-3", "task-edm", "augment")
    assert with_change(names, "server-adam") == ("server-adam", *names)
    assert with_change(names, "task-velocity") == ("rate-5e-4", "task-velocity"), "only edm() augments"
    assert with_change(names, "without-task-edm") == ("rate-5e-4",)
    assert with_change(names, "without-rate-5e-4") == names[1:]
    for wrong, why in ((("rate-3",), "'rate-3' is not a change"), (("rate-5e-4", "rate-1e-3"), "two of a family")):
        with pytest.raises(RecipeError, match=why):
            cifar10(wrong)


def test_every_change_changes_the_recipe_and_is_tried():
    """A change that is neither in the start nor tried would be chosen by nobody."""
    recipes = {name: cifar10((name,)) for name in (*CHANGES, *AVERAGES) if name not in ("augment", "rate-2e-4")}
    assert all(recipe != cifar10(()) for recipe in recipes.values())
    assert cifar10(("rate-2e-4",)) == cifar10(()), "the paper's rate"
    known = {*START, *TRIED, "epochs-5", "labelled", "server-fedphd", "server-fedphd-44"}
    assert known >= {*CHANGES, *AVERAGES}


def test_tuning_sees_neither_test_images_nor_result_seeds(tmp_path):
    """It trains on nine tenths of the training images, judges on the other tenth, at a tenth of the images."""
    for plan in planned("cifar10.tuning", tmp_path).values():
        recipe = plan.recipe
        assert recipe.seed >= 100 and recipe.data.name == "validation" and recipe.data.source.name == "cifar10"
        assert bool(recipe.data.source.transforms) == ("flip" in plan.cell.recipe)
        assert recipe.evaluate.metrics == (FID(n=5_000), KID(n=5_000))
        assert recipe.rounds * 4 * local_of(recipe).images_on(2_500) == pytest.approx(1_000_000, rel=2e-3)
    with pytest.raises(RecipeError, match="seed 0 is for results"):
        find_table("cifar10.tuning(seed=0)")
    for table in ("controls", "final", "methods"):
        with pytest.raises(RecipeError, match="are for tuning"):
            find_table(f"cifar10.{table}(seeds=[100])")


@pytest.mark.parametrize("scale", SCALES)
def test_cells_of_one_name_are_one_run(scale, tmp_path):
    """So the tables can share a folder, and what one has trained no other trains again."""
    found: dict = {}
    for table in TABLES:
        for name, plan in planned(f"cifar10.{table}", tmp_path, scale).items():
            assert found.setdefault(name, plan.recipe) == plan.recipe, name
    if scale != "smoke":  # digits have no flips
        assert len({str(recipe) for recipe in found.values()}) == len(found), "and of other names another"
    assert {f"{OURS}-{seed}" for seed in range(3)} <= found.keys()


def test_controls_differ_in_one_thing(tmp_path):
    cells = planned("cifar10.controls", tmp_path)
    ours, iid, pooled = (cells[f"{name}-0"].recipe for name in (OURS, "iid", "centralised"))
    assert dataclasses.replace(iid, partition=ours.partition) == ours
    same = dataclasses.replace(pooled, algorithm=ours.algorithm, rounds=ours.rounds, ema=ours.ema)
    assert same == ours and local_of(pooled) == dataclasses.replace(local_of(ours), state="kept")


def test_the_ablation_leaves_out_every_change(tmp_path):
    cells = planned("cifar10.ablation", tmp_path)
    assert cells.keys() == {f"{OURS}-0", *(f"without-{name}-0" for name in CHOSEN), "task-velocity-0"}
    assert cells["without-average-10th-0"].cell.metric == "fid" and cells[f"{OURS}-0"].cell.metric == "fid_ema"


def test_fedphd_is_regularised_within_the_papers_grid(tmp_path):
    """The paper's grid of lambda is 1e-5 to 1e-2. Q(g) differs by group, so every group must be in it."""
    recipe = planned("cifar10.methods", tmp_path)["fedphd-44-0"].recipe
    network = Unet(widths=(96, 192, 192, 192), groups=16).resolved(Shape(32, 3, 10))
    strengths = group_weights(network, recipe.algorithm.lambda_0).values()
    used = torch.cat([w.flatten() for w in strengths]).unique()
    used = used[used > 0]  # layers that are not pruned have none
    assert used.min() >= 1e-5 and used.max() <= 1e-2
    assert recipe.algorithm.R_s == 20 and recipe.algorithm.warnings(recipe.rounds) == []


def test_methods_train_our_recipe_once(tmp_path):
    """Without a server optimiser it is FedAvg with one epoch; with one, that is a run of its own."""
    assert f"{OURS}-0" in planned("cifar10.methods", tmp_path)
    chosen = list(with_change(START, "server-momentum"))
    cells = planned(f"cifar10.methods(chosen={chosen})", tmp_path)
    assert {"fedavg-e1-0", "fedavg-e5-0", "fedphd-0-0", "fedphd-44-1"} <= cells.keys()
    assert cells["fedavg-e5-0"].recipe.rounds == 200 and local_of(cells["fedavg-e5-0"].recipe).epochs == 5


def test_no_cell_is_refused_at_its_beginning(tmp_path):
    """What a run checks before it computes: samplers fit tasks at the paper's scale, and everything fits on digits."""
    train, test = (Digits().load(split) for split in ("train", "test"))
    for table in (*TABLES, "tuning"):
        for plan in planned(f"cifar10.{table}", tmp_path).values():
            plan.recipe.sampler.ready(plan.recipe.task, plan.recipe.model.conditional)
        for plan in planned(f"cifar10.{table}", tmp_path, "smoke").values():
            refuse(plan.recipe.resolved(train), train, test)


SMOKE = {
    "cifar10.controls": ("two-classes-0", "iid-0", "centralised-0"),
    "cifar10.final": ("labelled-0",),
    "cifar10.ablation": ("without-task-edm-0", "task-velocity-0", "without-average-10th-0"),
    "cifar10.methods": ("fedphd-0-0", "fedphd-44-0", "fedavg-e5-0"),
    "cifar10.tuning": ("server-momentum-100", "server-adam-100", "server-yogi-100", "augment-100", "sampler-dpm-100"),
}
CELLS = [(table, cell) for table, cells in SMOKE.items() for cell in cells]
QUICK = {"two-classes-0", "fedphd-44-0"}
SLOW = pytest.mark.slow("five more rounds on digits of a kind that the quick cells cover in part")


@pytest.mark.parametrize(
    ("table", "cell"), [pytest.param(*one, marks=[] if one[1] in QUICK else [SLOW], id=one[1]) for one in CELLS]
)
def test_a_smoke_run_gives_its_number(table, cell, tmp_path):
    """Five rounds on digits with the classifier's FID: the cell is done, and its number is finite."""
    name, found = find_table(table)
    reproduction = Reproduction(name, found, tmp_path, "smoke")
    plan = reproduction.planned[cell]
    assert reproduction.complete(plan, device="cpu")
    row = reproduction.row(plan)
    assert row["state"] == "done" and 0 < row["ours"] < 1e6
