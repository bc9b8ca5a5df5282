"""The device of a run."""

import torch

from effuse.core.errors import RecipeError


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise RecipeError(f"no device '{name}'; valid: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device cuda: this machine has no usable GPU; use --device cpu")
    return torch.device(name)
