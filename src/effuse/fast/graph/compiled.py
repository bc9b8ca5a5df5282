"""What torch compiles is kept between processes, so that a second run of a recipe starts in seconds."""

import contextlib
import os
import platform
import re

import torch

from effuse.core.files import cache_folder


def keep_compiled(device: torch.device) -> None:
    """Say, before anything is compiled, where compiled code is found and left: for one torch, one kind of device, one user.

    Torch's own choice is a folder under /tmp, which a reboot empties and a stranger may have made; a user's choice stands.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    folder = cache_folder() / "compiled" / re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{kind}")
    with contextlib.suppress(OSError):  # without a folder to keep it in, torch's own choice is as good
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))  # of our own kernels, too
