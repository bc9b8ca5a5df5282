"""The benchmarks run, and their counts hold; times are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.recipes import find_recipe
from effuse.runs.driver import run

ROOT = Path(__file__).parent.parent / "benchmarks"
ITSELF = pytest.mark.slow("runs a benchmark in a process; only changes to the benchmark itself are likely to break it")


def measured(script: str, *options: str, quick: bool = True) -> dict:
    command = [sys.executable, str(ROOT / script), "--json", *["--quick"] * quick, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_averaging_holds_few_copies():
    """200 updates of the 3 M model in under 8 copies of it."""
    assert measured("round_overhead.py", "--memory", quick=False)["peak_copies_of_200_updates"] < 8


@ITSELF
def test_an_idle_round_is_timed_beside_a_plain_loop():
    rows = measured("round_overhead.py")["rounds"]
    assert [row["model"] for row in rows] == ["3M", "36M"]
    assert all(row["ratio"] == row["effuse"] / row["plain"] > 0 for row in rows)


@ITSELF
def test_throughput_compares_with_the_right_loops():
    rows = measured("throughput.py", "--only", "digits", "--clients", "2", "--device", "cpu", "--where", "3")["rows"]
    found = {(row["what"], row["variant"]): row for row in rows}
    assert found.keys() == {(what, variant) for what in ("train", "sample") for variant in ("plain", "eager")}
    for (what, _), row in found.items():
        assert row["per_second"] > 0 and row["to_plain"] == row["per_second"] / found[what, "plain"]["per_second"]
    parts = found["train", "eager"]["where"]
    times = {part["name"]: part["times"] for part in parts}
    assert len(parts) == 3 and times["aten::convolution_backward"] == 25  # the network's convolutions
    assert parts[0]["ms"] >= parts[1]["ms"] >= parts[2]["ms"] > 0


@ITSELF
def test_guided_training_and_looking_are_timed():
    """On digits: a loop without a guide, effuse with and without one, and a pass of every image through the guide.

    Eleven passes an image, at the measured rate, against 200 training steps of it.
    """
    rows = measured("guided.py", "--clients", "2", "--images", "100", "--device", "cpu")["rows"]
    trained = [(row["variant"], row["held"]) for row in rows if row["what"] == "train"]
    assert trained == [("plain", False), ("eager", False), ("eager", True)]
    held, looked, share = rows[2]["per_second"], rows[3]["per_second"], rows[4]["of_a_run"]
    assert share == pytest.approx((11 / looked) / (11 / looked + 200 / held))


def test_the_memory_of_a_round_does_not_grow_with_its_clients():
    """10 against 100 clients: at most six copies of the model may wait at a busy server.

    A leak of one copy for every nine clients would add ten.
    """
    few, grown = measured("scaling.py", "--only", "clients")["rows"]
    assert grown["copies"] < few["copies"] + 10, (few, grown)


@pytest.mark.slow("traces two large networks; only a change to how networks are laid out or fused adds operations")
def test_operations_of_a_step_are_counted():
    """The 9 M network has 65 convolutions and 51 normalisations each way, 29 sums of a block or attention with its biases,
    and 7 biases of single convolutions. A pruned network adds only zero padding. The total is at most 610.
    """
    found = measured("operations.py", "9M", "5M", quick=False)
    whole, cut = found["9M"], found["5M"]
    assert whole["forwards"]["convolution"] == whole["backwards"]["convolution_backward"] == 65
    assert whole["forwards"]["norm"] == whole["backwards"]["norm_backward"] == 51 and whole["forwards"]["plus"] == 36
    assert not {"view", "empty", "detach", "slice"} & {*whole["forwards"], *whole["backwards"]}
    assert sum(whole["forwards"].values()) + sum(whole["backwards"].values()) <= 610
    assert cut["forwards"]["constant_pad_nd"] > whole["forwards"]["constant_pad_nd"]
    same = {k: n for k, n in whole["forwards"].items() if k not in ("constant_pad_nd", "clone")}
    assert same == {k: n for k, n in cut["forwards"].items() if k in same}


@ITSELF
def test_edges_are_simulated():
    """Three numbers of edges, four of clients per edge, two selections."""
    found = measured("edge_balance.py")
    assert (found["cycles"], len(found["rows"])) == (100, 24)
    assert all(row["mean"] == pytest.approx(5 * row["per_edge"], rel=0.3) for row in found["rows"]), (
        "every edge has its share"
    )


@ITSELF
def test_the_demo_is_timed_three_ways():
    """The times are not tested, because a short round on a busy machine proves nothing."""
    found = measured("demo_cpu.py")
    assert found["rows"].keys() == {"plain", "eager", "auto"} and found["floor_seconds"] > 0
    assert all(row["images_per_second"] > 0 and row["ratio"] > 0 for row in found["rows"].values())
    assert found["rows"]["plain"]["ratio"] == 1


@ITSELF
def test_kernels_have_floors_where_they_cannot_be_timed():
    """The 36 M network normalises 431 M numbers: five times two bytes each at 4 TB/s take 1.08 ms a step."""
    rows = measured("kernel_times.py", "--only", "36M", quick=False)["rows"]
    assert sum(row["times"] * sum(row["floor"]) for row in rows) == pytest.approx(1077, abs=1)


@ITSELF
def test_linear_attention_has_floors_too():
    """Five attentions of 128 features and images: 784 + 2 x 196 + 2 x 49 positions, 11 passes at 4 TB/s take 115 us."""
    rows = [row for row in measured("kernel_times.py", "--only", "3M", quick=False)["rows"] if "attention" in row["case"]]
    assert sum(row["times"] for row in rows) == 5
    assert sum(row["times"] * sum(row["floor"]) for row in rows) == pytest.approx(114.8, abs=0.1)


@ITSELF
def test_ideas_count_the_products_of_a_step():
    """The CIFAR network: two products in each of 6 attentions and three time layers are 15; with 13 1x1 convolutions, 28."""
    (row,) = measured("ideas.py", "--only", "36M", quick=False)["rows"]
    assert row == {"network": "36M", "products": 80, "kinds": 31, "matrices": 28}


@ITSELF
def test_private_steps_are_compared_with_plain_ones():
    """80 images in batches of 8, q = 1/10: 8 + 1.4 * 2.7 = 11.8 units are 16 in one part; 94 rows at K = 8 are 12 units."""
    found = measured("private_step.py", "--device", "cpu")
    rows = {row["variant"]: row for row in found["rows"]}
    named = ["plain", "private, K=1", "private, K=8", "whole, K=8", "unfolded, K=1", "unfolded, K=8"]
    assert list(rows) == named and found["goals"] == {"1": 2.5, "8": 1.5}
    assert [row["physical"] for row in rows.values()] == [8, 16, 12, 16, 16, 12]
    for row in rows.values():
        assert row["to_plain"] == row["ms"] / rows["plain"]["ms"] > 0 and row["a_row"] == row["to_plain"] / row["K"]


@ITSELF
def test_filters_see_the_same_images(tmp_path):
    """Of 1,442 images 1 % is 14. A run of one epoch: accuracies mean nothing, the numbers of images do."""
    settings = ["algorithm.filter=fmf(gamma=0.0)", "rounds=1", "clients=2", "partition=iid()"]
    recipe = find_recipe('feddiff(scale="smoke")')[1].changed(settings)
    run(recipe, tmp_path / "run")
    rows = {row["rule"]: row["images"] for row in measured("filters.py", str(tmp_path / "run"))["rows"]}
    assert rows["everything"] == 1442 and rows["fmf 0.01"] == rows["random 0.01"] == 1428 and 0 < rows["oracle"] < 1442


@ITSELF
def test_hostile_clients_are_refused_or_named():
    """One round, two rules: minus the model is accepted and named by the log, a weight of 1e300 is refused."""
    rows = {(row["rule"], row["attack"]): row for row in measured("hostile.py")["rows"]}
    assert rows.keys() == {(rule, attack) for rule in ("mean", "median") for attack in ("minus", "1e300")}
    for (_, attack), row in rows.items():
        assert (row["refused"], row["named"]) == ((1.0, None) if attack == "1e300" else (0.0, 1.0)) and row["blamed"] == 0
        assert 0 < row["lowest"] <= row["accuracy"] <= row["highest"] < 1


@ITSELF
def test_two_checkouts_train_in_turns():
    """This checkout beside itself."""
    here = str(ROOT.parent)
    (row,) = measured("two_checkouts.py", here, here)["rows"]
    assert (row["network"], row["variant"], len(row["ratios"])) == ("digits", "eager", 3)
    assert row["ratio"] == sorted(row["ratios"])[1] > 0


@ITSELF
def test_a_page_is_written_and_opened():
    """A small run, and the demo with two rounds: a page after each, and one at the end."""
    found = measured("report.py")
    assert found["page_mb"] > 0.1 and found["write_seconds"] > 0
    assert 2 <= found["demo"]["pages"] <= 3 and found["demo"]["share"] > 0


@ITSELF
def test_a_loaded_federation_loses_no_reply():
    """100 clients, 10 of 1,000, and three sites over Flower."""
    few, many, sites = measured("load.py")["rows"]
    assert (few["clients"], many["cohort"], sites["sites"], sites["rounds"]) == (100, 10, 3, 5)
    assert few["lost"] == many["lost"] == sites["lost"] == sites["silent or rejected"] == sites["sites that failed"] == 0
    assert few["peak_mb"] > 0 and sites["peak_mb"].keys() == {"server", "superlink", "largest site"}
