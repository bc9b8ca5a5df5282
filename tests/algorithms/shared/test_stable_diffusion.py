"""Stable Diffusion as a guide: its prompts, its noise, and whole runs of FedDifRC from a folder, offline."""

import dataclasses

import pytest
import torch
from tiny_sd import tiny_sd
from toy import ToyImages, toy_recipe

from effuse.algorithms.fed3r import Fed3R
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.shared.guides import Encoder
from effuse.algorithms.shared.stable_diffusion import LatentNoise, StableDiffusion
from effuse.core.build import build_text
from effuse.core.data import Shape
from effuse.core.errors import RecipeError, TrainingError
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.core.spec import text
from effuse.core.workbench import Client
from effuse.machines.eager import Eager
from effuse.models.headed import Headed
from effuse.models.stable_diffusion import Sd
from effuse.models.vision import Vision
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tools.check import check

LOCAL = SGD(lr=0.1, batch=8, steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_sd(tmp_path_factory.mktemp("tiny") / "sd")


@pytest.fixture
def guide(folder):
    return StableDiffusion(network=Sd(folder=str(folder), px=16), stages=(1, 4), widths=(12, 4), reduce="random")


def recipe(guide, **keys):
    algorithm = FedDifRC(local=LOCAL, guide=guide, t=3, **keys)
    return toy_recipe(algorithm=algorithm, rounds=1, clients=2, data=ToyImages(n=6))


def test_prompts_have_the_classes_names_or_are_given(guide):
    free = ["a photo of a visual object", "a photo of a similar object"]
    assert guide.asked(("cat", "dog")) == ["a photo of a cat", "a photo of a dog", *free, ""]
    assert dataclasses.replace(guide, prompts=("one", "two")).asked(("cat", "dog")) == ["one", "two", *free, ""]
    others = dataclasses.replace(guide, others=("a photo of a dog", "a photo of a cat"))
    assert others.asked(("cat",))[1:] == [*free, "a photo of a dog", "a photo of a cat", ""]
    assert others.unlabelled(1) == (1, (2, 3, 4)) and guide.unlabelled(10) == (10, (11,))
    wrong = dataclasses.replace(guide, network=guide.network.resolved(Shape(4, 1, 2)), prompts=("one",), widths=(4, 4))
    with pytest.raises(RecipeError, match="prompts: 1 for 2 classes"):
        wrong.ready(8, 2, 3)
    with pytest.raises(RecipeError, match="no stage 5; sd has 0 to 4"):
        dataclasses.replace(guide, stages=(5,)).channels  # noqa: B018
    assert guide.channels == (8, 4)


def test_features_depend_on_prompt_noise_and_condition(guide):
    guide = dataclasses.replace(guide, network=guide.network.resolved(Shape(4, 1, 2)), widths=None)
    data = ToyImages(n=6).load("train")
    shard = toy_recipe(data=ToyImages(n=6), clients=1).shards(data)[0]
    client = Client(Eager(torch.device("cpu")), Classify(), 1, 0, shard)
    client.begin(Stream((0, 0, "train")), federated=0)
    assert guide.model(None) is None, "no weight is sent"
    net = guide.open(client, None)
    basis = guide.basis(12, 2, Stream((0,)), None)
    basis = dataclasses.replace(basis, condition=guide.entry(3, Stream((0,))))
    assert basis.condition.shape == (3, 8)

    def seen(label, t=None, guide=guide, z=None):
        return guide.features(client, net, basis, torch.full((6,), label), t, z)

    clean = seen(0)
    assert clean.shape == (6, 12) and torch.equal(clean, seen(0)), "the clean image has no noise"
    assert not torch.allclose(clean, seen(1)) and not torch.allclose(seen(0, t=500), seen(0, t=500))
    assert not torch.allclose(clean, seen(0, guide=dataclasses.replace(guide, prompts=("cat", "dog"))))
    assert not torch.allclose(clean, seen(0, z=torch.ones(6, 3)))
    null = dataclasses.replace(guide, label="null")
    client.begin(Stream((0, 0, "train")), federated=0)
    first = seen(0, t=3, guide=null)
    client.begin(Stream((0, 0, "train")), federated=0)
    assert torch.equal(first, seen(1, t=3, guide=null)), "the empty prompt for every label"


def test_feddifrc_from_a_folder_on_two_engines(guide, tmp_path):
    """The same bits through the wire format; nothing of the guide is sent down, only its basis."""
    results = {engine: run(recipe(guide), tmp_path / engine, engine=engine) for engine in ("simulator", "loopback")}
    assert results["simulator"].weights_sha256 == results["loopback"].weights_sha256
    told = check(recipe(guide), "toy")
    assert told["traffic"]["bytes"]["total"] == results["loopback"].traffic.bytes.total
    plain = run(recipe(guide, tdcl=0.0, ndcr=0.0), tmp_path / "plain")
    assert plain.weights_sha256 != results["simulator"].weights_sha256


def test_a_guide_survives_the_grammar(guide):
    assert build_text(text(guide), StableDiffusion, "guide") == guide


def test_ridge_on_its_features(folder, tmp_path):
    """Fed3R with Stable Diffusion as the frozen part of the model: the model's own values are those of the head."""
    model = Headed(network=Sd(folder=str(folder), px=16), stages=(1, 4))
    base = toy_recipe(algorithm=Fed3R(), rounds=1, data=ToyImages(n=6))
    found = run(dataclasses.replace(base, model=model), tmp_path / "sd")
    assert found.parameters == 2 * 12 + 2


def test_latent_noise_is_for_features_only():
    drawn = LatentNoise(channels=4, side=2).draw(3, torch.Size((1, 4, 4)), torch.zeros(3), torch.Generator())
    assert drawn["noise"].shape == (3, 4, 2, 2)
    with pytest.raises(TrainingError, match="has no loss"):
        LatentNoise(channels=4, side=2).loss(None, None)


def test_a_published_encoder_from_a_folder(tmp_path):
    """Tables 6 and 8: a vision transformer as transformers saves it, without classes, so TDCL is off."""
    from transformers import ViTConfig, ViTModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        ViTModel(ViTConfig(**shape, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    arch = Vision(folder=str(tmp_path / "vit"), px=8).resolved(Shape(4, 1, 2))
    x = torch.rand(2, 1, 4, 4)
    found = arch.build()(x, give="features")
    direct = ViTModel.from_pretrained(tmp_path / "vit").eval()
    large = torch.nn.functional.interpolate((x.expand(-1, 3, -1, -1) + 1) / 2, size=(8, 8), mode="bilinear")
    torch.testing.assert_close(found, direct(pixel_values=(large - 0.5) / 0.5).last_hidden_state[:, 0])
    guide = Encoder(network=arch, widths=(8,), reduce="random")
    assert guide.channels == (8,) and guide.model(None) is None
    wide = Encoder(network=Vision(folder=str(tmp_path / "vit"), px=8), reduce="random")
    first = run(recipe(wide, tdcl=0.0), tmp_path / "run", engine="loopback")
    assert first.weights_sha256 == run(recipe(wide, tdcl=0.0), tmp_path / "again").weights_sha256
