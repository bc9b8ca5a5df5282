"""Stable Diffusion 1.x and 2.x as a frozen source of features: the decoder stages of its U-Net, asked for in words."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.spec import spec
from effuse.models.local import LocalCopy, transformers_of
from effuse.models.saved import read_json

WEIGHTS = "diffusion_pytorch_model.safetensors"


@spec
class Sd(LocalCopy):
    """Stable Diffusion 1.x or 2.x in a folder that diffusers wrote. It sees images enlarged to `px` pixels a side."""

    conditional: ClassVar[bool] = True
    staged: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = (
        "unet/config.json",
        f"unet/{WEIGHTS}",
        "vae/config.json",
        f"vae/{WEIGHTS}",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
    )
    optional: ClassVar[tuple[str, ...]] = ("tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json")

    px: PositiveInt = 224

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """The channels of the middle and of each stage of the decoder."""
        widths = read_json(self.path / "unet/config.json")["block_out_channels"]
        return (widths[-1], *reversed(widths))

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Channels and side of the latent image."""
        config = read_json(self.path / "vae/config.json")
        return config["latent_channels"], -(-self.px // 2 ** (len(config["block_out_channels"]) - 1))

    def example(self) -> tuple[Tensor | None, ...]:
        """One image, a time step and a label."""
        (x,) = super().example()
        one = torch.zeros(1, dtype=torch.int64, device="meta")
        return x, one, one

    def shaped(self) -> nn.Module:
        from diffusers import AutoencoderKL, UNet2DConditionModel

        text = transformers_of(self.name)
        unet: Any = UNet2DConditionModel.from_config(read_json(self.path / "unet/config.json"))
        vae: Any = AutoencoderKL.from_config(read_json(self.path / "vae/config.json"))
        words = text.CLIPTextModel(text.CLIPTextConfig(**read_json(self.path / "text_encoder/config.json")))
        return SdNet(unet, vae, words, self._tokenizer(), self.px)

    def loaded(self) -> nn.Module:
        from diffusers import AutoencoderKL, UNet2DConditionModel

        more: Any = {"use_safetensors": True, "local_files_only": True}
        unet: Any = UNet2DConditionModel.from_pretrained(self.path / "unet", low_cpu_mem_usage=False, **more)
        vae: Any = AutoencoderKL.from_pretrained(self.path / "vae", low_cpu_mem_usage=False, **more)
        words = transformers_of(self.name).CLIPTextModel.from_pretrained(self.path / "text_encoder", **more)
        return SdNet(unet.float(), vae.float(), words.float(), self._tokenizer(), self.px)

    def _tokenizer(self) -> Any:
        return transformers_of(self.name).CLIPTokenizer.from_pretrained(self.path / "tokenizer", local_files_only=True)


class SdNet(nn.Module):
    """Called as a class-conditional U-Net is, with a prompt in the place of each class."""

    def __init__(self, unet: nn.Module, vae: nn.Module, words: nn.Module, tokenizer: Any, px: int) -> None:
        super().__init__()
        self.unet: Any = unet
        self.vae: Any = vae
        self.words: Any = words
        self.tokenizer, self.px = tokenizer, px

    @property
    def condition_width(self) -> int:
        """The width of a `condition`, which becomes one more token."""
        return int(self.unet.config.cross_attention_dim)

    def embedded(self, prompts: Sequence[str]) -> Tensor:
        """The hidden states of prompts, one row each."""
        longest = self.words.config.max_position_embeddings
        told = self.tokenizer(
            list(prompts), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            states: Tensor = self.words(told.to(self.words.device))[0]
        return states

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        labels: Tensor,
        give: str = "stages",
        condition: Tensor | None = None,
        *,
        prompts: Tensor | None = None,
        noise: Tensor | None = None,
        a: Tensor | float = 1.0,
        s: Tensor | float = 0.0,
    ) -> tuple[Tensor, ...]:
        """The stages. `prompts` has a row for each class and the empty one last; without it no class is told."""
        prompts = self.embedded([""]) if prompts is None else prompts
        rows = torch.where((labels < 0) | (labels >= len(prompts)), len(prompts) - 1, labels)
        states = prompts[rows]
        if condition is not None:
            states = torch.cat([states, condition[:, None]], dim=1)
        latent = a * self.latent(x)
        if noise is not None:
            latent = latent + s * noise
        return self.stages(latent, t, states)

    def latent(self, x: Tensor) -> Tensor:
        """The mean of the latent image, so that nothing is drawn."""
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        x = F.interpolate(x, size=(self.px, self.px), mode="bilinear", align_corners=False)
        mean: Tensor = self.vae.encode(x).latent_dist.mean
        return mean * self.vae.config.scaling_factor

    def stages(self, latent: Tensor, t: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the middle and of each stage of the decoder."""
        maps: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            maps.append(output)

        hooks = [block.register_forward_hook(keep) for block in (self.unet.mid_block, *self.unet.up_blocks)]
        try:
            self.unet(latent, t.expand(len(latent)), encoder_hidden_states=states)
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(maps)
