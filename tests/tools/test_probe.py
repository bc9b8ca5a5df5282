"""`effuse probe`: which images train and judge, the null label, the stages, and the controls."""

import dataclasses
import json

import pytest
import torch
from toy import TOY_GUIDE, TOY_NOISE, ToyImages, toy_recipe

from effuse.algorithms.fed3r import Fed3R
from effuse.core.data import Dataset, Split
from effuse.core.errors import RecipeError
from effuse.core.spec import spec
from effuse.data.sources import Validation
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tools import probe as tool
from effuse.tools.probe import probe_run


@spec
class ProbedSpeckles(ToyImages):
    """Squares of random brightness: images alone tell no class, a label that leaks would."""

    def load(self, split: Split) -> Dataset:
        found = super().load(split)
        pixels = torch.randint(0, 256, found.images.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        return dataclasses.replace(found, images=pixels)


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "guide"
    run(toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1, ema=0.5), folder)
    return folder


def test_a_row_for_each_stage_and_step(denoiser):
    """Of 40 images the fifth part, 8, judges and 32 train. Stage 0 has 16 channels, stage 1 has 1."""
    found = probe_run(denoiser, steps=(0, 20))
    assert [(row["stage"], row["t"], row["features"]) for row in found["rows"]] == [
        ("0", 0, 16),
        ("1", 0, 1),
        ("0", 20, 16),
        ("1", 20, 1),
    ]
    assert (found["trained_on"], found["judged_on"], found["seen"], found["model"]) == (32, 8, True, "trained")
    assert found["rows"][0]["accuracy"] == 1.0, "dark and light squares without noise"
    saved = json.loads((denoiser / "probe.json").read_text())
    assert saved["rows"] == found["rows"] == probe_run(denoiser, steps=(0, 20))["rows"], "the noise is keyed"
    one = probe_run(denoiser, stages=(1,), steps=(20,))["rows"]
    assert one == [found["rows"][3]], "a stage's number does not depend on what is probed beside it"


def test_images_are_asked_for_under_the_null_label_only(denoiser, monkeypatch):
    asked = []
    denoised = tool.denoised

    def noted(net, batch, given):
        asked.append(batch.columns["labels"].unique().tolist())
        return denoised(net, batch, given)

    noted.__qualname__ = "noted"
    monkeypatch.setattr(tool, "denoised", noted)
    probe_run(denoiser, steps=(0,))
    assert asked == [[-1], [-1]]


def test_the_test_set_is_never_read(tmp_path, monkeypatch):
    """A run on held-out training images is judged on those that its network has not seen."""
    data = Validation(source=ToyImages(), share=0.25)
    run(toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1, data=data), tmp_path / "run")
    load_split = ToyImages.load

    def only_train(self, split):
        assert split == "train"
        return load_split(self, split)

    monkeypatch.setattr(ToyImages, "load", only_train)
    found = probe_run(tmp_path / "run", steps=(0,))
    assert (found["trained_on"], found["judged_on"], found["seen"]) == (30, 10, False)


def test_a_leaked_label_would_show(tmp_path, monkeypatch):
    """Random images under the null label are guessed; the same under their own labels would be certain."""
    data = ProbedSpeckles(n=400)
    run(toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1, data=data), tmp_path / "run")
    found = probe_run(tmp_path / "run", stages=(1,), steps=(0,))
    assert found["rows"][0]["accuracy"] < 0.75


def test_a_classifiers_features_and_the_controls(tmp_path, denoiser):
    run(toy_recipe(algorithm=Fed3R(), rounds=1), tmp_path / "run")
    found = probe_run(tmp_path / "run", kind="logistic", images=20)
    assert [(row["stage"], row["features"]) for row in found["rows"]] == [("features", 16)] and found["trained_on"] == 20
    untrained = probe_run(denoiser, stages=(0,), steps=(20,), untrained=True)
    average = probe_run(denoiser, stages=(0,), steps=(20,), ema=True)
    assert untrained["seen"] is False and average["seen"] is True
    assert (denoiser / "probe-untrained.json").exists() and (denoiser / "probe-ema.json").exists()
    network = load(denoiser)
    with pytest.raises(RecipeError, match="has no moving average"):
        probe_run(denoiser, ema=True, untrained=True)
    with pytest.raises(RecipeError, match="there is no stage 2; toy_labelled has 0 to 1"):
        probe_run(denoiser, stages=(2,))
    with pytest.raises(RecipeError, match=f"there is no step {network.recipe.task.schedule.steps}"):
        probe_run(denoiser, steps=(network.recipe.task.schedule.steps,))
