"""The versions that a manifest records: of effuse, its dependencies and the machine."""

import functools
import hashlib
import platform
from pathlib import Path

import torch

import effuse


@functools.cache
def source() -> str:
    """A digest of the package's source files, independent of where they are installed."""
    root = Path(effuse.__file__).parent
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    digests = [(path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(repr(digests).encode()).hexdigest()[:16]


def versions(device: str) -> dict[str, str]:
    """The versions that a result may depend on, besides its recipe and data."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "source": source(),
    }
    return found | ({"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {})
