"""FedPhD's recipes: the published settings, tables and costs, and runs that send what the check says."""

import json

import pytest

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedphd import FedPhD
from effuse.engines.check import check
from effuse.engines.driver import run
from effuse.engines.reproduce import Reproduction
from effuse.recipes import find_recipe, find_table
from effuse.recipes.fedphd import TELLING

# CIFAR-10's and CelebA's labels need no files
CIFAR = ["data=labels(sizes=[5000]*10, side=32, channels=3)", "evaluate.metrics=[]"]
METHODS = (
    "fedphd",
    "fedphd.fedavg",
    "fedphd.fedavg1",
    "fedphd.fedprox",
    "fedphd.moon",
    "fedphd.scaffold",
    "fedphd.usplit",
    "fedphd.udec",
)
THETA, PRUNED, MIB = 35_746_307, 20_395_598, 2**20


def test_the_papers_setting():
    """20 clients of two classes, a fifth of them a round; 10,000 rounds of one epoch or 2,000 of five; CelebA half of that."""
    for name in METHODS:
        single = name in ("fedphd", "fedphd.fedavg1")
        for data, rounds, solver in (("cifar10", 10_000, (2e-4, 128)), ("celeba", 5_000, (2e-5, 64))):
            _, recipe = find_recipe(f'{name}(data="{data}")')
            assert (recipe.clients, recipe.algorithm.cohort, recipe.partition.per_client) == (
                20,
                0.2,
                2 if data == "cifar10" else 1,
            )
            assert recipe.rounds * recipe.algorithm.local.epochs == rounds and recipe.algorithm.local.epochs == (
                1 if single else 5
            )
            assert (recipe.algorithm.local.lr, recipe.algorithm.local.batch) == solver
            assert (recipe.sampler.name, recipe.sampler.steps, recipe.sampler.batch) == ("ddim", 100, 256)
    _, recipe = find_recipe("fedphd")
    assert isinstance(recipe.algorithm, FedPhD) and recipe.algorithm.warnings(recipe.rounds) == []
    assert (recipe.algorithm.r_e, recipe.algorithm.r_g, recipe.algorithm.edges) == (
        1,
        5,
        2,
    ) and 10 <= recipe.algorithm.R_s <= 100
    _, pooled = find_recipe("fedphd.centralised")
    assert pooled.rounds * -(-50_000 // 128) == pytest.approx(500_000, rel=0.002) and pooled.algorithm.local.ema == 0.9999


def test_the_traffic_of_one_cycle():
    """Five rounds of four clients, pruned at the start: 20 models up and 20 down at the edges, 2 and 2 in the cloud, and 20
    histograms; in MiB of parameters alone, where the paper has those of a file: 0.84 * 77.80 = 65.35.
    """
    _, recipe = find_recipe("fedphd")
    found = check(recipe.changed([*CIFAR, "algorithm.variant=os", "rounds=5"]))
    links, seen = (
        found["traffic"]["links"],
        4 * 2 * 10 * 20,
    )  # every choice is shown the edges: two histograms of ten classes
    assert links == {
        "client-edge": {"up": 20 * 4 * PRUNED + 20 * 40, "down": 20 * 4 * PRUNED + seen},
        "edge-cloud": {"up": 2 * 4 * PRUNED, "down": 2 * 4 * PRUNED},
    }
    assert (
        found["traffic"]["costs"]["paper"]
        == pytest.approx(0.84 * 4 * PRUNED / MIB, rel=1e-5)
        == pytest.approx(65.354, abs=1e-3)
    )
    assert found["after"]["parameters"] == PRUNED and found["figures"]["gmacs"] == 3.436088099
    assert found["partition"]["sizes"] == [2500] * 20 and found["steps"]["client"] == 20 * 20


def test_table_4(tmp_path):
    """Rehearsed: FedAvg's four uploads cost 0.8 * 136.36 = 109.09, five rounds of it 545.4, SCAFFOLD twice, FedPhD 65.35; the printed
    numbers, of files, are 0.12 and 0.16 % more. No mode of FedDiffuse gives the printed two thirds.
    """
    name, table = find_table("fedphd.table4")
    again = Reproduction(name, table, tmp_path)
    V = 4 * THETA / MIB
    expected = {
        "fedavg": 0.8 * V,
        "scaffold": 1.6 * V,
        "fedphd-os": 0.84 * 4 * PRUNED / MIB,
    }
    for plan in again.planned.values():
        if plan.cell.name not in expected:
            continue
        assert again.row(plan)["state"] == "missing"
        again.complete(plan)
        row = again.row(plan)
        assert row["state"] == "done" and row["ours"] == pytest.approx(expected[plan.cell.name], rel=1e-5)
        assert row["ours"] == pytest.approx(row["printed"], rel=0.0018) and row["also"]["symmetric_cost"] > row["ours"]
        assert row["also"]["parameters_m"] == pytest.approx(row["beside"]["parameters_m"], abs=0.1)
    (tmp_path / "fedavg" / "check.json").write_text(json.dumps({"recipe": {}}))
    assert again.row(again.planned["fedavg"])["state"] == "other"


def test_the_printed_tables():
    """Sums of what is printed, so that no digit slips; CelebA's numbers stand in tables of their own."""

    def printed(name):
        return round(sum(cell.printed for cell in find_table(name)[1].cells), 2)

    equal = 16.74 + 17.21 + 24.50 + 17.03 + 22.13 + 26.53 + 2 * 43.87 + 2 * 29.38 + 11.98 + 8.73
    rounds = 21.63 + 22.42 + 2 * 25.38 + 20.43 + 2 * 29.54
    assert printed("fedphd.table1") == round(equal + rounds, 2)
    celeba = 8.32 + 9.55 + 14.89 + 7.48 + 12.56 + 16.33 + 2 * 32.32 + 2 * 17.42 + 6.42 + 5.86
    assert printed('fedphd.table1(data="celeba")') == round(celeba + 11.29 + 13.39 + 2 * 15.42 + 10.88 + 2 * 21.44, 2)
    assert printed("fedphd.table3") == 91.78 and printed('fedphd.table3(data="celeba")') == 45.24
    assert printed("fedphd.table4") == round(109.22 * 3 + 546.10 + 72.82 * 2 + 218.44 + 65.46, 2)
    assert printed("fedphd.table5") == round(25.48 + 26.22 + 28.84 + 49.23 + 22.67 + 17.14 + 17.62 + 23.11 + 22.88 + 25.22 + 45.44
                                             + 23.24 + 17.77 + 18.03, 2)  # fmt: skip
    spot = {cell.name: (cell.printed, cell.spread, cell.beside["IS"]) for cell in find_table("fedphd.table1")[1].cells}
    assert spot["scaffold-computation"] == (43.87, 2.76, 3.12) and spot["moon-rounds"] == (20.43, None, 4.17)


@pytest.mark.parametrize(
    "name",
    ["table1", 'table1(data="celeba", seed=2)', "table3", "table5", "comparison(seeds=[1])", "comparison(epochs=200)"],
)
def test_every_cell_of_every_scale_is_a_valid_recipe(name, tmp_path):
    """At every scale the metric of a cell is measured, all methods see as many images, and what can be pruned is pruned in time."""
    _, table = find_table(f"fedphd.{name}")
    for scale in table.scales:
        again = Reproduction(name, table, tmp_path, scale)
        images = set()
        for plan in again.planned.values():
            recipe = plan.recipe
            shown = [key for metric in recipe.evaluate.metrics for key in metric.keys]
            wanted = again.scale.metrics.get(plan.cell.metric, plan.cell.metric)
            assert wanted.removesuffix("_pooled").removesuffix("_ema") in shown
            assert recipe.algorithm.warnings(recipe.rounds) == []
            central = isinstance(recipe.algorithm, Centralised)
            if plan.cell.labels.get("equal") != "rounds" and not (central and scale == "paper"):
                images.add(recipe.rounds * recipe.algorithm.local.epochs * (1.0 if central else recipe.algorithm.cohort))
        assert len(images) == 1, "the same budget of local epochs"


def test_the_scaled_network_loses_what_the_papers_does(tmp_path):
    """Half the width in groups as wide: 24.5, 42.9, 61.0 and 73.9 % of the parameters, as at full width."""
    again = Reproduction("comparison", find_table("fedphd.comparison")[1], tmp_path, "scaled")

    def left(name: str, *more: str) -> int:
        changes = [*CIFAR, "algorithm.variant=os", "rounds=5", *more]  # what is cut does not matter for how much
        return check(again.planned[f"{name}-0"].recipe.changed(changes))["after"]["parameters"]

    whole = check(again.planned["fedphd-0-0"].recipe.changed([*CIFAR, "rounds=5"]))["after"]["parameters"]
    shares = [round(100 * (1 - left(f"fedphd-{share}") / whole), 1) for share in (25, 44, 61, 74)]
    assert whole == 8_952_067 and shares == [24.5, 42.9, 61.0, 73.9]


def test_the_comparison_repeats_what_is_telling():
    """Six settings come first, then fourteen others, all on the first seed, then the six on two more; none is another under a second
    name."""
    cells = find_table("fedphd.comparison")[1].cells
    names = [cell.labels["method"] for cell in cells]
    assert len(TELLING) == 6 and len({*names}) == 20 and len(cells) == 3 * 6 + 14
    assert [*names[:6], *names[20:]] == [*TELLING] * 3 and not {*names[6:20]} & {*TELLING}
    assert [c.labels["seed"] for c in cells] == [0] * 20 + [1] * 6 + [2] * 6
    recipes = [find_recipe(c.recipe.replace("{scale}", "scaled"))[1].changed(list(c.settings)) for c in cells]
    assert all(one != other for i, one in enumerate(recipes) for other in recipes[:i])
    assert {cell.labels["seed"] for cell in find_table("fedphd.comparison(seeds=[7])")[1].cells} == {7}


# what makes a run a matter of seconds and leaves its protocol alone
SHRUNK = [
    "data=digits()", "model=unet(widths=[8, 16], layers=1, attention=[4], groups=4)", "algorithm.local=adam(lr=1e-4, batch=8, steps=1)",
    "clients=6", "algorithm.cohort=3", "partition=classes(per_client=2)", "rounds=3", "evaluate.metrics=[]", "evaluate.grid=2",
    "sampler=ddim(steps=4)", "threads=1",
]  # fmt: skip
CUT = ["algorithm.r_g=1", "algorithm.R_s=2"]


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, CUT if name == "fedphd" else []) for name in METHODS]
    + [("fedphd", [*CUT, "algorithm.variant=os"]), ('fedphd(data="celeba")', CUT)],
)
def test_a_shrunk_run_sends_what_the_check_says(name, more, tmp_path):
    recipe = find_recipe(name)[1].changed([*SHRUNK, *more])
    predicted = check(recipe)
    result = run(recipe, tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    for quantity in ("parameters", "bytes"):
        assert ledger["training"][quantity] == predicted["traffic"][quantity]
        assert [r[quantity] for r in ledger["per_round"]] == [r[quantity] for r in predicted["traffic"]["per_round"]]
    assert ledger["training"]["clients"] == predicted["traffic"]["clients"]
    assert ledger["training"].get("edges") == predicted["traffic"].get("edges")
    assert result["parameters"] == predicted["after"]["parameters"] and ledger["costs"] == predicted["traffic"]["costs"]
    assert result["figures"] == predicted["figures"] and result["figures"]["gmacs"] > 0, "of the network that is left"


def test_a_smoke_cell_runs_to_its_cut(tmp_path):
    name, table = find_table("fedphd.table3")
    again = Reproduction(name, table, tmp_path, "smoke")
    plan = again.planned["61"]
    again.complete(plan, "cpu")
    row = again.row(plan)
    assert (
        row["state"] == "done"
        and row["ours"] > 0
        and row["also"]["parameters_m"] < 0.7 * check(plan.recipe)["parameters"]["total"] / 1e6
    )
