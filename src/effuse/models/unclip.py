"""Stable Diffusion 2.1 unCLIP as a frozen network: embeddings of images, and images drawn from embeddings and words."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effuse.core.spec import spec
from effuse.models.local import LocalCopy, transformers_of
from effuse.models.saved import read_json
from effuse.models.stable_diffusion import WEIGHTS

AT_ONCE = 4  # images that are drawn at a time: 768 pixels a side take gigabytes


@spec
class UnClip(LocalCopy, name="unclip"):
    """Stable Diffusion 2.1 unCLIP in a folder that diffusers wrote. Its features are the embedding of its image encoder."""

    featured: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = (
        "unet/config.json",
        f"unet/{WEIGHTS}",
        "vae/config.json",
        f"vae/{WEIGHTS}",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "image_encoder/config.json",
        "image_encoder/model.safetensors",
        "image_normalizer/config.json",
        f"image_normalizer/{WEIGHTS}",
        "image_noising_scheduler/scheduler_config.json",
        "scheduler/scheduler_config.json",
        "feature_extractor/preprocessor_config.json",
    )
    optional: ClassVar[tuple[str, ...]] = ("tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json")

    @property
    def width(self) -> int:
        """The width of an embedding."""
        return int(read_json(self.path / "image_encoder/config.json")["projection_dim"])

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Channels and side of the latent image."""
        config = read_json(self.path / "unet/config.json")
        return config["in_channels"], config["sample_size"]

    def shaped(self) -> nn.Module:
        from diffusers import AutoencoderKL, UNet2DConditionModel

        library = transformers_of(self.name)
        unet: Any = UNet2DConditionModel.from_config(read_json(self.path / "unet/config.json"))
        vae: Any = AutoencoderKL.from_config(read_json(self.path / "vae/config.json"))
        words = library.CLIPTextModel(library.CLIPTextConfig(**read_json(self.path / "text_encoder/config.json")))
        config = library.CLIPVisionConfig(**read_json(self.path / "image_encoder/config.json"))
        eyes = library.CLIPVisionModelWithProjection(config)
        return UnClipNet(self, unet, vae, words, eyes, torch.zeros(1, self.width), torch.ones(1, self.width))

    def loaded(self) -> nn.Module:
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from safetensors.torch import load_file

        library, more = transformers_of(self.name), {"use_safetensors": True, "local_files_only": True}
        slow: Any = {**more, "low_cpu_mem_usage": False}
        unet: Any = UNet2DConditionModel.from_pretrained(self.path / "unet", **slow)
        vae: Any = AutoencoderKL.from_pretrained(self.path / "vae", **slow)
        words = library.CLIPTextModel.from_pretrained(self.path / "text_encoder", **more)
        eyes = library.CLIPVisionModelWithProjection.from_pretrained(self.path / "image_encoder", **more)
        usual = load_file(self.path / "image_normalizer" / WEIGHTS)
        unet, vae, words, eyes = unet.float(), vae.float(), words.float(), eyes.float()
        return UnClipNet(self, unet, vae, words, eyes, usual["mean"].float(), usual["std"].float())


class UnClipNet(nn.Module):
    """Embeds images in [-1, 1], and draws images from embeddings and prompts."""

    mean: Tensor
    std: Tensor

    def __init__(self, arch: UnClip, unet: Any, vae: Any, words: Any, eyes: Any, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        from diffusers import DDIMScheduler, DDPMScheduler

        self.unet: Any = unet
        self.vae: Any = vae
        self.words: Any = words
        self.eyes: Any = eyes
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        path = arch.path
        self.tokenizer = transformers_of(arch.name).CLIPTokenizer.from_pretrained(path / "tokenizer", local_files_only=True)
        with torch.device("cpu"):
            noising: Any = DDPMScheduler.from_config(read_json(path / "image_noising_scheduler/scheduler_config.json"))
            self.steps: Any = DDIMScheduler.from_config(read_json(path / "scheduler/scheduler_config.json"))
        self.kept = noising.alphas_cumprod.tolist()
        seen = read_json(path / "feature_extractor/preprocessor_config.json")
        self.seen = (seen["image_mean"], seen["image_std"])

    def forward(self, x: Tensor, give: str = "features") -> Tensor:
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        side = self.eyes.config.image_size
        x = F.interpolate((x + 1) / 2, size=(side, side), mode="bilinear", align_corners=False)
        mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in self.seen)
        found: Tensor = self.eyes(pixel_values=(x - mean) / std).image_embeds
        return found

    def embedded(self, prompts: Sequence[str]) -> Tensor:
        """The hidden states of prompts, one row each."""
        longest = self.words.config.max_position_embeddings
        told = self.tokenizer(
            list(prompts), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            states: Tensor = self.words(told.to(self.words.device))[0]
        return states

    def noisy(self, embeddings: Tensor, noise: Tensor, level: int) -> Tensor:
        """Embeddings with the noise of a level, followed by the level itself, as the U-Net takes them."""
        from diffusers.models.embeddings import get_timestep_embedding

        a = self.kept[level]
        scaled = a**0.5 * (embeddings - self.mean) / self.std + (1 - a) ** 0.5 * noise
        at = torch.full((len(embeddings),), level, device=embeddings.device)
        width = embeddings.shape[1]
        told = get_timestep_embedding(at, width, flip_sin_to_cos=True, downscale_freq_shift=0)
        return torch.cat([scaled * self.std + self.mean, told], dim=1)

    def drawn(self, condition: Tensor, states: Tensor, empty: Tensor, latent: Tensor, steps: int, guidance: float) -> Tensor:
        """Images in [-1, 1] by DDIM from noise, under noisy embeddings and hidden states of prompts, with guidance."""
        if latent.is_meta:
            side = latent.shape[-1] * 2 ** (len(self.vae.config.block_out_channels) - 1)
            return latent.new_empty(len(latent), 3, side, side)
        parts = zip(*(x.split(AT_ONCE) for x in (condition, states, latent)))
        return torch.cat([self._few(c, s, empty, x, steps, guidance) for c, s, x in parts])

    def _few(self, condition: Tensor, states: Tensor, empty: Tensor, x: Tensor, steps: int, guidance: float) -> Tensor:
        self.steps.set_timesteps(steps)
        both = torch.cat([empty.expand_as(states), states])
        conditions = torch.cat([torch.zeros_like(condition), condition])
        for t in self.steps.timesteps:
            at = t.to(x.device).expand(2 * len(x))
            found = self.unet(torch.cat([x, x]), at, encoder_hidden_states=both, class_labels=conditions).sample
            without, under = found.chunk(2)
            x = self.steps.step(without + guidance * (under - without), t, x).prev_sample
        image: Tensor = self.vae.decode(x / self.vae.config.scaling_factor).sample
        return image.clamp(-1, 1)
