"""Every command and option."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from toy import ToyStateful, toy_recipe

from effuse.algorithms.localonly import LocalOnly
from effuse.cli import app, display, menu
from effuse.core.metric import Metric, Outlook
from effuse.core.recipe import Evaluate
from effuse.core.registry import registry
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ancestral
from effuse.machines.eager import Eager
from effuse.metrics.classifier import Classifier
from effuse.runs import rounds
from effuse.runs.folder import RunFolder

ADAM = Adam(lr=1e-2, batch=8, epochs=1)
SMALL = Classifier(width=2, steps=1, epochs=1)
SAMPLED = {"evaluate": Evaluate(grid=4, every=1), "sampler": Ancestral(batch=4)}


@pytest.fixture(scope="module")
def finished(effuse, shrunk, tmp_path_factory):
    """A finished run of the demo, with a moving average, and what the command printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, effuse(f"run demo {shrunk} --set ema=0.5 --out {folder} --json")


@pytest.fixture(scope="module")
def alone(effuse, tmp_path_factory):
    """A finished run in which every client has its own model."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = toy_recipe(algorithm=LocalOnly(local=ADAM), **SAMPLED)
    (folder / "toy.json").write_text(json.dumps({"recipe": recipe.saved()}))
    assert effuse(f"run {folder}/toy.json --out {folder}/run").code == 0
    return folder / "run"


def test_run_writes_everything_that_was_promised(effuse, finished):
    folder, answer = finished
    assert answer.code == 0
    there = {p.name for p in folder.iterdir()}
    assert there >= {"manifest.json", "rounds.jsonl", "ledger.json", "result.json"}
    assert there >= {"samples", "checkpoints", "model", "model-ema"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["name"] == "demo" and manifest["recipe"]["rounds"] == "2" and "side=8" in manifest["recipe"]["model"]
    assert {"python", "torch"} <= manifest["versions"].keys()
    assert effuse("--version").out == f"effuse {manifest['effuse']}, source {manifest['versions']['source']}\n"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["t"] for line in lines] == [0, 1] and all(line["loss"] > 0 and line["images"] == 80 for line in lines)
    assert {p.name for p in (folder / "samples").iterdir()} == {
        "round-00001.png",
        "round-00001-ema.png",
        "round-00002.png",
        "round-00002-ema.png",
    }
    assert (folder / "checkpoints" / "000002.safetensors").is_file()
    assert {p.name for p in (folder / "model").iterdir()} >= {"unet", "scheduler"}
    result = json.loads((folder / "result.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", result["weights_sha256"]) and result["metrics"] == {}
    assert result["seconds"] > result["round_seconds"] > 0
    assert answer.json == {"run": str(folder)} | result and answer.err == ""


def test_the_manifest_repeats_the_run(effuse, finished, tmp_path):
    folder, answer = finished
    for source in (folder / "manifest.json", folder):
        again = effuse(f"run {source} --out {tmp_path / source.name} --json")
        assert again.json["weights_sha256"] == answer.json["weights_sha256"]


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_profile_tells_where_the_time_went_and_changes_nothing(effuse, toy_file, engine):
    """The shares add up to the whole, also in a resumed run."""
    recipe = toy_file(algorithm=ToyStateful(local=ADAM), **SAMPLED)
    plain = effuse(f"run {recipe} --engine {engine} --out plain --json").json
    output = effuse(f"run {recipe} --engine {engine} --out output --profile --json").json
    assert output["weights_sha256"] == plain["weights_sha256"] and "profile" not in plain
    spans = output["profile"]["spans"]
    assert spans.keys() == {"data", "step", "sample", "client", "aggregate", "evaluate", "checkpoint", "wire", "other"}
    assert sum(s["seconds"] for s in spans.values()) == pytest.approx(output["profile"]["seconds"])
    assert sum(s["share"] for s in spans.values()) == pytest.approx(1) and all(s["seconds"] >= 0 for s in spans.values())
    trace = json.loads(Path("output/trace.json").read_text())
    assert {e["name"] for e in trace["traceEvents"]} == spans.keys() - {"other"}
    assert sum(e["name"] == "step" for e in trace["traceEvents"]) == 6, "three clients, two rounds"
    for name in ("result.json", "trace.json"):
        (Path("output") / name).unlink()
    again = effuse("resume output --profile")
    assert (
        again.code == 0
        and "checkpoint" in again.out
        and "100.0 %" in again.out
        and plain["weights_sha256"][:30] in again.out
    )
    assert Path("output/trace.json").is_file()


def test_loopback_equals_simulator(effuse, shrunk):
    """The demo through the wire format ends in the same weights, and counts the encoded bytes."""
    engines = ("simulator", "loopback")
    plain, wired = (effuse(f"run demo {shrunk} --engine {name} --out {name} --json").json for name in engines)
    assert plain["weights_sha256"] == wired["weights_sha256"]
    assert plain["traffic"]["bytes"] == wired["traffic"]["bytes"]
    assert plain["traffic"]["wire_bytes"]["total"] == 0
    assert wired["traffic"]["wire_bytes"]["total"] > wired["traffic"]["bytes"]["total"] > 0


def test_rounds_and_seed_are_short_for_settings(effuse, toy_file):
    short = effuse(f"run {toy_file()} --rounds 3 --seed 5 --out a --json").json
    long = effuse(f"run {toy_file()} --set rounds=3 --set seed=5 --out b --json").json
    other = effuse(f"run {toy_file()} --set rounds=3 --set seed=6 --out c --json").json
    assert short["rounds"] == 3 and short["weights_sha256"] == long["weights_sha256"] != other["weights_sha256"]


def test_without_out_each_run_gets_a_new_folder(effuse, toy_file, tmp_path):
    folders = {effuse(f"run {toy_file()} --json").json["run"] for _ in range(2)}
    assert len(folders) == 2 and all(re.fullmatch(r"runs/toy-\d{8}-\d{6}(-\d+)?", f) for f in folders)
    assert all((tmp_path / f / "result.json").is_file() for f in folders)


def test_a_recipe_wins_over_a_folder_of_its_name(effuse, tmp_path):
    (tmp_path / "demo").mkdir()
    assert effuse("check demo --json").json["recipe"] == "demo"


def test_quiet_says_nothing_and_plain_says_what_happened(effuse, toy_file):
    assert effuse(f"run {toy_file()} --out a --quiet") == (0, "", "")
    output = effuse(f"run {toy_file(**SAMPLED)} --out b")
    assert output.code == 0 and output.err == ""
    expected = ("3 clients, 2 rounds, into b", "round 1/2, loss", "images/s", "weights_sha256", "round-00002.png", "b/model")
    for words in expected:
        assert words in output.out


def test_seeds_run_resume_and_spread(effuse, toy_file, monkeypatch):
    """A second call resumes the interrupted seed, reuses the finished one, and gives mean and spread."""
    options = f"run {toy_file(**SAMPLED)} --set 'evaluate.metrics=[kid(n=4, encoder={SMALL})]'"
    fit, calls = Eager.fit, []

    def interrupted(machine, net, work):
        if "classifier" not in work.where:  # which another test may have trained and left in the cache
            calls.append(1)
        if len(calls) == 11:  # seed 0 has six fits; seed 1 is in its second round
            raise KeyboardInterrupt
        return fit(machine, net, work)

    monkeypatch.setattr(Eager, "fit", interrupted)
    stopped = effuse(f"{options} --seeds 0,1 --out s")
    assert stopped.code == 130
    assert stopped.sentence == "interrupted; `effuse resume s/seed-1` goes on from the last checkpoint"
    first = json.loads(Path("s/seed-0/result.json").read_text())
    answer = effuse(f"{options} --seeds 1,0 --out s --json")
    assert answer.code == 0 and answer.json["runs"] == {"0": "s/seed-0", "1": "s/seed-1"}
    assert json.loads(Path("s/seeds.json").read_text()) == answer.json
    spread = answer.json["metrics"]["kid_classifier"]
    assert spread["values"][0] == first["metrics"]["kid_classifier"]["value"] != spread["values"][1]
    assert spread["mean"] == pytest.approx(sum(spread["values"]) / 2)
    assert spread["std"] == pytest.approx(abs(spread["values"][0] - spread["values"][1]) / 2**0.5)
    single = effuse(f"{options} --seed 1 --out single --json").json
    assert single["weights_sha256"] == json.loads(Path("s/seed-1/result.json").read_text())["weights_sha256"]
    table = effuse(f"{options} --seeds 0,1 --out s").out
    assert "over seeds 0, 1" in table and "kid_classifier" in table and "mean" in table and "std" in table


def test_seeds_do_not_mix_recipes(effuse, toy_file):
    effuse(f"run {toy_file()} --seeds 0 --out s")
    refused = effuse(f"run {toy_file()} --seeds 0,1 --rounds 3 --out s").sentence
    assert refused == "RunError: s/seed-0 was run with rounds=2, not 3; choose another --out"
    assert "RecipeError: --seed 3 and --seeds 0,1" in effuse(f"run {toy_file()} --seeds 0,1 --seed 3 --out t").sentence


def test_resume_of_a_finished_run_gives_its_result(effuse, finished):
    folder, answer = finished
    assert effuse(f"resume {folder} --json").json == answer.json
    assert answer.json["weights_sha256"][:30] in effuse(f"resume {folder}").out
    assert effuse(f"resume {folder} --quiet") == (0, "", "")


class Screen(io.StringIO):
    """A terminal that records its output."""

    def isatty(self):
        return True


def test_a_terminal_keeps_its_width_and_a_file_has_none(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    widths = []
    for terminal in (True, False):
        screen = Screen() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", screen)
        widths.append(display.console().width)
    assert widths[0] < 300 and widths[1] == 1000


def test_the_live_display(effuse, toy_file, monkeypatch):
    """Round, loss, speed, traffic and time left are on one line, which is erased at the end; also in a resumed run."""
    screen, fit = Screen(), Eager.fit

    def slow(machine, net, work):
        time.sleep(0.03)  # the display draws eight times a second
        return fit(machine, net, work)

    monkeypatch.setattr(Eager, "fit", slow)
    monkeypatch.setattr(display, "console", lambda: Console(file=screen, force_terminal=True, width=100, highlight=False))
    assert effuse(f"run {toy_file(algorithm=ToyStateful(local=ADAM), rounds=6)} --seeds 0 --out s").code == 0
    shown = screen.getvalue()
    assert re.search(r"━+╌+ [1-5]/6  loss \d\.\d{4}  [\d,]+ images/s  \d+\.\d kB  \d+s elapsed  \d+s left  \w", shown)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once and restored"
    lines = [re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", shown)]
    assert all(len(line) <= 97 for line in lines if "elapsed" in line), "a line that wraps cannot be erased"
    assert re.search(r"\x1b\[1A\x1b\[2K(?!.*elapsed)", shown.rpartition("elapsed")[2]), "the last line is erased"
    for name in ("result.json", "checkpoints/000006.safetensors"):
        (Path("s/seed-0") / name).unlink()
    screen.truncate(0)
    assert effuse(f"run {toy_file(algorithm=ToyStateful(local=ADAM), rounds=6)} --seeds 0 --out s").code == 0
    assert "into s/seed-0" in screen.getvalue() and "left" in screen.getvalue() and "\x1b[?25h" in screen.getvalue()


def test_traffic_shown_after_resume_goes_on_from_where_it_was(effuse, toy_file, monkeypatch):
    """After an interruption in the first round, the second round's line shows the traffic of both."""
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)
    recipe, append = toy_file(algorithm=ToyStateful(local=ADAM)), RunFolder.append

    def last(out: str) -> str:
        return [line for line in out.splitlines() if " round 2/2" in line][0].split(", ")[-1]

    whole = last(effuse(f"run {recipe} --out whole").out)
    with monkeypatch.context() as patch:

        def interrupted(folder, record):
            if record.t == 1:
                raise KeyboardInterrupt
            append(folder, record)

        patch.setattr(RunFolder, "append", interrupted)
        assert effuse(f"run {recipe} --out cut").code == 130
    assert last(effuse("resume cut").out) == whole and whole.endswith("kB sent so far")


CHECKED = {"recipe", "parameters", "macs", "partition", "traffic", "steps", "memory", "disk", "warnings"}
CHECKED |= {"macs_frozen", "figures", "after", "privacy", "networks", "plan", "evaluation"}


def test_check_warns_of_evaluations_that_dwarf_training(effuse, shrunk):
    """The same with 1,000 steps: 500 times as much, 83 times the training."""
    (warning,) = effuse(f"check demo {shrunk} --set sampler.steps=1000 --set algorithm.local.epochs=None --json").json[
        "warnings"
    ][:1]
    assert warning.startswith(
        "evaluating takes 83.3 times the arithmetic of all training: 2 times 10,000 network evaluations;"
    )
    assert "classes: 0, 1, 2" in effuse(f"check demo {shrunk}").out


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_check_tells_what_the_demo_sends(effuse, shrunk, engine):
    """Two rounds of five clients with 635,681 parameters: 2 x 5 x 635,681 each way, four bytes apiece."""
    report = effuse(f"check demo {shrunk} --json").json
    assert report.keys() == CHECKED
    assert report["parameters"].keys() == {"total", "encoder", "bottleneck", "decoder"}
    assert sum(report["parameters"].values()) == 2 * report["parameters"]["total"] == 2 * 635_681
    assert report["partition"].keys() == {"sizes", "labels", "classes"}
    assert [sum(row) for row in report["partition"]["labels"]] == report["partition"]["sizes"]
    traffic = report["traffic"]
    assert traffic.keys() >= {"exact", "parameters", "bytes", "links", "per_round"} and traffic["exact"] is True
    assert traffic["parameters"] == {"up": 6_356_810, "down": 6_356_810, "total": 12_713_620}
    assert traffic["bytes"]["total"] == 4 * 12_713_620
    assert traffic["links"] == {"client-server": {"up": 25_427_240, "down": 25_427_240}}
    assert report["steps"] == {"client": 10, "server": 0} and report["macs"] > 1e6
    # two evaluations of ten images in two steps, each of two inputs; 2 x 5 x 16 images are trained in three passes
    assert report["evaluation"] == {"times": 2, "calls": 20, "of_training": pytest.approx(2 * 20 * 2 / (160 * 3))}
    effuse(f"run demo {shrunk} --engine {engine} --out run")
    assert_ledger_is("run", traffic)


def test_check_tells_what_lone_clients_send(effuse, alone):
    """The model is sent down once; evaluation images are sent up and counted separately."""
    traffic = effuse(f"check {alone} --json").json["traffic"]
    assert traffic["parameters"]["up"] == 0 < traffic["parameters"]["down"]
    assert traffic["per_round"][1]["parameters"]["total"] == 0 < traffic["evaluation"]["bytes"]["up"]
    assert_ledger_is(alone, traffic)


def assert_ledger_is(folder, traffic):
    ledger = json.loads((Path(folder) / "ledger.json").read_text())
    for quantity in ("parameters", "bytes"):
        assert ledger["training"][quantity] == traffic[quantity]
        assert ledger["evaluation"][quantity] == traffic["evaluation"][quantity]
        assert [r[quantity] for r in ledger["per_round"]] == [r[quantity] for r in traffic["per_round"]]


def test_plan_is_check_and_both_have_a_page_for_readers(effuse, shrunk):
    page = effuse(f"plan demo {shrunk}")
    assert page.code == 0 and page == effuse(f"check demo {shrunk}")
    for words in ("635,681 (encoder", "25.4 MB up, 25.4 MB down", "12,713,620 parameters (exact)", "10 at clients", "69 2"):
        assert words in re.sub(r"[\s│]+", " ", page.out)
    assert effuse(f"plan demo {shrunk} --json").json == effuse(f"check demo {shrunk} --json").json
    short, long = (effuse(f"check demo {shrunk} {three} --json").json for three in ("--clients 3", "--set clients=3"))
    assert short == long and len(short["partition"]["sizes"]) == 3


def test_settings_that_fell_back_are_told(effuse, shrunk):
    """The options that shorten the demo replace its algorithm as a whole."""
    words = (
        "algorithm was set as a whole, so these are at their defaults: local.epochs=None (was 2), local.clip=None (was 1.0)"
    )
    assert words in effuse(f"check demo {shrunk} --json").json["warnings"][-1]
    assert f"warning: {words}" in effuse(f"run demo {shrunk} --out a").out
    assert effuse(f"run demo {shrunk} --out b --quiet") == (0, "", "")
    assert effuse("check demo --json").json["warnings"] == []


def test_check_computes_nothing(effuse, shrunk, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", None)
    monkeypatch.setattr(Eager, "fit", None)
    assert effuse(f"check demo {shrunk}").code == 0


def arrays(path):
    with np.load(path) as stored:
        return dict(stored)


def test_sample_npz(effuse, finished, tmp_path):
    """The same seed gives the same images; another seed, class, sampler or the moving average gives others."""
    folder, answer = finished
    made = {
        name: arrays(effuse(f"sample {folder} -n 12 --format npz --out {tmp_path / name} {options} --json").json["written"])
        for name, options in {
            "a": "",
            "b": "",
            "seed": "--seed 1",
            "label": "--label 3",
            "ema": "--ema",
            "sampler": "--sampler 'ddim(3)'",
            "named": "--label 3",
        }.items()
    }
    assert made["a"]["images"].shape == (12, 8, 8, 1) and made["a"]["images"].dtype == np.uint8
    assert made["a"]["labels"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1] and set(made["label"]["labels"]) == {3}
    assert (made["a"]["images"] == made["b"]["images"]).all()
    assert all((made["a"]["images"] != made[other]["images"]).any() for other in ("seed", "label", "ema", "sampler"))
    output = json.loads(str(made["a"]["provenance"]))
    assert output["weights_sha256"] == answer.json["weights_sha256"] and output["run"] == folder.name
    assert output["synthetic"] is True
    assert output["asked"]["n"] == 12 and output["recipe"]["clients"] == "5" and output["batches"][0]["size"] == 12
    average = json.loads(str(made["ema"]["provenance"]))
    assert average["weights_sha256"] != answer.json["weights_sha256"] and average["asked"]["ema"] is True
    assert "ddim(" in json.loads(str(made["sampler"]["provenance"]))["sampler"]


def test_sample_grid_and_imagefolder(effuse, shrunk, finished, tmp_path):
    folder, _ = finished
    grid = effuse(f"sample {folder} -n 20 --json").json["written"]
    assert grid == str(folder / "exports" / "grid-20-seed-0.png")
    assert Image.open(grid).size == (5 * (66 + 2), 2 * (2 * 66 + 2 + 14)), "five classes side by side, each under its name"
    assert json.loads(Path(grid).with_suffix(".json").read_text())["synthetic"] is True
    output = effuse(f"sample {folder} -n 61 --format imagefolder --out {tmp_path / 'set'}")
    said = output.out.splitlines()
    assert said[0] == f"61 images in {tmp_path / 'set'}"
    assert said[1].startswith("note: these images are close to noise"), "two steps are too few"
    assert sorted(p.name for p in (tmp_path / "set").iterdir() if p.is_dir()) == list("0123456789")
    assert len(list((tmp_path / "set" / "0").iterdir())) == 7
    assert Image.open(tmp_path / "set" / "0" / "000000.png").size == (8, 8)
    assert (tmp_path / "set" / "labels.csv").read_text().splitlines()[1] == "0/000000.png,0"
    assert json.loads((tmp_path / "set" / "provenance.json").read_text())["asked"]["n"] == 61
    source = f"--set 'data=folder(\"{tmp_path / 'set'}\")' --set clients=2 --set 'partition=iid()' --set evaluate.grid=0"
    again = effuse(f"run demo {shrunk} {source} --out again")
    assert again.code == 0, "an exported folder can be used as a data set"


def test_exported_folders_have_the_names_of_classes(effuse, shrunk, tmp_path):
    """If a class name cannot be a folder name, all folders have numbers, and nothing is written elsewhere."""
    for label in range(2):
        (tmp_path / "pets" / ("cat", "old dog")[label]).mkdir(parents=True)
        for i in range(10):
            picture = Image.fromarray(np.full((8, 8), 20 * i + label, np.uint8))
            picture.save(tmp_path / "pets" / ("cat", "old dog")[label] / f"{i}.png")
    data = f"--set 'data=folder(\"{tmp_path / 'pets'}\")' --set clients=2 --set 'partition=iid()' --set evaluate.grid=0"
    assert effuse(f"run demo {shrunk} {data} --out run").code == 0
    assert effuse("sample run -n 4 --format imagefolder --out named").code == 0
    assert sorted(p.name for p in Path("named").iterdir() if p.is_dir()) == ["cat", "old dog"]
    assert Path("named/labels.csv").read_text().splitlines()[2] == "old dog/000001.png,1"
    assert json.loads(Path("named/provenance.json").read_text())["classes"] == ["cat", "old dog"]
    manifest = json.loads(Path("run/manifest.json").read_text())
    for number, classes in enumerate((["cat", "../dog"], ["cat", "Cat"], ["cat", ".."], ["cat"], None)):
        Path("run/manifest.json").write_text(json.dumps(manifest | {"classes": classes}))
        assert effuse(f"sample run -n 4 --format imagefolder --out {number}/set").code == 0
        assert sorted(p.name for p in Path(f"{number}/set").iterdir() if p.is_dir()) == ["0", "1"]
        assert [p.name for p in Path(str(number)).iterdir()] == ["set"]


def test_exports_of_different_requests_do_not_overwrite_each_other(effuse, finished):
    folder, _ = finished
    options = ("", "--label 2", "--ema", "--seed 1", "--sampler 'ddim(steps=3)'", "--batch 2")
    written = [effuse(f"sample {folder} -n 3 --format npz {o} --json").json["written"] for o in options]
    assert len(set(written)) == len(options)
    assert effuse(f"sample {folder} -n 3 --out trial-0.5 --json").json["written"] == "trial-0.5.png"


def test_sample_of_one_client(effuse, alone, tmp_path):
    """Every client of local_only has its own model, the one whose images the evaluation saved."""
    for k in range(3):
        assert effuse(f"sample {alone} --client {k} -n 4 --format npz --out {tmp_path / str(k)}").code == 0
    first, second, third = (arrays(tmp_path / f"{k}.npz") for k in range(3))
    digests = {json.loads(str(a["provenance"]))["weights_sha256"] for a in (first, second, third)}
    assert len(digests) == 3 and (first["images"] != second["images"]).any()
    assert "choose one with --client 0 to 2" in effuse(f"sample {alone} -n 4").sentence
    assert "its clients are 0 to 2" in effuse(f"sample {alone} --client 3 -n 4").sentence
    assert "no moving average; leave --ema out" in effuse(f"sample {alone} --client 1 --ema -n 4").sentence


def test_evaluate_measures_again_by_other_metrics(effuse, finished):
    folder, _ = finished
    before = (folder / "result.json").read_text()
    assert "has no metrics; name some, such as --metrics" in effuse(f"evaluate {folder}").sentence
    found = effuse(f"evaluate {folder} --metrics '[diversity(n=30), diversity(n=30)]'")
    assert "would both be stored as 'diversity'" in found.sentence
    found = effuse(f"evaluate {folder} --metrics '[diversity(n=30)]' --json").json
    assert found["run"] == str(folder) and found["metrics"].keys() == {"diversity"}
    assert found["metrics"]["diversity"]["protocol"]["generated"] == 30 and found["metrics"]["diversity"]["value"] > 0
    kept = json.loads((folder / "evaluation.json").read_text())
    assert kept == {"settings": ["evaluate.metrics=[diversity(n=30)]"], "ema": False, "metrics": found["metrics"]}
    smooth = effuse(f"evaluate {folder} --metrics '[diversity(n=30)]' --ema --json").json
    assert smooth["metrics"]["diversity"]["value"] != found["metrics"]["diversity"]["value"]
    page = effuse(f"evaluate {folder} --set 'evaluate.metrics=[diversity(n=30)]'")
    assert f"{found['metrics']['diversity']['value']:.4g}" in page.out
    assert effuse(f"evaluate {folder} --metrics '[diversity(n=30)]' --quiet") == (0, "", "")
    assert (folder / "result.json").read_text() == before, "the run's own result does not change"


def test_evaluate_gives_what_the_run_gave(effuse, toy_file):
    """For a global model, and for personal models, which are evaluated at their clients."""
    metric = f"--set 'evaluate.metrics=[kid(n=6, encoder={SMALL})]'"
    for name, changes in {"shared": {}, "lone": {"algorithm": LocalOnly(local=ADAM)}}.items():
        ran = effuse(f"run {toy_file(**SAMPLED, **changes)} {metric} --out {name} --json").json
        assert effuse(f"evaluate {name} --json").json["metrics"] == ran["metrics"] != {}
    assert ran["metrics"].keys() == {"kid_classifier", "kid_classifier_pooled"}
    assert len(ran["metrics"]["kid_classifier"]["clients"]) == 3
    assert effuse("resume lone --json").json["weights_sha256"] == ran["weights_sha256"], "evaluating changed nothing"


def test_list(effuse):
    known = effuse("list --json").json
    assert known.keys() == {
        "recipe",
        "table",
        "data",
        "partition",
        "model",
        "task",
        "algorithm",
        "solver",
        "sampler",
        "metric",
        "histogram",
        "transform",
        "noise",
        "rate",
        "encoder",
        "aggregate",
    }
    assert known["recipe"]["demo"].startswith("8x8 digits, 5 clients")
    named = {"partition": "iid", "algorithm": "fedprox", "sampler": "ddim", "metric": "fid", "data": "npz", "solver": "adam"}
    for kind, name in named.items():
        assert any(call.startswith(f"{name}(") for call in known[kind]), f"{name} is missing"
    assert all(line for names in known.values() for line in names.values()), "everything has a description"


def test_list_fits_a_terminal_and_is_not_folded_in_a_pipe(effuse, monkeypatch):
    known = [name.partition("(")[0] for names in effuse("list --json").json.values() for name in names]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = effuse("list").out.splitlines()
    assert max(map(len, narrow)) <= 80 and any(line.startswith("  label_skew ") for line in narrow)
    monkeypatch.delenv("COLUMNS")
    piped = effuse("list").out.splitlines()
    assert [line.split()[0] for line in piped if line.startswith("  ")] == known, "a line for each name"
    assert [line for line in piped if line != line.rstrip()] == []


def test_list_of_one_recipe(effuse):
    """The keys that --set accepts, with values in its grammar."""
    keys = effuse("list demo --json").json["values"]
    assert list(keys) == [
        "data",
        "clients",
        "partition",
        "model",
        "task",
        "algorithm",
        "rounds",
        "evaluate",
        "sampler",
        "ema",
        "wire",
        "budget",
        "canaries",
        "seed",
        "threads",
        "speed",
        "reproducible",
    ]
    assert "metrics=[conditional_accuracy(), diversity()]" in re.sub(r"\s+", " ", effuse("list demo").out), (
        "brackets are not markup"
    )
    options = " ".join(f"--set {key}='{value}'" for key, value in keys.items())
    assert effuse(f"check demo {options} --json").json == effuse("check demo --json").json


def test_list_of_one_spec(effuse):
    """Kind, first line, and every key with type, default and comment; own keys come before inherited ones."""
    (output,) = effuse("list FedProx --json").json["named"]
    assert output | {"keys": {}} == {
        "kind": "algorithm",
        "name": "fedprox",
        "about": "FedAvg with a penalty on the distance from the global model.",
        "keys": {},
    }
    assert list(output["keys"].items()) == [
        ("mu", "float = 0.01"),
        ("local", "a solver, must be given"),
        ("cohort", "int or float or None = None; clients a round: a count, a fraction, or all"),
        ("weights", "'size' or 'uniform' = 'size'"),
        ("aggregate", "a reducer = mean(); how the clients' models become one"),
    ]
    assert effuse("list fedprox").out.splitlines()[:2] == [
        "algorithm fedprox: FedAvg with a penalty on the distance from the global model.",
        "  mu         float = 0.01",
    ]


def test_list_explains_every_name_and_kind(effuse):
    known = effuse("list --json").json
    for kind, calls in known.items():
        for call in calls:
            name = call.partition("(")[0]
            assert f"\n{kind} {name}: " in "\n" + effuse(f"list {name}").out
        if kind not in ("recipe", "table"):
            assert effuse(f"list {kind} --json").json == calls
    assert effuse("list schedule --json").json == known["rate"], "by the name in the output"
    both = effuse("list fedphd").out
    assert "\nits values\n" in both and "\nalgorithm fedphd: " in both, "the name of a recipe and of an algorithm"


@pytest.mark.parametrize(("command", "words"), [("run", "name that `effuse list` prints"), ("resume", "A run folder")])
def test_help_explains_arguments_too(effuse, command, words):
    assert words in " ".join(effuse(f"{command} --help").out.split())


def test_help_is_there_without_asking(effuse):
    bare = effuse("")
    assert bare.code == 0 and bare == effuse("--help")
    for command in ("run", "resume", "check", "sample", "evaluate", "list"):
        assert f" {command} " in bare.out and "--help" in effuse(f"{command} --help").out


def test_help_is_grouped_and_imports_no_command(effuse):
    """By what its users do; a command without a group is in the last one, so none is lost."""
    lines = effuse("--help").out
    places = [lines.index(f" {words} ") for words in ("Start", "new", "run", "Research", "prune", "Operate", "serve")]
    assert places == sorted(places) and all(f" {name} " in lines for name in menu())
    seen = "import sys; from effuse.cli import main; sys.argv = ['effuse', '--help']\ntry: main()\nexcept SystemExit: pass\n"
    code = f"{seen}print(sorted({{'torch', 'effuse.cli.run'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()[-1] == "[]"


def test_every_command_is_on_the_menu():
    """A module of commands begins with `effuse NAME`: and what it does; otherwise nothing would import it."""
    for module, _ in menu().values():
        importlib.import_module(f"effuse.cli.{module}")
    group = typer.main.get_command(app)
    assert set(group.commands) - {"plan"} == set(menu())
    helpers = {"__init__", "display", "options", "progress"}
    assert {path.stem for path in Path(display.__file__).parent.glob("*.py")} - helpers == {m for m, _ in menu().values()}


@pytest.mark.parametrize(("words", "found"), [("effuse che", "check"), ("effuse run --trac", "--track")])
def test_a_shell_completes_commands_and_options(words, found):
    told = {"_EFFUSE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['effuse']; from effuse.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | told, capture_output=True, text=True, timeout=60)
    assert found in done.stdout.split()


def test_own_images_from_a_folder_to_samples_of_a_class_by_name(effuse, tmp_path):
    """`new`, `check`, `run` with a tracker, and `sample`, on pictures of two classes; `--data` says the same of a recipe."""
    for label in ("cat", "old dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(np.full((30, 34), 20 * i, np.uint8)).save(tmp_path / "pets" / label / f"{i}.png")
    assert "20 images in 2 classes, drawn at 28 pixels; next: `effuse check mine.toml`" in effuse("new mine --data pets").out
    quick = "--set rounds=1 --set model.widths=[8] --set model.attention=[] --set sampler.steps=1 --set evaluate.grid=4"
    quick += " --set evaluate.metrics=[] --clients 1"
    assert effuse(f"check mine.toml {quick} --json").json["partition"]["classes"] == ["cat", "old dog"]
    assert effuse(f"run mine.toml {quick} --out run --track tensorboard").code == 0
    assert len(list(Path("run/tensorboard").iterdir())) == 1
    written = effuse("sample run -n 2 --label 'old dog' --format npz --json").json["written"]
    assert set(arrays(written)["labels"]) == {1} and written.endswith("label-1.npz")
    changed = "--set 'model=unet(widths=[8], groups=8, conditional=True)' --set evaluate.metrics=[] --clients 1 --rounds 1"
    assert effuse(f"check demo --data pets {changed} --json").code != 0, "30 x 34 pixels are not square"
    assert effuse("doctor --json").json[0]["what"] == "effuse" and "what to do" in effuse("doctor").out


NAMES = {k for k, cls in registry(Metric).items() if cls.__module__.startswith("effuse.")}


@pytest.mark.parametrize("name", sorted(NAMES - {"byclass"}))  # whose names end with those of classes: test_by_class.py
def test_metrics_announce_the_names_of_their_numbers(name, effuse, finished):
    """They are known before anything is computed, so that duplicates can be refused."""
    cls = registry(Metric)[name]
    given = {"n": 40, "encoder": SMALL}
    metric = cls(**{key: value for key, value in given.items() if hasattr(cls(), key)})
    if metric.samples == 0:
        with pytest.raises(Exception, match="does not classify|gives no features|the train split has 9 images"):
            metric.ready(Outlook(classifies=False, conditional=True, classes=10, real={"train": 9, "test": 9}))
        assert metric.keys[0] in (metric.name, f"{metric.name}_classifier")
        return
    found = effuse(f"evaluate {finished[0]} --metrics '[{metric}]' --json").json["metrics"]
    assert tuple(found) == metric.keys
