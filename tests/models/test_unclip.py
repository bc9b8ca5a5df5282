"""unCLIP of random components from a folder: its embedding, the noise of a level, and images against diffusers' pipeline."""

import pytest
import torch
from tiny_sd import tiny_unclip

from effuse.core.data import Shape
from effuse.core.errors import MissingError, ModelError
from effuse.models.headed import Embedded
from effuse.models.unclip import UnClip
from effuse.models.unet import DigitsUnet

TINY = Shape(4, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_unclip(tmp_path_factory.mktemp("tiny") / "unclip")


def test_the_embedding_is_the_image_encoders(folder):
    """An image is scaled to 8 pixels, then normalised by the means and deviations of the folder."""
    from transformers import CLIPVisionModelWithProjection

    x = torch.rand(2, 1, 4, 4) * 2 - 1
    direct = CLIPVisionModelWithProjection.from_pretrained(folder / "image_encoder")
    large = torch.nn.functional.interpolate((x.expand(-1, 3, -1, -1) + 1) / 2, size=(8, 8), mode="bilinear")
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    arch = UnClip(folder=str(folder)).resolved(TINY)
    with torch.no_grad():
        found, wanted = arch.build()(x), direct(pixel_values=(large - mean) / std).image_embeds
    torch.testing.assert_close(found, wanted)
    assert found.shape == (2, arch.width) and arch.latent_shape == (4, 8) and not arch.initial(None).params


def test_images_are_those_of_diffusers_pipeline(folder):
    """The same noise, prompt, embedding, level and guidance, in three steps: the pipeline of diffusers draws the same."""
    from diffusers import StableUnCLIPImg2ImgPipeline
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
    from transformers import CLIPVisionModelWithProjection

    net = UnClip(folder=str(folder)).resolved(TINY).build()
    usual = StableUnCLIPImageNormalizer.from_pretrained(folder / "image_normalizer")
    pipe = StableUnCLIPImg2ImgPipeline(
        feature_extractor=None,
        image_encoder=CLIPVisionModelWithProjection.from_pretrained(folder / "image_encoder"),
        image_normalizer=usual,
        image_noising_scheduler=scheduler(folder, "DDPMScheduler", "image_noising_scheduler"),
        tokenizer=net.tokenizer,
        text_encoder=net.words,
        unet=net.unet,
        scheduler=scheduler(folder, "DDIMScheduler", "scheduler"),
        vae=net.vae,
    )
    pipe.set_progress_bar_config(disable=True)
    e, noise = torch.randn(1, 8), torch.randn(1, 8)
    latent = torch.randn(1, 4, 8, 8)
    states = net.embedded(["a photo of a dog", ""])
    with torch.no_grad():
        condition = net.noisy(e, noise, 200)
        torch.testing.assert_close(condition, pipe.noise_image_embeddings(e, 200, noise=noise))
        found = net.drawn(condition, states[:1], states[1:], latent, 3, 4.0)
        wanted = pipe(
            prompt_embeds=states[:1],
            negative_prompt_embeds=states[1:],
            image_embeds=e,
            noise_level=0,
            latents=latent,
            num_inference_steps=3,
            guidance_scale=4.0,
            output_type="pt",
            generator=torch.Generator().manual_seed(5),
        ).images
        # the pipeline draws the noise of the level itself
        own = torch.randn(1, 8, generator=torch.Generator().manual_seed(5))
        at_level_0 = net.drawn(net.noisy(e, own, 0), states[:1], states[1:], latent, 3, 4.0)
    torch.testing.assert_close((at_level_0 + 1) / 2, wanted, rtol=1e-4, atol=1e-4)
    assert found.shape == (1, 3, 16, 16) and not torch.allclose(found, at_level_0)


def scheduler(folder, kind, name):
    import diffusers

    return getattr(diffusers, kind).from_pretrained(folder / name)


def test_a_folder_that_lacks_a_part_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_MODELS", str(tmp_path))
    with pytest.raises(MissingError, match="unclip: there is no .*unet/config.json; bring a complete folder there"):
        UnClip(folder="stable-diffusion-2-1-unclip").resolved(TINY)


def test_a_head_on_an_encoder(folder):
    """Of 8 features and two classes: 18 values of its own. A network without features is refused."""
    arch = Embedded(network=UnClip(folder=str(folder))).resolved(TINY)
    arch = Embedded(network=arch.network.resolved(TINY), **dict(TINY._asdict()))
    net = arch.build()
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        assert torch.equal(net(x), net.head(net(x, give="features"))) and net.head.weight.shape == (2, 8)
    with pytest.raises(ModelError, match="unet gives no features of an image; use vision"):
        Embedded(network=DigitsUnet().resolved(TINY), **dict(TINY._asdict())).build()
