"""Published image encoders as frozen sources of features: CLIP, MAE, DINO and other vision transformers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.errors import ModelError
from effuse.core.spec import spec
from effuse.models.local import LocalCopy, transformers_of
from effuse.models.saved import read_json

# a configuration's model_type -> the classes of transformers for its configuration and its network
KNOWN: Mapping[str, tuple[str, str]] = {
    "clip": ("CLIPVisionConfig", "CLIPVisionModel"),
    "clip_vision_model": ("CLIPVisionConfig", "CLIPVisionModel"),
    "dinov2": ("Dinov2Config", "Dinov2Model"),
    "vit": ("ViTConfig", "ViTModel"),
    "vit_mae": ("ViTMAEConfig", "ViTMAEModel"),
}


@spec
class Vision(LocalCopy):
    """A vision transformer in a folder that transformers wrote. Its features are those of the class token."""

    featured: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ("config.json", "model.safetensors")
    optional: ClassVar[tuple[str, ...]] = ("preprocessor_config.json",)

    px: PositiveInt = 224  # images are scaled to this side

    def shaped(self) -> nn.Module:
        config, network = self._classes()
        told = read_json(self.path / "config.json")
        told = told.get("vision_config", told)  # CLIP's folder has a text encoder too
        return self._net(network(config(**{**told, "mask_ratio": 0.0} if "mask_ratio" in told else told)))

    def loaded(self) -> nn.Module:
        _, network = self._classes()
        whole = {"mask_ratio": 0.0} if network.__name__ == "ViTMAEModel" else {}  # no patch is hidden
        net = network.from_pretrained(self.path, use_safetensors=True, local_files_only=True, **whole)
        return self._net(net.float())

    def _classes(self) -> tuple[Any, Any]:
        kind = str(read_json(self.path / "config.json").get("model_type"))
        if kind not in KNOWN:
            raise ModelError(f"{self.path}: its model_type is {kind}; supported are {', '.join(KNOWN)}")
        library = transformers_of(self.name)
        return getattr(library, KNOWN[kind][0]), getattr(library, KNOWN[kind][1])

    def _net(self, net: nn.Module) -> nn.Module:
        file = self.path / "preprocessor_config.json"
        told = read_json(file) if file.is_file() else {}
        return VisionNet(net, self.px, told.get("image_mean", [0.5] * 3), told.get("image_std", [0.5] * 3))


class VisionNet(nn.Module):
    """Images in [-1, 1] as the transformer expects them."""

    def __init__(self, net: nn.Module, px: int, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.net: Any = net
        self.px, self.mean, self.std = px, mean, std

    def forward(self, x: Tensor, give: str = "features") -> Tensor:
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        x = F.interpolate((x + 1) / 2, size=(self.px, self.px), mode="bilinear", align_corners=False)
        mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (self.mean, self.std))
        states: Tensor = self.net(pixel_values=(x - mean) / std).last_hidden_state
        return states[:, 0]
