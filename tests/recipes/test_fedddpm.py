"""FedDDPM's recipes: the counts that follow from the paper's setting, and every cell of its tables."""

import json
import math

import numpy as np
import pytest
import torch

from effuse.algorithms.fedddpm import QuickTest
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.recipes import find_recipe, find_table
from effuse.recipes.fedddpm.comparison import BOUNDS, COMPARED, KNOBS, MAIN, RIVALS
from effuse.recipes.fedddpm.methods import SHORT
from effuse.recipes.fedddpm.tables import METHODS
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.warm import difference
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear, signal_and_noise
from effuse.tools.check import check
from effuse.tools.reproduce import Reproduction, value_at

# labels need no files
MNIST = "data=labels(sizes=[5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], side=28, channels=1)"
CIFAR10 = "data=labels(sizes=[5000]*10, side=32, channels=3)"
CIFAR100 = "data=labels(sizes=[500]*100, side=32, channels=3)"
SETS = {"mnist": MNIST, "cifar10": CIFAR10, "cifar100": CIFAR100}
METHODS_OF = {m: "fedddpm" if m == "fedddpm" else f"fedddpm.{m}" for m in (*COMPARED, "fedavg_ema")}


def recipe(method: str, data: str = "mnist", *settings: str, scale: str = "paper"):
    found = find_recipe(f'{METHODS_OF[method]}(data="{data}", scale="{scale}")')[1]
    blind = ["algorithm.test.encoder=pixels()"] if method == "plus" else []
    hollow = [SETS[data]] if scale != "smoke" else []
    return found.changed([*hollow, "evaluate.metrics=[]", *blind, *settings])


@pytest.mark.parametrize(
    ("data", "parameters", "client", "server", "plus", "size", "warmup"),
    [
        ("mnist", 12_098_305, 15, 47, 940, 600, 200),
        ("cifar10", 35_746_307, 40, 395, 2370, 500, 400),
        ("cifar100", 35_746_307, 40, 395, 2370, 500, 600),
    ],
)
def test_sizes_and_updates(data, parameters, client, server, plus, size, warmup):
    """Client updates a round: 600/128 x 3 -> 15, 500/64 x 5 -> 40. Server updates: 6,000/128 -> 47, 5,000/64 x 5 -> 395. The
    correction of FedDDPM+: 47 x 20 = 940, 79 x 30 = 2,370. A is a tenth of the training set.
    """
    one = check(recipe("fedddpm", data, "rounds=1"))
    assert one["parameters"]["total"] == parameters
    assert one["partition"]["sizes"] == [size] * 100
    warm = 100 * warmup * client // {"mnist": 3, "cifar10": 5, "cifar100": 5}[data]
    assert one["steps"] == {"client": warm + 15 * client, "server": server}
    assert check(recipe("plus", data, "rounds=1"))["steps"]["server"] == plus
    classes = max(sum(count > 0 for count in row) for row in one["partition"]["labels"])
    assert classes <= {"mnist": 4, "cifar10": 2, "cifar100": 2}[data]


def test_expected_epochs_of_a_client():
    """T p K: 400 x .15 x 3 = 180, with a warm-up of 200; on CIFAR 600 x .15 x 5 = 450, with 400 and 600."""
    for data, epochs, warmup in (("mnist", 180, 200), ("cifar10", 450, 400), ("cifar100", 450, 600)):
        found = find_recipe(f'fedddpm(data="{data}")')[1]
        assert found.rounds * found.algorithm.cohort * found.algorithm.local.epochs == pytest.approx(epochs)
        assert found.algorithm.warmup.epochs == warmup


def test_the_papers_setting():
    _, found = find_recipe("fedddpm")
    a = found.algorithm
    assert (found.clients, found.rounds, a.cohort, a.weights, a.share, a.part) == (100, 400, 0.15, "uniform", 0.1, 1.0)
    assert (a.local.name, a.local.lr, a.local.batch, a.local.state, a.local.betas) == (
        "adam",
        2e-4,
        128,
        "fresh",
        (0.9, 0.999),
    )
    assert (a.central.lr, a.central.epochs, found.task.schedule.steps, found.task.schedule.rescale) == (5e-5, 1, 500, True)
    assert (a.sampler.name, a.sampler.steps, a.sampler.batch) == ("ancestral", None, 60)
    metric = found.evaluate.metrics[0]
    assert (found.evaluate.every, metric.n, metric.split, str(metric.encoder)) == (10, 10_000, "train", "inception()")
    b = find_recipe("fedddpm.plus")[1].algorithm
    assert (b.central.lr, b.central.epochs) == (2e-4, 20), "the listing's learning rate, as at the clients"
    t = b.test
    assert (t.every, t.size, t.gamma, t.threshold, t.reference, str(t.encoder)) == (10, 500, 0.4, 0.2, "aux", "inception()")


def test_the_ledger_of_warm_up_and_rounds():
    """Before the first round 100 models are sent up, ten at a time; then 15 down and 15 up a round."""
    theta = 12_098_305
    passed = check(recipe("fedddpm", "mnist", "rounds=3"))["traffic"]
    rounds = [(r["phase"], r["parameters"]["up"], r["parameters"]["down"]) for r in passed["per_round"]]
    assert rounds == [("warm-up", 0, 0), ("synthesis", 10 * theta, 0)] * 10 + [("federate", 15 * theta, 15 * theta)] * 3
    assert passed["exact"] and passed["parameters"]["up"] == (100 + 45) * theta


def test_localaug_charges_the_share():
    """6,000 images of 784 bytes, sixty per client, without labels."""
    passed = check(recipe("localaug", "mnist", "rounds=1"))["traffic"]["per_round"]
    sharing = next(r for r in passed if r["phase"] == "sharing")
    assert sharing["bytes"] == {"up": 0, "down": 6000 * 784, "total": 4_704_000}


def test_matched_steps():
    """FedAvg gets the fewest rounds with at least FedDDPM's gradient steps."""
    ours = check(recipe("fedddpm", scale="scaled"))["steps"]
    matched = recipe("fedavg_matched", scale="scaled")
    steps = check(matched)["steps"]["client"]
    a_round = steps // matched.rounds
    assert 0 <= steps - sum(ours.values()) < a_round


def test_controls_take_fedavgs_steps():
    clients = check(recipe("fedavg", scale="scaled"))["steps"]["client"]
    assert check(recipe("centralised", scale="scaled"))["steps"]["server"] == clients
    alone = check(recipe("local_only", scale="scaled"))["steps"]["client"]
    assert alone == pytest.approx(clients, rel=0.01), "each of N clients p T times, as n = p N clients T times"
    aux = check(recipe("aux_only", scale="scaled"))["steps"]["server"]
    assert aux == pytest.approx(clients, rel=0.03), "whole epochs of one large set have fewer ragged batches"


@pytest.mark.parametrize(
    ("rounds", "clients", "p", "K"), [(30, 20, 0.15, 2), (20, 10, 0.4, 1), (7, 20, 0.4, 1), (60, 20, 0.2, 2)]
)
def test_controls_take_fedavgs_steps_at_every_size(rounds, clients, p, K, tmp_path):
    """30 rounds of 3 of 20 clients with 2 epochs: 9 epochs per client, in three rounds; 7 rounds of 8 of 20: 2.8, so 3."""
    table = find_table(
        f"fedddpm.comparison(seeds=[0], size=resized(rounds={rounds}, clients={clients}, warmup=1, p={p}, K={K}))"
    )[1]
    plans = {p.cell.labels["method"]: p for p in Reproduction("x", table, tmp_path, "scaled").planned.values()}
    steps = {
        m: check(plans[m].recipe.changed([MNIST, "evaluate.metrics=[]", "partition=iid()"]))["steps"]
        for m in ("fedavg", "local_only", "aux_only")
    }
    wanted = steps["fedavg"]["client"]
    half_an_epoch = 0.5 * clients * -(-60_000 // clients // 128)
    assert abs(steps["local_only"]["client"] - wanted) <= half_an_epoch
    assert abs(steps["aux_only"]["server"] - wanted) <= half_an_epoch + 0.03 * wanted


def test_the_scaled_profile_keeps_the_structure():
    """About as many warm-up epochs as federated ones, few clients a round, few classes per client, and minutes of time."""
    found = check(small := recipe("fedddpm", scale="scaled"))
    a = small.algorithm
    assert a.warmup.epochs == pytest.approx(small.rounds * a.cohort * a.local.epochs, rel=1 / 3), (
        "as in CIFAR-100's 600 and 450"
    )
    assert max(sum(count > 0 for count in row) for row in found["partition"]["labels"]) <= 4
    steps = sum(found["steps"].values())
    assert steps < 25_000 and found["parameters"]["total"] < 4_000_000


@pytest.mark.parametrize("sigma", [0.5, 2.0, 5.0])
def test_the_scaled_quick_test_stops_falling_curves_in_time(sigma):
    """Curves S e^(-t/tau) and S (1 + t/t0)^-a with noise sigma: four in five stop in the middle third of 30 rounds.

    At most one in ten stops earlier. With the paper's rule almost none stops.
    """
    t = np.arange(30)
    falling = [S * np.exp(-t / tau) for S in (100, 200, 400) for tau in (2, 3, 4, 6, 8)]
    falling += [S * (1 + t / t0) ** -a for S in (100, 200, 400) for t0 in (1, 2, 4) for a in (1, 1.5, 2)]

    def ends(test: QuickTest) -> np.ndarray:
        rng, found = np.random.default_rng(0), []
        for curve in falling * 20:
            average, stop, scores = (
                None,
                False,
                iter(curve[:: test.every] + sigma * rng.standard_normal(len(curve[:: test.every]))),
            )
            rounds = -test.every
            while not stop and (score := next(scores, None)) is not None:
                stop, average = test.judge(average, float(score))
                rounds += test.every
            found.append(rounds if stop else 30)
        return np.array(found)

    ours = ends(find_recipe('fedddpm.plus(scale="scaled")')[1].algorithm.test)
    assert ((ours >= 10) & (ours <= 20)).mean() > 0.8 and (ours < 10).mean() < 0.1 and (ours == 30).mean() < 0.02
    assert (ends(find_recipe("fedddpm.plus")[1].algorithm.test) < 30).mean() < 0.1


TABLES = (
    "fedddpm.headline",
    "fedddpm.table1",
    "fedddpm.table2",
    "fedddpm.table3",
    "fedddpm.necessity",
    "fedddpm.curves",
    "fedddpm.comparison",
    "fedddpm.tuning",
    "fedddpm.causes",
    "fedddpm.warmups",
    "fedddpm.unequal",
)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_scale_is_a_valid_recipe(name, tmp_path):
    table = find_table(name)[1]
    for scale, known in table.scales.items():
        for plan in Reproduction(name, table, tmp_path, scale).planned.values():
            shown = [key for metric in plan.recipe.evaluate.metrics for key in metric.keys]
            wanted = known.metrics.get(plan.cell.metric, plan.cell.metric)
            assert wanted.removesuffix("_ema").removesuffix("_pooled").removesuffix("_auxiliary") in shown
            beside = name == "fedddpm.causes" or (name == "fedddpm.comparison" and plan.cell.labels["method"] == "fedavg")
            averaged = "_ema" in wanted or beside
            assert averaged == (plan.recipe.ema is not None)
            assert ("_pooled" in wanted) == (plan.recipe.evaluate.personal == "pooled")


def test_the_fid_tables_have_every_printed_cell():
    """Six methods, three partitions, two rates; sums of the printed numbers find a wrong digit."""
    for name, total in (("table1", 108.247), ("table2", 984.684), ("table3", 1064.435)):
        cells = find_table(f"fedddpm.{name}")[1].cells
        assert len(cells) == 36 and sum(c.printed for c in cells) == pytest.approx(total)
    spot = {c.name: c.printed for c in find_table("fedddpm.table1")[1].cells}
    assert (spot["fedavg-shard-15"], spot["mofedsam-dir0.1-15"], spot["fedddpm-dir0.3-30"]) == (5.822, 2.797, 1.768)
    spot = {c.name: c.printed for c in find_table("fedddpm.table3")[1].cells}
    assert (spot["fedprox-shard-15"], spot["plus-dir0.1-30"]) == (40.075, 27.643)
    necessity = {c.name: c.printed for c in find_table("fedddpm.necessity")[1].cells}
    assert necessity["aux_only-mnist-shard"] == 4.204 and necessity["fedddpm-cifar100-dir0.3"] == 17.139


def test_no_two_printed_numbers_have_changed_places():
    """Sums weighted by position, 1 to 36, find two exchanged numbers."""
    for name, total in (("table1", 1684.157), ("table2", 16363.94), ("table3", 18017.154)):
        printed = [c.printed for c in find_table(f"fedddpm.{name}")[1].cells]
        assert sum(place * number for place, number in enumerate(printed, 1)) == pytest.approx(total, abs=1e-6)


def test_the_necessity_test_prints_what_the_fid_tables_do():
    """FedAvg and FedDDPM are in both tables, with 15 % a round; the auxiliary set alone is only here."""
    tables = {"mnist": "table1", "cifar10": "table2", "cifar100": "table3"}
    for data, partition, alone in (("mnist", "shard", 4.204), ("cifar10", "dir0.1", 47.332), ("cifar100", "dir0.3", 49.434)):
        known = {c.name: c.printed for c in find_table(f"fedddpm.{tables[data]}")[1].cells}
        found = {c.labels["method"]: c.printed for c in find_table("fedddpm.necessity")[1].cells if c.labels["data"] == data}
        assert found == {"aux_only": alone} | {m: known[f"{m}-{partition}-15"] for m in ("fedavg", "fedddpm")}


def test_a_cell_trains_on_the_data_of_its_table(tmp_path):
    for table, data in (("table1", "mnist()"), ("table2", "cifar10()"), ("table3", "cifar100()")):
        assert {str(p.recipe.data) for p in Reproduction(*find_table(f"fedddpm.{table}"), tmp_path).planned.values()} == {
            data
        }
    for plan in Reproduction(*find_table("fedddpm.necessity"), tmp_path).planned.values():
        assert str(plan.recipe.data) == f"{plan.cell.labels['data']}()"


def test_a_dirichlet_cell_has_the_beta_of_its_name(tmp_path):
    found = set()
    for table in ("table1", "table2", "table3", "necessity", "comparison"):
        for plan in Reproduction(*find_table(f"fedddpm.{table}"), tmp_path).planned.values():
            called, partition = plan.cell.labels["partition"], plan.recipe.partition
            found.add((called, partition.per_client if called == "shard" else (partition.beta, partition.top_up)))
    assert found == {("shard", 2), ("dir0.1", (0.1, True)), ("dir0.3", (0.3, True))}


@pytest.mark.parametrize("method", ["fedavg", "mofedsam", "localaug", "fedddpm"])
def test_the_loss_curves_setting(method):
    """20 clients with 500 images on average, Dirichlet 0.1; the auxiliary set has 2,000 images, 100 per client."""
    found = find_recipe(f'fedddpm.loss_curves(method="{method}")')[1]
    assert (found.clients, found.data.n, str(found.data.source)) == (20, 10_000, "cifar100()")
    assert found.partition.beta == 0.1
    assert method in ("fedavg", "mofedsam") or found.algorithm.share * found.data.n == 2_000
    assert [c.labels["method"] for c in find_table("fedddpm.curves")[1].cells] == [
        "fedavg",
        "mofedsam",
        "localaug",
        "fedddpm",
    ]


def test_the_headline_shares_its_auxiliary_sets(tmp_path):
    """The first cell of a seed makes A in one round. FedDDPM and FedDDPM+ take it over; `aux_only` has ten times as many."""
    plans = Reproduction(*find_table("fedddpm.headline"), tmp_path).planned
    assert list(plans)[:4] == ["auxiliary-0", "fedddpm-0", "fedavg-0", "plus-0"]
    assert [name for name in plans if name.endswith("-1")][:3] == ["auxiliary-1", "fedddpm-1", "fedavg-1"]
    for seed in (0, 1):
        prepared = plans[f"auxiliary-{seed}"].recipe.shaped(Shape(28, 1, 10))
        (folder := tmp_path / f"auxiliary-{seed}").mkdir()
        (folder / "manifest.json").write_text(json.dumps({"recipe": prepared.saved()}))
        taken = {m: difference(plans[f"{m}-{seed}"].recipe, RunFolder(folder)) for m in ("fedddpm", "plus", "aux_only")}
        assert taken == {"fedddpm": None, "plus": None, "aux_only": "algorithm.share=0.1, not 1.0"}
        assert (prepared.rounds, plans[f"fedddpm-{seed}"].recipe.rounds) == (1, 400)
    assert plans["plus-0"].recipe.algorithm.test.reference == "oracle"
    assert plans["fedavg_matched-0"].recipe.rounds == 928
    printed = {name: plan.cell.printed for name, plan in plans.items()}
    for method, known in (("fedavg", "fedavg-shard-15"), ("fedddpm", "fedddpm-shard-15"), ("plus", "plus-shard-15")):
        assert printed[f"{method}-0"] == next(c.printed for c in find_table("fedddpm.table1")[1].cells if c.name == known)


def test_a_cells_partition_and_participation():
    """Table 1, Dirichlet 0.3 with 30 %: 30 of 100 clients a round, with different sizes and none empty."""
    cell = next(c for c in find_table("fedddpm.table1")[1].cells if c.name == "fedavg-dir0.3-30")
    whole = find_recipe(cell.recipe.replace("{scale}", "paper"))[1]
    found = check(whole.changed([*cell.settings, MNIST, "rounds=1", "evaluate.metrics=[]"]))
    sizes = found["partition"]["sizes"]
    assert sum(sizes) == 60_000 and min(sizes) >= 10 and max(sizes) > 3 * min(sizes)
    assert found["traffic"]["parameters"]["up"] == 30 * 12_098_305


def test_all_methods_are_tuned_equally(tmp_path):
    """Three or four values each, with the default among them, on a separate seed, with the comparison's work a round."""
    reported = {plan.recipe.seed for plan in Reproduction(*find_table("fedddpm.comparison"), tmp_path).planned.values()}
    table = find_table("fedddpm.tuning(rate=3e-4, size=resized(rounds=20, warmup=5))")
    plans = list(Reproduction(*table, tmp_path).planned.values())
    for method, (knob, values) in KNOBS.items():
        found = [plan.recipe for plan in plans if plan.cell.labels["method"] == method]
        assert [value_at(r, knob) for r in found] == list(values) and len(values) in (3, 4)
        own = value_at(find_recipe(f'{METHODS_OF[method]}(scale="scaled")')[1], knob)
        assert own in values, method
        assert {r.seed for r in found}.isdisjoint(reported)
        rates = {
            getattr(r.algorithm, solver).lr for r in found for solver in ("local", "warmup") if hasattr(r.algorithm, solver)
        }
        assert knob == "algorithm.local.lr" or rates == {3e-4}, "all use FedAvg's learning rate"
    left = set(COMPARED) - set(KNOBS)
    assert left == {"fedavg_size", "local_only", "aux_only"}, (
        "which are FedAvg by other weights, without averages, and elsewhere"
    )
    matched = {plan.recipe.rounds for plan in plans if plan.cell.labels["method"] == "fedavg_matched"}
    assert matched == {38}, "5 epochs of warm-up for ten are 12.5 of its rounds, 20 corrections 5: with 20 of its own, 37.5"
    for call in ("fedddpm.tuning(seed=2)", "fedddpm.comparison(seeds=[0, 100])"):
        with pytest.raises(RecipeError, match="choose"):
            find_table(call)


def test_tuned_values_are_used_in_the_comparison(tmp_path, monkeypatch):
    """FedAvg's learning rate is used by all clients, warm-ups and some servers; other knobs belong to one method."""
    found = {"fedavg": 3e-4, "fedddpm": 2.5e-4, "plus": 40, "mofedsam": 0.5, "fedavg_ema": 0.7, "centralised": 1e-3}
    monkeypatch.setattr("effuse.recipes.fedddpm.comparison.TUNED", found)
    plans = Reproduction(*find_table("fedddpm.comparison(seeds=[0])"), tmp_path, "scaled").planned
    of = {p.cell.labels["method"]: p.recipe for p in plans.values() if p.cell.labels["partition"] == "shard"}
    assert {r.algorithm.local.lr for m, r in of.items() if m not in ("aux_only", "centralised")} == {3e-4}
    assert {of[m].algorithm.warmup.lr for m in ("fedddpm", "plus", "localaug", "aux_only")} == {3e-4}
    central = {m: of[m].algorithm.central.lr for m in ("fedddpm", "plus", "aux_only")}
    assert central == {"fedddpm": 2.5e-4, "plus": 3e-4, "aux_only": 3e-4}
    assert of["plus"].algorithm.central.epochs == 40
    assert (of["mofedsam"].algorithm.alpha, of["fedavg"].ema, of["centralised"].algorithm.local.lr) == (0.5, 0.7, 1e-3)


def test_controls_take_as_many_steps_as_every_warm_up(tmp_path):
    """Six clients of 240 or 241 digits have four batches of 64. In a round two of them take 12 epochs, 96 steps, and the
    server takes 2 epochs of 1,442 images, 46 steps. A warm-up of 20 epochs takes 6 x 20 x 4 = 480 steps: in total
    480 + 30 x 142 = 4,740, as 50 rounds of FedAvg. 60 epochs: 5,700 and 60 rounds. 200: 9,060 and 95. Real images need
    no warm-up: 4,260.
    """
    plans = list(Reproduction(*find_table("fedddpm.warmups(seeds=[3])"), tmp_path).planned.values())
    costs = {p.cell.name: check(p.recipe)["steps"] for p in plans}
    spent = {name: cost["client"] + cost["server"] for name, cost in costs.items()}
    for warmup, steps, rounds in ((20, 4_740, 50), (60, 5_700, 60), (200, 9_060, 95)):
        assert spent[f"fedddpm-{warmup}-3"] == steps and spent[f"fedavg-matched-{warmup}-3"] == 96 * rounds
    assert spent["fedddpm-longer-20-3"] == 480 + 95 * 142, "the shortest warm-up, with the rounds of the longest FedAvg"
    assert (spent["fedavg-0-3"], spent["fedddpm-real-0-3"]) == (30 * 96, 4_260) and {p.recipe.seed for p in plans} == {3}
    assert len({str(p.recipe.model) for p in plans}) == len({str(p.recipe.sampler) for p in plans}) == 1


def test_the_digits_can_have_a_dirichlet_partition(tmp_path):
    """The same cells with another partition, and no other difference."""
    shards, skewed = (
        Reproduction(*find_table(f"fedddpm.warmups(seeds=[3]{more})"), tmp_path).planned
        for more in ("", ', partition="dir0.1"')
    )
    assert shards.keys() == skewed.keys() and len(shards) == 9
    for name, plan in skewed.items():
        assert str(plan.recipe.partition).startswith("label_skew(beta=0.1") and "shards" in str(
            shards[name].recipe.partition
        )
        assert plan.recipe == shards[name].recipe.changed(["partition=label_skew(beta=0.1, top_up=True)"])


def test_unequal_clients_by_epochs_and_by_steps(tmp_path):
    """Three epochs of batches of 16, which are 3 to 75 steps, or 30 steps, and no other difference."""
    plans = Reproduction(*find_table("fedddpm.unequal"), tmp_path).planned
    assert len(plans) == 18
    sizes = []
    for name, plan in plans.items():
        method, unit, seed = name.split("-")
        local = plan.recipe.algorithm.local
        assert (local.epochs, local.steps) == ((3, None) if unit == "epochs" else (None, 30)) and local.batch == 16
        assert (
            plan.recipe.changed(["algorithm.local.epochs=None", "algorithm.local.steps=30"])
            == plans[f"{method}-steps-{seed}"].recipe
        )
        sizes += [len(shard) for shard in plan.recipe.shards(plan.recipe.data.load("train"))]
    assert (min(sizes), max(sizes)) == (15, 399) and (3 * math.ceil(15 / 16), 3 * math.ceil(399 / 16)) == (3, 75)


def test_every_cause_changes_little(tmp_path):
    """A cell differs from the comparison's in its change, the moving average, and evaluations between rounds only."""
    known = {
        p.cell.name: p.recipe for p in Reproduction(*find_table("fedddpm.comparison"), tmp_path, "scaled").planned.values()
    }
    longer = {"algorithm.warmup.lr=0.0005", "algorithm.warmup.epochs=48"}
    changed = {
        "real": {"algorithm.real=True"},
        "warm-up-48": longer,
        "plus-warm-up-48": longer,
        "warm-up-48-longer": longer | {"rounds=78"},
        "warm-up-rate": {"algorithm.warmup.lr=0.0005"},
        "fedavg-matched-48": {"rounds=158"},
        "longer": {"rounds=78"},
        "none": set(),
        "small-step": {"algorithm.central.lr=1e-05"},
        "averaged-correction": {"algorithm.central.ema=0.9"},
        "plus-real": {"algorithm.real=True"},
    }
    plans = Reproduction(*find_table("fedddpm.causes"), tmp_path, "scaled").planned.values()
    for plan in plans:
        name, seed = plan.cell.labels["change"], plan.cell.labels["seed"]
        method = {"plus": "plus", "fedavg": "fedavg_matched"}.get(name.partition("-")[0], "fedddpm")
        assert plan.recipe == known[f"{method}-shard-{seed}"].changed(
            [*sorted(changed[name]), "ema=0.5", "evaluate.every=0"]
        )
    assert [(p.cell.labels["change"], p.cell.labels["seed"]) for p in plans][:2] == [("real", 0), ("warm-up-48", 0)]
    assert {p.cell.labels["change"] for p in plans} == changed.keys()


def test_the_comparison_can_be_resized(tmp_path):
    name = "fedddpm.comparison(seeds=[7], size=resized(rounds=20, clients=10, warmup=5, p=0.2, K=2), every=5, samples=1000)"
    table = find_table(name)[1]
    cells = Reproduction("x", table, tmp_path, "scaled").planned.values()
    # of the two partitions shards, the last in the alphabet
    plans = {p.cell.labels["method"]: p.recipe for p in sorted(cells, key=lambda p: p.cell.labels["partition"])}
    assert set(plans) == set(COMPARED) >= set(METHODS) and {r.clients for r in plans.values()} == {10}
    assert {r.seed for r in plans.values()} == {7} and plans["fedddpm"].rounds == 20
    # two of ten clients, two epochs each, twenty rounds: eight epochs per client
    assert plans["local_only"].rounds * plans["local_only"].algorithm.local.epochs == 20 * 2 * 2 / 10
    assert plans["fedddpm"].algorithm.warmup.epochs == plans["aux_only"].algorithm.warmup.epochs == 5
    assert plans["fedavg"].evaluate.every == 5 and plans["fedavg"].evaluate.metrics[0].n == 1000
    # two clients of ten take 2 x 2 x 47 steps a round, the warm-up 10 x 5 x 47, a correction 47
    assert plans["fedavg_matched"].rounds == math.ceil((10 * 5 * 47 + 20 * (2 * 94 + 47)) / (2 * 94))
    assert plans["centralised"].algorithm.local.steps == 2 * 94
    assert plans["fedavg_matched"].evaluate.every == 5, "as often as FedAvg, by rounds"
    assert plans["aux_only"].rounds / plans["aux_only"].evaluate.every == 4, "longer rounds, as many evaluations"
    assert len({r.speed for r in plans.values()}) == 1, "so that the cells of a process share recordings"


def test_evaluations_of_the_comparison_and_its_tuning(tmp_path):
    """The first of three seeds under shards is evaluated every ten rounds; FID of 10,000 images, or 5,000 while tuning."""
    compared = list(Reproduction(*find_table("fedddpm.comparison"), tmp_path).planned.values())
    tuned = list(Reproduction(*find_table("fedddpm.tuning"), tmp_path).planned.values())
    looks = {p.cell.name: p.recipe.evaluate.every for p in compared if p.cell.labels["method"] == "fedavg"}
    assert {name: every for name, every in looks.items() if every} == {"fedavg-shard-0": 10} and len(looks) == 6
    assert {p.recipe.evaluate.every for p in tuned} == {0}
    for plans, n in ((compared, 10_000), (tuned, 5_000)):
        fids, mixes = zip(*(p.recipe.evaluate.metrics for p in plans))
        assert {(m.n, m.split, str(m.encoder)) for m in fids} == {(n, "train", "inception()")} and {m.n for m in mixes} == {
            n
        }
    small = Reproduction(*find_table("fedddpm.comparison"), tmp_path, "smoke").planned.values()
    assert {p.recipe.evaluate.metrics[0].split for p in small} == {"train"}


def test_the_most_important_cells_come_first():
    """Four methods under shards with all seeds, then under Dirichlet with one, then rivals and bounds."""
    order = [tuple(c.labels.values()) for c in find_table("fedddpm.comparison(seeds=[4, 5, 6])")[1].cells]
    assert order[:12] == [(m, "shard", seed) for m in MAIN for seed in (4, 5, 6)]
    assert order[12:16] == [(m, "dir0.1", 4) for m in MAIN]
    assert order[16:28] == [(m, "shard", seed) for m in RIVALS for seed in (4, 5, 6)]
    assert order[28:31] == [(m, "shard", 4) for m in BOUNDS]
    assert order[31:39] == [(m, "dir0.1", seed) for m in MAIN for seed in (5, 6)]
    assert order[39:51] == [(m, "dir0.1", seed) for m in RIVALS for seed in (4, 5, 6)]
    assert order[51:55] == [(m, "shard", seed) for m in ("centralised", "local_only") for seed in (5, 6)]
    assert order[-2:] == [("aux_only", "dir0.1", seed) for seed in (5, 6)]  # the most expensive, because of their synthesis
    assert len(order) == len({*order}) == 66


def test_one_control_is_weighted_by_size(tmp_path):
    table = find_table("fedddpm.comparison(seeds=[0])")
    plans = Reproduction(*table, tmp_path).planned.values()
    weights = {p.cell.labels["method"]: getattr(p.recipe.algorithm, "weights", None) for p in plans}
    assert {m for m, w in weights.items() if w == "size"} == {"fedavg_size"}


def test_the_smoke_scale_has_the_same_arithmetic(tmp_path):
    """Three rounds of 2 of 6 clients with 1,442 digits, 4 batches of 64 each.

    The warm-up takes 6 x 2 x 4 = 48 steps, a round 8, a correction 3: 48 / 8 + 3 x (1 + 3 / 8) = 10.1, so 11 matched rounds.
    A third of the clients in three rounds is one epoch for each client alone.
    """
    plans = Reproduction(*find_table("fedddpm.comparison(seeds=[0])"), tmp_path, "smoke").planned.values()
    rounds = {p.cell.labels["method"]: p.recipe.rounds for p in plans}
    assert {m: n for m, n in rounds.items() if n != 3} == {"fedavg_matched": 11, "aux_only": 1, "local_only": 1}
    assert {p.recipe.clients for p in plans} == {6} and {p.recipe.evaluate.metrics[0].n for p in plans} == {200}
    for scale, n in (("scaled", 15), ("smoke", 2)):
        halves = Reproduction(*find_table("fedddpm.tuning"), tmp_path, scale).planned.values()
        assert {p.recipe.rounds for p in halves if p.cell.labels["method"] != "fedavg_matched"} == {n}


def test_the_comparison_does_no_work_twice():
    """One run is evaluated between rounds; centralised runs appear once; training in one place keeps its moments."""
    cells = find_table("fedddpm.comparison(seeds=[4, 5], every=10)")[1].cells
    assert len(cells) == 2 * (2 * len(COMPARED) - 2)
    where = {m: {c.labels["partition"] for c in cells if c.labels["method"] == m} for m in COMPARED}
    assert where.pop("centralised") == {"shard"} and where.pop("fedavg_size") == {"dir0.1"}
    assert all(partitions == {"shard", "dir0.1"} for partitions in where.values())
    looked = [c.name for c in cells if "evaluate.every=10" in c.settings]
    assert "fedddpm-shard-4" in looked and all(name.endswith("-shard-4") for name in looked)
    assert recipe("aux_only").algorithm.central.state == recipe("centralised").algorithm.local.state == "kept"


LONGER = pytest.mark.slow("FedAvg for more rounds, or on more images; FedAvg itself is tested")


@pytest.mark.parametrize("method", [pytest.param(m, marks=[LONGER] if m.startswith("fedavg_") else []) for m in COMPARED])
def test_a_smoke_run_sends_what_the_check_says(method, tmp_path):
    shrunk = ["rounds=2", "threads=1", "evaluate.grid=2", "sampler=ddim(steps=4)", "algorithm.test.threshold=1e-9"]
    if method in ("fedddpm", "plus", "localaug", "aux_only"):
        shrunk += ["algorithm.warmup=adam(lr=1e-3, batch=32, steps=1)", "algorithm.sampler=ddim(steps=4, batch=24)"]
    small = recipe(method, "mnist", *(s for s in shrunk if method == "plus" or "test" not in s), scale="smoke")
    predicted = check(small)["traffic"]
    run(small, tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["per_round"] == predicted["per_round"]
    assert ledger["training"]["bytes"] == predicted["bytes"] and ledger["training"]["clients"] == predicted["clients"]


def test_the_short_sampler_keeps_contrast_drawn_twice():
    """Data with deviation 0.1 around -0.2 keep 0.9 of it with an exact network, and 0.8 when drawn again from samples.

    Fifty uniform steps with full noise keep 0.68 and 0.41.
    """
    task = Denoise(schedule=Linear(steps=500))

    def drawn(mean: float, std: float) -> torch.Tensor:
        def net(x, t, labels):
            a, s = signal_and_noise(task.schedule, x.device)[t].view(-1, 2, 1, 1, 1).double().unbind(1)
            x0 = mean + a * std**2 / (a**2 * std**2 + s**2) * (x - a * mean)
            return ((x - a * x0) / s).float()

        return SHORT.draw(net, task, torch.Size((4000, 1, 1, 1)), None, torch.Generator().manual_seed(1), lambda: None)

    once = drawn(-0.2, 0.1)
    again = drawn(once.mean().item(), once.std().item())
    assert once.std().item() > 0.09 and again.std().item() > 0.08


def test_a_title_describes_the_scale(tmp_path):
    """Scaled: 30 rounds, 4 of 10 clients; smoke: 3 rounds, 2 of 6 clients; tuning takes half of the rounds by default."""

    def title(table: str, scale: str) -> str:
        return Reproduction(*find_table(table), tmp_path, scale).report()["title"]

    scaled = "on mnist: 16 epochs of warm-up, 4 of 10 clients a round, 30 rounds"
    smoke = "on digits: 2 epochs of warm-up, 2 of 6 clients a round, 3 rounds"
    assert title("fedddpm.comparison", "scaled") == f"FedDDPM and rivals, {scaled}"
    assert title("fedddpm.comparison", "smoke") == f"FedDDPM and rivals, {smoke}"
    assert title("fedddpm.tuning", "smoke") == f"FedDDPM and rivals: tuning on seed 100, {smoke}, halved"
    assert title("fedddpm.tuning(size=resized(rounds=7))", "smoke").endswith("7 rounds")
    assert title("fedddpm.causes", "smoke") == f"FedDDPM under shards: variations, {smoke}"
    assert title("fedddpm.table1", "smoke") == "FedDDPM, Table 1: FID on MNIST, participation in per cent, run on digits"
    assert title("fedddpm.table1", "scaled").endswith("in per cent, scaled") and title("fedddpm.table1", "paper").endswith(
        "in per cent"
    )
    for name in ("feddiffuse.table1", "feddiffuse.ablation", "fedphd.table1"):
        assert title(name, "smoke").endswith(", run on digits") and title(name, "paper") == find_table(name)[1].title
    assert title("fedphd.comparison", "smoke").endswith("on digits: a tenth of the rounds")
