"""FedDiffuse's recipes: the published traffic to the last parameter, and the published table."""

import dataclasses
import json

import pytest
import torch

from effuse.algorithms.centralised import Centralised
from effuse.core.algorithm import Algorithm
from effuse.core.capabilities import Personal
from effuse.core.errors import EffuseError
from effuse.core.solvers import CosineDecay
from effuse.data.partition import Iid
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.encoders import reference_rows
from effuse.metrics.fidelity import FID, KID
from effuse.metrics.mix import ClassMix
from effuse.recipes import find_recipe, find_table
from effuse.recipes.feddiffuse.methods import full
from effuse.recipes.feddiffuse.tuning import (
    CHANGES,
    CHOOSING,
    CHOSEN,
    FINALISTS,
    HALVES,
    START,
    TUNED,
    centralised,
    tuned,
    with_change,
)
from effuse.runs.driver import run
from effuse.tasks.schedules import Linear
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction, training

THETA, ENCODER, BOTTLENECK, DECODER = 2_996_315, 1_280_642, 999_376, 716_297
R = 15
# labels with Fashion-MNIST's sizes need no file
FASHION = ["data=labels(sizes=[6000]*10, side=28, channels=1)", "evaluate.metrics=[]"]


def traffic(method: str, clients: int, *settings: str) -> dict:
    return check(find_recipe(f"feddiffuse.{method}")[1].changed([*FASHION, f"clients={clients}", *settings]))["traffic"]


def published(method: str, k: int) -> int:
    """N of the paper, if every client's first message holds all of theta."""
    return {
        "full": 2 * R * k * THETA,
        "usplit": R * k * THETA + R * (k // 2) * THETA,
        "ulatdec": k * (THETA + (2 * R - 1) * (DECODER + BOTTLENECK)),
        "udec": k * (THETA + (2 * R - 1) * DECODER),
    }[method]


EXACT = {
    ("full", 2): 179_778_900,
    ("full", 5): 449_447_250,
    ("full", 10): 898_894_500,
    ("usplit", 2): 134_834_175,
    ("usplit", 10): 674_170_875,
    ("ulatdec", 2): 105_501_664,
    ("ulatdec", 5): 263_754_160,
    ("ulatdec", 10): 527_508_320,
    ("udec", 2): 47_537_856,
    ("udec", 5): 118_844_640,
    ("udec", 10): 237_689_280,
}


@pytest.mark.parametrize(("method", "clients"), EXACT)
def test_published_traffic(method, clients):
    """Table 1's N. The paper prints, in millions, 449.45, 263.75, 118.85 (sic) for K=5, and 898.89, 674.17, 527.51, 237.69
    for K=10."""
    found = traffic(method, clients)
    assert found["exact"] and found["parameters"]["total"] == EXACT[method, clients] == published(method, clients)
    assert found["bytes"]["total"] == 4 * EXACT[method, clients]
    first, *later = (r["parameters"] for r in found["per_round"])
    assert first["down"] == clients * THETA, "the first contact"
    travels = {"full": THETA, "usplit": THETA, "ulatdec": BOTTLENECK + DECODER, "udec": DECODER}[method]
    assert {r["down"] for r in later} == {clients * travels}


def usplit_odd(e: int) -> int:
    """K = 5: theta to all and from two pairs; the odd client sends a bottleneck with encoder (e times) or decoder."""
    return R * 5 * THETA + R * 2 * THETA + e * (ENCODER + BOTTLENECK) + (R - e) * (DECODER + BOTTLENECK)


def test_published_traffic_of_usplit_with_an_odd_client():
    """N(e) = 340,348,170 + 564,345 e; the paper prints 343.73 million, so e = 6."""
    assert [usplit_odd(e) for e in (0, 6, 15)] == [340_348_170, 343_734_240, 348_813_345]
    totals = set()
    for seed in range(4):
        found = traffic("usplit", 5, f"seed={seed}")
        up = [r["parameters"]["up"] - 2 * THETA for r in found["per_round"]]
        assert set(up) <= {ENCODER + BOTTLENECK, DECODER + BOTTLENECK}
        assert found["parameters"]["total"] == usplit_odd(up.count(ENCODER + BOTTLENECK))
        totals.add(found["parameters"]["total"])
    assert len(totals) > 1, "the seed decides e"


# settings that shorten a run to seconds without changing its protocol
SHRUNK = [
    "data=digits()",
    "model=convnext_unet(dim=4, multipliers=[1, 2])",
    "algorithm.local=adam(lr=1e-4, batch=8, steps=1)",
    "rounds=3",
    "evaluate.metrics=[]",
    "evaluate.grid=2",
    "sampler=ddim(steps=4)",
    "threads=1",
]


METHODS = ("full", "usplit", "ulatdec", "udec", "celeba")
PART = pytest.mark.slow("the traffic of part of the clients is that of USplit's test here, and of the toy algorithms")
PARTS = [pytest.param(method, 4, 3, marks=[] if method == "usplit" else [PART]) for method in METHODS]


@pytest.mark.parametrize(("method", "clients", "cohort"), [*((method, 3, None) for method in METHODS), *PARTS])
def test_a_shrunk_run_sends_what_the_check_says(method, clients, cohort, tmp_path):
    recipe = find_recipe(f"feddiffuse.{method}")[1].changed([*SHRUNK, f"clients={clients}", f"algorithm.cohort={cohort}"])
    predicted = check(recipe)["traffic"]
    run(recipe, tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    for quantity in ("parameters", "bytes"):
        assert ledger["training"][quantity] == predicted[quantity]
        assert [r[quantity] for r in ledger["per_round"]] == [r[quantity] for r in predicted["per_round"]]
    assert ledger["training"]["clients"] == predicted["clients"]


@pytest.mark.parametrize("method", ["full", "usplit", "ulatdec", "udec"])
def test_the_papers_setting(method):
    _, text = find_recipe(f"feddiffuse.{method}")
    _, code = find_recipe(f'feddiffuse.{method}(profile="code")')
    assert (text.clients, text.rounds, text.seed, text.task.distance, code.task.distance) == (5, 15, 2023, "mse", "huber")
    assert text.partition == Iid(), "with the run's seed"
    local = text.algorithm.local
    assert (local.name, local.lr, local.batch, local.epochs, local.state) == ("adam", 1e-4, 128, 5, "fresh")
    sampler = text.sampler
    assert (text.task.schedule.steps, sampler.name, sampler.steps, sampler.clip) == (1000, "ancestral", None, False)
    assert [m.keys[0] for m in text.evaluate.metrics] == ["fid", "fid_clipped", "kid", "class_mix"]
    assert isinstance(text.algorithm, Algorithm) and isinstance(text.algorithm, Personal) == (method in ("ulatdec", "udec"))
    assert text.changed(["task.distance=huber"]) == code, "the profiles have no other difference"


def test_the_celeba_setting():
    _, recipe = find_recipe("feddiffuse.celeba")
    assert (recipe.clients, recipe.rounds, recipe.algorithm.local.batch, recipe.algorithm.local.epochs) == (5, 30, 64, 5)
    crop, resize = recipe.data.transforms
    assert (crop.side, resize.side) == (178, 64)
    assert recipe.data.classes_from == ("Male", "Young", "Black_Hair|Brown_Hair|Blond_Hair|Gray_Hair"), (
        "2 x 2 x 4 = 16 classes"
    )
    assert recipe.evaluate.metrics == (FID(n=5000, reference=5000), KID(n=5000, reference=5000)), "not clipped on CelebA"
    found = check(recipe.changed(["data=labels(sizes=[100]*16, side=64, channels=3)", "evaluate.metrics=[]", "rounds=1"]))
    assert found["parameters"]["total"] == sum(found["parameters"][p] for p in ("encoder", "bottleneck", "decoder"))


# K = 2; 5; 10, of each: IID, label skew, quantity skew
PRINTED = """
full: 39±2 33±1 33±3; 39±4 43±4 23±5; 61±2 64±3 76±11
usplit: 37±3 38±4 55±4; 41±5 61±5 39±9; 62±3 70±8 87±19
ulatdec: 45±13 49±4 54±24; 53±15 72±30 122±138; 70±14 101±83 137±125
udec: 49±16 49±5 78±48; 51±15 75±31 139±135; 72±20 98±67 147±119
"""


def test_table_1_has_every_cell():
    """Four methods, K of 2, 5 and 10, three partitions, with what is printed."""
    cells = {cell.name: cell for cell in find_table("feddiffuse.table1")[1].cells}
    printed = {}
    for line in PRINTED.split("\n")[1:-1]:
        method, _, row = line.partition(": ")
        for clients, some in zip((2, 5, 10), row.split("; ")):
            for skew, one in zip(("iid", "l-skew", "q-skew"), some.split()):
                printed[f"{method}-{clients}-{skew}"] = tuple(map(int, one.split("±")))
    assert {name: (cell.printed, cell.spread) for name, cell in cells.items()} == printed and len(printed) == 36
    assert all(cell.metric == "fid_clipped" for cell in cells.values())
    assert find_table("feddiffuse.table1")[1].also == ("fid", "fid_clipped_pooled", "fid_pooled", "class_mix")


@pytest.mark.parametrize(("profile", "distance"), [("text", "mse"), ("code", "huber")])
def test_cells_differ_by_what_their_labels_say(profile, distance):
    """Table 1 varies clients and partition only, Figure 3 epochs and clients; K = E = 1 has the printed 42.53."""
    tables = {name: find_table(f'feddiffuse.{name}(profile="{profile}")')[1] for name in ("table1", "figure3")}
    for name, table in tables.items():
        for cell in table.cells:
            recipe, labels = find_recipe(cell.recipe)[1].changed(list(cell.settings)), cell.labels
            plain = find_recipe(f"feddiffuse.{labels.get('method', 'full')}")[1]
            expected = [f"clients={labels['clients']}", f"task.distance={distance}"]
            expected += [f"algorithm.local.epochs={labels['epochs']}"] if name == "figure3" else []
            assert dataclasses.replace(recipe, partition=plain.partition) == plain.changed(expected), cell.name
    assert {(c.labels["epochs"], c.labels["clients"], c.printed) for c in tables["figure3"].cells} == {
        (1, 1, 42.53),
        *((epochs, clients, None) for epochs in (1, 2, 3, 5, 8) for clients in (2, 5, 10)),
    }


def test_smoke_numbers_stand_in_for_the_tables_own():
    """fid_clipped_pooled becomes fid_classifier_clipped_pooled; tuning tables map the metrics ending in _ema too."""
    names = {"fid", "fid_clipped", "kid", "fid_pooled", "fid_clipped_pooled"}
    averaged = {"fid", "fid_clipped", "kid", "fid_ema", "fid_clipped_ema", "kid_ema"}
    for table, known in (("table1", names), ("figure3", names), ("tuning", averaged), ("ablation", averaged)):
        scales = find_table(f"feddiffuse.{table}")[1].scales
        first, smoke = next(iter(scales.values())), scales["smoke"]
        assert smoke.metrics == {name: name.replace("id", "id_classifier", 1) for name in known}
        assert first.comparable and not smoke.comparable and not first.metrics
    figure, tuning = (find_table(f"feddiffuse.{name}")[1].cells for name in ("figure3", "tuning"))
    assert {cell.metric for cell in figure} == {"fid_clipped"}, "the printed value stands beside the clipped one only"
    assert {cell.name for cell in tuning if cell.metric != "fid"} == {"server-ema-1"}
    assert next(cell.metric for cell in tuning if cell.name == "server-ema-1") == "fid_ema"


def test_what_is_measured():
    """5,000 images against 5,000 test images, as in the paper, and the class mix of 5,000."""
    counted = [(m.n, getattr(m, "reference", None), getattr(m, "split", None)) for m in full().evaluate.metrics]
    assert counted == [(5000, 5000, "test")] * 3 + [(5000, None, None)]


def test_every_cell_of_every_scale_is_a_valid_recipe():
    """The cells have the published skews; a smoke cell can be checked without files."""
    for name in (
        "feddiffuse.table1",
        'feddiffuse.figure3(profile="code")',
        "feddiffuse.tuning",
        "feddiffuse.finalists",
        "feddiffuse.samplers",
        "feddiffuse.ablation",
    ):
        _, table = find_table(name)
        for cell in table.cells:
            for scale in table.scales.values():
                recipe = find_recipe(cell.recipe)[1].changed([*cell.settings, *scale.settings])
                shown = [key for metric in recipe.evaluate.metrics for key in metric.keys]
                assert scale.metrics.get(cell.metric, cell.metric).removesuffix("_ema") in shown
                assert recipe.clients == cell.labels.get("clients", 5)
    _, table = find_table("feddiffuse.table1")
    cells = {cell.name: cell for cell in table.cells}
    for name in ("full-10-q-skew", "udec-10-l-skew", "usplit-5-iid"):
        settings = [*cells[name].settings, *table.scales["smoke"].settings]
        assert check(find_recipe(cells[name].recipe)[1].changed(settings))["traffic"]["exact"]
    sizes = {"l-skew": [13446, 7913, 12357, 13838, 12446], "q-skew": [529, 13, 46087, 11898, 1473]}
    for skew, expected in sizes.items():
        skewed = cells[f"full-5-{skew}"]
        recipe = find_recipe(skewed.recipe)[1].changed([*skewed.settings, *FASHION, "rounds=1"])
        assert check(recipe)["partition"]["sizes"] == expected


def recipes_of(name: str) -> dict:
    """A table's cells at its first scale."""
    _, table = find_table(name)
    scale = next(iter(table.scales.values()))
    return {c.name: find_recipe(c.recipe)[1].changed([*c.settings, *scale.settings]) for c in table.cells}


def images(recipe) -> int:
    return recipe.rounds * sum(solver.images_on(12_000) for solver in recipe.algorithm.solvers())


def test_tuned_has_the_traffic_and_images_of_full():
    """Network, traffic and images equal those of FULL, also without any change; sampling takes no more evaluations."""
    plain = full()
    assert traffic("tuned", 5) == traffic("full", 5)
    for name in ("", *TUNED):
        recipe = tuned(name)
        assert (recipe.model, recipe.clients, recipe.partition, recipe.rounds) == (plain.model, 5, plain.partition, 15)
        assert images(recipe) == images(plain) and recipe.evaluate == plain.evaluate and recipe.seed == plain.seed
        assert recipe.sampler.count(recipe.task) <= 1000
        assert (recipe == tuned()) == (name == "")
    with pytest.raises(EffuseError, match="is not one of its changes; did you mean velocity"):
        tuned("velocty")


def test_tuned_is_what_was_chosen():
    """The best finalist with its best sampler; no setting occurs twice."""
    best, way = (
        recipes_of("feddiffuse.finalists")["rate-2e-3-and-v-cosine-and-batch-64"],
        recipes_of("feddiffuse.samplers")["none"],
    )
    assert training(way) == training(best) and way == full().changed([*CHOOSING, *settings_of(CHOSEN), "seed=1"])
    assert tuned() == full().changed(settings_of(CHOSEN))
    changed = [setting.partition("=")[0] for settings in TUNED.values() for setting in settings]
    assert len(changed) == len({*changed}), "otherwise a part could not be left out alone"


def settings_of(names) -> list[str]:
    return [setting for name in names for setting in CHANGES[name]]


def test_the_centralised_baseline_has_the_same_tuning_and_sees_as_many_images():
    """One fit of 60,000 images a round is five of 12,000."""
    for setting, federated in (("plain", full()), ("tuned", tuned())):
        pooled = centralised(setting)
        assert pooled.algorithm == Centralised(local=federated.algorithm.local)
        assert dataclasses.replace(pooled, algorithm=federated.algorithm) == federated
        assert pooled.algorithm.local.images_on(60_000) == 5 * federated.algorithm.local.images_on(12_000)


def test_selection_uses_other_seeds_and_other_images():
    """Selection uses exactly the 5,000 test images that the reported numbers do not use."""
    final, tried, finals, ways = (recipes_of(f"feddiffuse.{t}") for t in ("ablation", "tuning", "finalists", "samplers"))
    chosen = tried | finals | ways
    assert not {r.seed for r in final.values()} & {r.seed for r in chosen.values()}
    distances = [{m for r in some.values() for m in r.evaluate.metrics} - {ClassMix(n=5000)} for some in (final, chosen)]
    asked = [{(m.split, m.reference, m.skip) for m in some} for some in distances]
    assert asked == [{("test", 5000, 0)}, {("test", 5000, 5000)}]
    rows = [reference_rows(FashionTest, *choice) for choices in asked for choice in choices]
    assert sorted(torch.cat(rows).tolist()) == list(range(10_000)), "each image once"


class FashionTest:
    """The sizes of Fashion-MNIST, from which reference rows are chosen."""

    data = "fashion_mnist()"
    real = staticmethod(lambda split: range({"train": 60_000, "test": 10_000}[split]))


def test_changes_are_made_in_one_order():
    """A new rate replaces the rate, and its decay replaces the decay; `without-` removes a change."""
    assert with_change(with_change(START, "without-kept"), "ema") == ["decay", "rate-1e-3", "ema", "clip"]
    assert with_change(START, "rate-2e-3") == ["decay", "rate-2e-3", "kept", "clip"]
    assert list(START) == sorted(START, key=list(CHANGES).index)


def test_candidates_differ_from_the_start_by_their_change():
    """All train on the same images; a high rate replaces the rate and the decay of the start."""
    found = recipes_of("feddiffuse.tuning")
    start = found["start-1"]
    for name, recipe in found.items():
        assert images(recipe) == images(start) == 5 * 3 * 12_000 and recipe.sampler.count(recipe.task) <= 1000
        assert (recipe == start) == (name == "start-1")
    local = {name: recipe.algorithm.local for name, recipe in found.items()}
    assert (
        found["plain-1"].changed([*START_SET]) == start
        and found["without-kept-1"].changed(["algorithm.local.state=kept"]) == start
    )
    fast = local["rate-2e-3-1"]
    assert (fast.lr, fast.clip, fast.schedule.warmup, fast.state) == (2e-3, 1.0, 1, "kept")
    assert found["rate-3e-4-1"] == start.changed(["algorithm.local.lr=3e-4"])
    assert (local["ema-1"].ema, local["start-1"].ema) == (0.995, None)
    assert found["batch-64-1"].speed == "graph" and found["v-1"].speed == "compile"


START_SET = (
    "algorithm.local.lr=1e-3",
    "algorithm.local.schedule=cosine_decay()",
    "algorithm.local.state=kept",
    "sampler.clip=True",
)


def test_finalists_are_the_start_with_changes_at_the_paper_s_scale():
    found = recipes_of("feddiffuse.finalists")
    assert list(found) == ["start", *("-and-".join(changes) for changes in FINALISTS)]
    assert found["start"] == full().changed([*START_SET, *CHOOSING, "seed=1"])
    fast = found["rate-2e-3"]
    assert found["rate-2e-3-and-batch-64"] == fast.changed(["algorithm.local.batch=64"])
    assert found["rate-2e-3-and-v-cosine"] == fast.changed(["task.target=v", "task.schedule=cosine()"])
    for recipe in found.values():
        assert images(recipe) == images(full()) and recipe.sampler == Ancestral(batch=1000, clip=True)
    assert list(recipes_of('feddiffuse.finalists(tried=[["ema", "without-kept"]])')) == ["start", "ema-and-without-kept"]
    with pytest.raises(EffuseError, match="'kepd' is not a change; did you mean kept"):
        find_table('feddiffuse.finalists(tried=[["kepd"]])')


def test_samplers_share_one_training():
    found = recipes_of('feddiffuse.samplers(chosen=["decay", "rate-1e-3", "kept", "clip"])')
    assert list(found) == ["clip", "none", "large", "ddim-1000", "ddim-250", "dpm-100"]
    assert found["clip"] == recipes_of("feddiffuse.finalists")["start"]
    assert all(training(r) == training(found["clip"]) and r.sampler.count(r.task) <= 1000 for r in found.values())
    assert not found["none"].sampler.clip and found["large"].sampler.variance == "large"
    with pytest.raises(EffuseError, match="'kepd' is not a change; did you mean kept"):
        find_table('feddiffuse.samplers(chosen=["kepd"])')


def test_the_ablation_leaves_one_thing_out_and_repeats_the_rest_by_seed():
    final = recipes_of("feddiffuse.ablation")
    assert all(final[f"without-{part}-2023"] == tuned(part) for part in (*TUNED, *HALVES))
    start, cosine = final["without-start-2023"], final["without-cosine-2023"]
    assert start.algorithm.local.schedule == CosineDecay() and start.changed(TUNED["decay"]) == tuned(), (
        "that and nothing else"
    )
    assert (cosine.task.target, cosine.task.schedule) == ("v", Linear()) and cosine.changed(
        ["task.schedule=cosine()"]
    ) == tuned()
    for setting, recipe in (("tuned", tuned()), ("plain", full()), ("centralised-tuned", centralised("tuned"))):
        assert all(final[f"{setting}-{seed}"] == recipe.changed([f"seed={seed}"]) for seed in (2023, 2024, 2025))
    assert final["centralised-plain-2023"] == centralised()
    table = find_table("feddiffuse.ablation")[1]
    assert (table.repeats, table.against, table.also) == ("seed", ("setting", "tuned"), ("fid_clipped", "kid", "class_mix"))
    assert all(cell.metric == "fid" and cell.printed is None for cell in table.cells)
    printed = {cell.labels["setting"]: cell.beside for cell in table.cells if cell.beside}
    assert printed == {"plain": {"fid_clipped": 39}}, (
        "Table 1's number, which is of clipped images and of the paper's method"
    )


@pytest.mark.parametrize("cell", ["tuned-2023", "centralised-tuned-2023"])
def test_a_cell_of_the_ablation_runs(cell, tmp_path):
    """The digits, one round."""
    again = Reproduction("feddiffuse.ablation", find_table("feddiffuse.ablation")[1], tmp_path, "smoke")
    plan = again.planned[cell]
    shorter = plan.recipe.changed(["evaluate.metrics=[fid(n=20, encoder=pixels(side=2), reference=20)]", "rounds=1"])
    found = run(shorter, tmp_path / cell).metrics
    assert found.keys() == {"fid_pixels"} and plan.cell.metric == "fid"


def test_the_skews_are_two_losses_on_the_same_seeds(tmp_path):
    """Two partitions, two losses, three seeds: twelve runs. Only the loss differs; the split stays that of the authors."""
    plans = Reproduction(*find_table("feddiffuse.skews"), tmp_path).planned
    assert len(plans) == 12
    assert {(p.cell.labels["partition"], p.cell.printed, p.cell.spread) for p in plans.values()} == {
        ("l-skew", 43, 4),
        ("q-skew", 23, 5),
    }
    for seed in (2023, 2024, 2025):
        mse, huber = (plans[f"q-skew-{loss}-{seed}"].recipe for loss in ("mse", "huber"))
        assert (mse.task.distance, huber.task.distance, mse.seed, mse.ema) == ("mse", "huber", seed, 0.5)
        assert mse.partition == huber.partition == plans["q-skew-mse-2023"].recipe.partition
        assert dataclasses.replace(huber, task=mse.task) == mse
