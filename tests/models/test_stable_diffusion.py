"""Stable Diffusion as a frozen network: shapes at the paper's size, a tiny one from a folder, and what is pinned."""

import json

import pytest
import torch
from tiny_sd import tiny_sd, tokenizer

from effuse.core.data import Shape
from effuse.core.errors import MissingError, ModelError
from effuse.models.stable_diffusion import Sd

TINY = Shape(4, 1, 2)
UNET = {"block_out_channels": [320, 640, 1280, 1280], "sample_size": 64, "cross_attention_dim": 768}
SD1, SD2 = UNET, UNET | {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_sd(tmp_path_factory.mktemp("tiny") / "sd")


@pytest.mark.parametrize(("unet", "width", "parameters"), [(SD1, 768, 859_520_964), (SD2, 1024, 865_910_724)])
def test_the_published_networks_at_224_pixels(tmp_path, unet, width, parameters):
    """The latent side 28 is no multiple of 8: the middle is 4 x 4, and the decoder's sizes are those of the encoder."""
    tokenizer(tmp_path / "tokenizer")
    words = {"hidden_size": width, "num_hidden_layers": 1, "max_position_embeddings": 77}
    for part, config in (("unet", unet), ("vae", VAE), ("text_encoder", words)):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    arch = Sd(folder=str(tmp_path), side=32, channels=3, classes=10)
    net = arch.hollow_net()
    assert sum(p.numel() for p in net.unet.parameters()) == parameters
    assert arch.latent_shape == (4, 28)
    maps = net(*arch.example(), give="stages")
    found = [tuple(m.shape[1:]) for m in maps]
    assert found == [(1280, 4, 4), (1280, 7, 7), (1280, 14, 14), (640, 28, 28), (320, 28, 28)]
    assert arch.stage_channels == tuple(shape[0] for shape in found)


def test_a_prompt_takes_the_place_of_a_class(folder):
    """Each image under its own prompt is what it is alone; the null label is the empty prompt."""
    net = Sd(folder=str(folder), px=16).resolved(TINY).build()
    prompts = net.embedded(["a photo of a dark", "a photo of a light", ""])
    assert prompts.shape == (3, 8, 8) and not torch.allclose(prompts[0], prompts[1])
    x, t = torch.rand(1, 1, 4, 4) * 2 - 1, torch.tensor([5])

    def seen(label, **more):
        with torch.no_grad():
            return net(x, t, torch.tensor([label]), prompts=prompts, **more)[4]

    assert not torch.allclose(seen(0), seen(1)) and not torch.allclose(seen(0), seen(-1))
    with torch.no_grad():
        assert torch.equal(net(x, t, torch.tensor([-1]))[4], seen(-1))
    noise = torch.ones(1, 4, 8, 8)
    assert torch.equal(seen(0, noise=noise, s=0.0), seen(0)) and not torch.allclose(seen(0, noise=noise, s=0.5), seen(0))
    assert not torch.allclose(seen(0, condition=torch.ones(1, 8)), seen(0)), "a condition is one more token"
    assert net.condition_width == 8


def test_words_are_told_apart_by_the_tokenizer(folder):
    """The vocabulary holds these words whole: one token each, between start and end, padded to 8."""
    net = Sd(folder=str(folder), px=16).resolved(TINY).build()
    ids = net.tokenizer(["a photo of a dark"]).input_ids[0]
    named = json.loads((folder / "tokenizer/vocab.json").read_text())
    words = ["<|startoftext|>", "a</w>", "photo</w>", "of</w>", "a</w>", "dark</w>", "<|endoftext|>"]
    assert ids == [named[word] for word in words]


def test_the_latent_image_is_the_mean_times_the_scale(folder):
    net = Sd(folder=str(folder), px=16).resolved(TINY).build()
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        large = torch.nn.functional.interpolate(x.expand(-1, 3, -1, -1), size=(16, 16), mode="bilinear")
        wanted = net.vae.encode(large).latent_dist.mean * 0.18215
        assert torch.equal(net.latent(x), wanted) and torch.equal(net.latent(x), net.latent(x)), "nothing is drawn"


def test_the_copy_is_pinned_and_never_sent(folder, tmp_path, monkeypatch):
    arch = Sd(folder=str(folder), px=16).resolved(TINY)
    assert len(arch.sha256) == 64 and arch.empty.params.numel == 0 and not arch.travels
    sent = arch.portable
    assert (sent.folder, sent.sha256, sent.travels) == ("sd", arch.sha256, True)
    assert not Sd(folder="sd").travels and not Sd(folder="..", sha256="0" * 64).travels
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingError, match="there is no sd/unet/config.json; .* into the folder that EFFUSE_MODELS names"):
        sent.resolved(TINY)
    monkeypatch.setenv("EFFUSE_MODELS", str(folder.parent))
    assert sent.resolved(TINY).sha256 == arch.sha256
    mine, own = (net.unet.conv_in.weight for net in (arch.build(), sent.build()))
    assert torch.equal(mine, own)
    other = tiny_sd(tmp_path / "sd", seed=1)
    monkeypatch.setenv("EFFUSE_MODELS", str(tmp_path))
    for use in (lambda: sent.resolved(TINY), sent.build):
        with pytest.raises(ModelError, match="are not those of the recipe: their SHA-256 is"):
            use()
    (other / "unet/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(MissingError, match="there is no .*unet/diffusion_pytorch_model.safetensors"):
        sent.build()
