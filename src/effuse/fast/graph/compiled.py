"""A cache of compiled code between processes, so that a second run of a recipe starts in seconds."""

import contextlib
import os
import platform
import re

import torch

from effuse.core.files import cache_folder


def keep_compiled(device: torch.device) -> None:
    """Set the cache folder before the first compilation: one for each torch version, kind of device and user.

    Torch's default is a folder under /tmp, which a reboot empties and another user may have made. A user's setting takes
    precedence.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    folder = cache_folder() / "compiled" / re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{kind}")
    with contextlib.suppress(OSError):  # without a writable folder, torch's default remains
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))  # for our own kernels
