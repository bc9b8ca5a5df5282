"""`effuse prune` on a finished run: its report, its files, and further training of the pruned model."""

import json
import shutil
from pathlib import Path

import pytest
from toy import ADAM, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.localonly import LocalOnly
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.cost import layer_macs
from effuse.metrics.diversity import Diversity
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.unet import Unet
from effuse.pruning.prune import prune
from effuse.runs.driver import run
from effuse.runs.evaluation import Evaluator
from effuse.runs.save import load

LOOK = {"evaluate": Evaluate(grid=2, metrics=(Diversity(n=4),)), "sampler": Ancestral(batch=4, steps=2)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a small U-Net on flat squares."""
    folder = tmp_path_factory.mktemp("prune") / "run"
    model = Unet(widths=(8, 16), layers=1, attention=(), groups=4, conditional=True)
    run(toy_recipe(model=model, data=ToyImages(side=8), **LOOK), folder)
    return folder


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of three layers, sixteen channels wide, with a moving average of its weights."""
    folder = tmp_path_factory.mktemp("prune") / "toy"
    look = LOOK | {"evaluate": Evaluate(grid=2, metrics=(FID(n=4, encoder=Pixels(side=2)),))}
    run(toy_recipe(model=ToyUnet(width=16), ema=0.5, **look), folder)
    return folder


def test_it_reports_both_and_leaves_a_run_that_opens(effuse, finished):
    """Half of the channels leaves under a third of the parameters, since most layers lose inputs and outputs."""
    report = effuse(f"prune {finished} --ratio 0.5 --json").json
    before, after = report["before"], report["after"]
    out = Path(report["out"])
    assert out == finished.with_name("run-pruned-0.5")
    small = load(out)
    assert after["parameters"] == small.model.params.numel < 0.33 * before["parameters"]
    assert after["layer_macs"] == layer_macs(small.model.arch) < before["layer_macs"] and after["macs"] < before["macs"]
    assert after["bytes"] < before["bytes"] and after["bytes"] > 4 * after["parameters"]
    assert before["metrics"].keys() == after["metrics"].keys() and len(before["metrics"]) > 0
    assert (out / "samples" / "before.png").exists() and (out / "samples" / "after.png").exists()
    assert json.loads((out / "prune.json").read_text()) == report
    result = json.loads((out / "result.json").read_text())
    assert (result["weights_sha256"], result["parameters"]) == (small.model.params.digest(), after["parameters"])
    assert result["metrics"] == after["metrics"]
    was, now = json.loads((finished / "result.json").read_text())["figures"], result["figures"]
    left = {"parameters_m": after["parameters"] / 1e6, "gmacs": after["layer_macs"] / 1e9}
    assert now == was | left and was["symmetric_cost"] > 0, "the traffic does not change"
    assert (was["parameters_m"], was["gmacs"]) == (before["parameters"] / 1e6, before["layer_macs"] / 1e9)
    assert len(small.sample(3).pixels) == 3
    assert "plain diffusers does not" in effuse(f"resume {out} --json").json["pruned"]
    assert "pruned after training" in effuse(f"resume {out}").out
    assert effuse(f"evaluate {out} --quiet").code == 0


def weights(folder: Path) -> str:
    return load(folder).model.params.digest()


def test_each_model_has_its_own_metrics(effuse, averaged, tmp_path):
    """Before: the run's own metrics, from the same noise. After: those of an evaluation of the new folder."""
    report = effuse(f"prune {averaged} --ratio 0.5 --out {tmp_path}/small --json").json
    before, after = report["before"]["metrics"], report["after"]["metrics"]
    assert before["fid_pixels"] == json.loads((averaged / "result.json").read_text())["metrics"]["fid_pixels"]
    assert before["fid_pixels"]["value"] != after["fid_pixels"]["value"]
    effuse(f"evaluate {tmp_path}/small --quiet")
    assert json.loads((tmp_path / "small" / "evaluation.json").read_text())["metrics"] == after


def test_ema_prunes_the_average(effuse, averaged, tmp_path):
    """The average of the weights is pruned as the weights are."""
    for option, ema in (("", False), ("--ema", True)):
        out = tmp_path / f"small{option}"
        assert effuse(f"prune {averaged} --ratio 0.5 {option} --out {out} --quiet").code == 0
        assert weights(out) == prune(load(averaged, ema=ema).model, 0.5, "norm", Stream(("any",))).params.digest()
    assert weights(tmp_path / "small") != weights(tmp_path / "small--ema")


def test_other_metrics_and_another_sampler_for_both(effuse, finished, tmp_path):
    """FID instead of the recipe's diversity, with the recipe's two sampling steps and with five."""
    command = f"prune {finished} --ratio 0.5 --metrics '[fid(n=4, encoder=pixels(side=2))]' --json"
    plain, asked = (
        effuse(f"{command} --out {tmp_path}/{out} {more}").json
        for more, out in (("", "plain"), ("--set sampler.steps=5", "asked"))
    )
    for side in ("before", "after"):
        two, five = plain[side]["metrics"], asked[side]["metrics"]
        assert two.keys() == five.keys() == {"fid_pixels"} and two["fid_pixels"]["value"] != five["fid_pixels"]["value"]
    recipe = load(tmp_path / "asked").recipe
    assert recipe.sampler.steps == 5 and recipe.evaluate.metrics == (FID(n=4, encoder=Pixels(side=2)),)


def test_a_seed_chooses_the_channels(effuse, averaged, tmp_path):
    found = []
    for n, seed in enumerate((1, 1, 2)):
        command = f"prune {averaged} --criterion random --ratio 0.5 --seed {seed} --out {tmp_path}/{n} --quiet"
        assert effuse(command).code == 0
        found.append(weights(tmp_path / str(n)))
    assert found[0] == found[1] != found[2]


def test_the_pruned_model_trains_on(effuse, finished, tmp_path):
    out = tmp_path / "small"
    assert effuse(f"prune {finished} --ratio 0.3 --criterion random --seed 3 --out {out} --quiet").code == 0
    again = tmp_path / "again"
    code = effuse(
        f"run {finished}/manifest.json --set 'model=from_pretrained(\"{out}/model\")' --rounds 1 --out {again}"
    ).code
    assert code == 0 and load(again).model.arch == load(out).model.arch


@pytest.mark.parametrize("where", [".", "samples/.."])
def test_a_run_in_the_working_folder(where, effuse, finished, monkeypatch):
    """The new folder is beside the run and has its name."""
    monkeypatch.chdir(finished)
    out = Path(effuse(f"prune {where} --ratio 0.4 --json").json["out"]).resolve()
    assert out == finished.with_name("run-pruned-0.4") and load(out).model.params.numel > 0
    assert json.loads((out / "manifest.json").read_text())["name"] == "run, pruned"
    shutil.rmtree(out)


def test_a_table_for_a_reader(effuse, finished, tmp_path):
    shown = effuse(f"prune {finished} --ratio 0.2 --out {tmp_path}/small").out
    for word in ("parameters", "multiply-adds", "size", "diversity", "before", "after"):
        assert word in shown


def test_an_interrupted_pruning_cannot_be_resumed(effuse, finished, tmp_path, monkeypatch):
    """Resuming would train a new model; repeating the command works."""
    whole, out = Evaluator.evaluate_model, tmp_path / "small"

    def interrupted(self, model, picture):
        if picture.name == "after.png":
            raise KeyboardInterrupt
        return whole(self, model, picture)

    monkeypatch.setattr(Evaluator, "evaluate_model", interrupted)
    assert effuse(f"prune {finished} --ratio 0.5 --out {out}").code == 130
    monkeypatch.setattr(Evaluator, "evaluate_model", whole)
    assert "not a run" in effuse(f"resume {out}").sentence
    again = effuse(f"prune {finished} --ratio 0.5 --out {out} --json").json
    assert load(out).model.params.numel == again["after"]["parameters"]


def test_what_cannot_be_pruned_is_told(effuse, finished, tmp_path):
    assert "--ratio 1.0: expected a share" in effuse(f"prune {finished} --ratio 1.0").sentence
    assert "--criterion norn: there is none; did you mean norm?" in effuse(f"prune {finished} --criterion norn").sentence
    assert "already holds a run" in effuse(f"prune {finished} --out {finished}").sentence
    run(toy_recipe(algorithm=LocalOnly(local=ADAM), evaluate=Evaluate(grid=2), sampler=Ancestral(batch=2)), tmp_path / "own")
    assert "has one model per client and no global model to prune" in effuse(f"prune {tmp_path}/own").sentence
