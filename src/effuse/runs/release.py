"""Which effuse this is, and where it runs: what a manifest keeps of them."""

import functools
import hashlib
import platform
from pathlib import Path

import torch

import effuse


@functools.cache
def source() -> str:
    """A digest of the package's own files: one for every commit that changed them, wherever they are installed."""
    root = Path(effuse.__file__).parent
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    told = [(path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def versions(device: str) -> dict[str, str]:
    """What a result may depend on besides its recipe and data."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "source": source(),
    }
    return found | ({"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {})
