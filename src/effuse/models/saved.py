"""Saved models: folders of safetensors and JSON. Diffusers alone can open those of its own networks."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from effuse.core.build import build
from effuse.core.errors import EffuseError, ModelError
from effuse.core.grammar import parse
from effuse.core.model import Arch, Model, Net, fill
from effuse.core.params import Buffers, Params
from effuse.core.spec import text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SCHEDULER = "scheduler/scheduler_config.json"


def write_config(arch: Arch, folder: Path, note: str = "") -> None:
    """Write the folder's architecture in the grammar, and a note to readers."""
    config = {"format": "effuse", "arch": text(arch)} | ({"note": note} if note else {})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def write_plain(arch: Arch, net: nn.Module, folder: Path, scheduler: Any, note: str = "") -> None:
    """Write the folder of a network that only effuse can open; a classifier has no scheduler."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {k: v.detach().cpu().contiguous() for k, v in net.state_dict().items() if not arch.constant(k)}
    save_file(values, folder / WEIGHTS)
    if scheduler is not None:
        scheduler.save_pretrained(folder / "scheduler")
    write_config(arch, folder, note)


def load_model(folder: Path | str) -> tuple[Model, dict[str, Any] | None]:
    """The model in a folder that effuse or diffusers wrote, and its scheduler's configuration if it has one."""
    folder = Path(folder)
    schedule = read_json(folder / SCHEDULER) if (folder / SCHEDULER).is_file() else None
    return filled(read_arch(folder), folder), schedule


def read_arch(folder: Path, classes: int | None = None) -> Arch:
    """The architecture in a saved folder; `classes` for folders of diffusers, which may not state them."""
    if not folder.is_dir():
        raise ModelError(f"no model folder at '{folder}'; give a run's model/ folder or one that diffusers saved")
    if (folder / CONFIG).is_file() and "arch" in (config := read_json(folder / CONFIG)):
        try:
            return build(parse(config["arch"]), Arch, str(folder / CONFIG))
        except (EffuseError, TypeError) as error:
            raise ModelError(f"{folder / CONFIG} does not hold an architecture: {error}") from None
    from effuse.models.unet import from_diffusers

    path = unet_folder(folder) / CONFIG
    if not path.is_file():
        raise ModelError(f"'{folder}' has neither {CONFIG} nor unet/{CONFIG}; give a run's model/ folder or a diffusers one")
    config = read_json(path)
    if config.get("_class_name") != "UNet2DModel":
        raise ModelError(f"{path} describes a {config.get('_class_name')}; only diffusers' UNet2DModel can be opened")
    if classes is None:
        classes = config["num_class_embeds"] - 1 if config.get("num_class_embeds") else 0
    return from_diffusers(config, classes, str(path))


def filled(arch: Arch, folder: Path) -> Model:
    """A model of that architecture with the weights of a saved folder; shapes only under `torch.device("meta")`."""
    values = read_weights(folder)
    with torch.device("meta"):  # what does not fit is refused before memory is taken
        _filled(arch, values, folder)
    return _filled(arch, values, folder)


def _filled(arch: Arch, values: dict[str, Tensor], folder: Path) -> Model:
    try:
        with torch.random.fork_rng(devices=[]):  # fresh values are discarded and must not advance the default generator
            net = arch.build()
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{folder}: its {arch.name} cannot be built: {error}; save the model again") from None
    view = Net(net, arch=arch)
    stray = values.keys() - net.state_dict().keys()
    if stray:
        raise ModelError(f"{folder}: '{sorted(stray)[0]}' is not a tensor of {arch.name}")
    values = {k: v for k, v in values.items() if not arch.constant(k)}
    params = Params({k: v for k, v in values.items() if k in view.params})
    buffers = Buffers({k: v for k, v in values.items() if k not in view.params})
    fill(view, Model(arch, params, buffers))
    return Model(arch, Params.of(view), Buffers.of(view))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved folder, from safetensors only."""
    try:
        values = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else _from_diffusers(unet_folder(folder))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights in '{folder}' cannot be read: {error}; save them again, as safetensors") from None
    return {k: v.float() if v.is_floating_point() else v for k, v in values.items()}


def _from_diffusers(folder: Path) -> dict[str, Tensor]:
    from diffusers import UNet2DModel

    # diffusers reads its own files, because it knows the tensor names of its earlier releases
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        net, report = UNet2DModel.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    # diffusers only warns of missing tensors, and gives them fresh values
    for kind in ("missing_keys", "unexpected_keys"):
        if report[kind]:
            raise ValueError(f"{kind.replace('_', ' ')} {', '.join(sorted(report[kind])[:3])}")
    return net.state_dict()


def unet_folder(folder: Path) -> Path:
    """The folder of the UNet2DModel within one that diffusers wrote."""
    return folder / "unet" if (folder / "unet").is_dir() else folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object of keys and values")
    return value
