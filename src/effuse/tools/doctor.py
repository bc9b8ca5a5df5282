"""What this machine has for effuse, and what to do about the rest: `effuse doctor`."""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch

import effuse
from effuse.core.errors import shown
from effuse.core.files import cache_folder
from effuse.data.files import ROOT, data_root

ROOMY = 10 * 2**30  # bytes on the disk, below which a run with many clients may fill it
EXTRAS = {
    "flwr": "federations across machines: pip install 'effuse[flower]'",
    "matplotlib": "plots of `effuse bound`: pip install 'effuse[plots]'",
    "datasets": "data sets of Hugging Face: pip install 'effuse[hf]'",
    "tensorboard": "`--track tensorboard`: pip install 'effuse[tensorboard]'",
    "wandb": "`--track wandb`: pip install wandb",
    "trackio": "`--track trackio`: pip install trackio",
    "mlflow": "`--track mlflow`: pip install mlflow",
}
ERROR = "the error of a recipe that wants it says how to get it"
FILES = {
    "inception_fid.safetensors": "FID, KID, precision and recall; docs/runs.md says how to make it; or encoder=classifier()",
    "mnist": f"MNIST; {ERROR}",
    "fashion_mnist": f"Fashion-MNIST; {ERROR}",
    "cifar10.npz": f"CIFAR-10; {ERROR}",
    "cifar100.npz": f"CIFAR-100; {ERROR}",
    "pathmnist.npz": "PathMNIST, from https://medmnist.com",
    "celeba": f"CelebA; {ERROR}",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    what: str
    found: str
    remedy: str | None = None  # what to do, where something is missing


def examine(folder: Path) -> list[Finding]:
    """Everything that a run may need; `folder` is where runs would be written."""
    return [*_software(), *_hardware(), *_data(), *_disk(folder)]


def _software() -> list[Finding]:
    found = [
        Finding("effuse", effuse.__version__),
        Finding("Python", platform.python_version()),
        Finding("torch", torch.__version__),
    ]
    for package, remedy in EXTRAS.items():
        try:
            found.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(package, "not installed", f"only needed for {remedy}"))
    return found


def _hardware() -> list[Finding]:
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [Finding("CPU", f"{cores} cores, {memory / 2**30:,.0f} GiB of memory")]
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(Finding(f"GPU {number}", f"{facts.name}, {facts.total_memory / 2**30:,.0f} GiB"))
    if not torch.cuda.is_available():
        remedy = "runs use the CPU; for a GPU install a torch build for CUDA and its driver"
        found.append(Finding("GPU", "none that torch can use", remedy))
    return found


def _data() -> list[Finding]:
    root = data_root()
    if root is None:
        remedy = f"set {ROOT} to the folder of your data sets; the demo and your own folders do not need it"
        return [Finding(ROOT, "not set", remedy)]
    if not root.is_dir():
        return [Finding(ROOT, f"{root} is not a folder", "make it, or set it to another folder")]
    found = [Finding(ROOT, str(root))]
    for name, purpose in FILES.items():
        there = (root / name).exists()
        found.append(Finding(name, "found" if there else "not there", None if there else f"only needed for {purpose}"))
    return found


def _disk(folder: Path) -> list[Finding]:
    found = []
    for what, place in (("runs", folder), ("cache", cache_folder())):
        there = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
        free, writable = shutil.disk_usage(there).free, os.access(there, os.W_OK)
        remedy = None if writable else "choose another folder, or change who may write there"
        if writable and free < ROOMY:
            remedy = "free some space; `effuse check` estimates what a run needs"
        words = f"{free / 2**30:,.1f} GiB free in {there}" + ("" if writable else ", which may not be written")
        found.append(Finding(f"disk for {what}", shown(words), remedy))
    return found
