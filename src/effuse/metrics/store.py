"""What is worth computing once: tensors kept on disk between runs, values kept in memory within an evaluation."""

import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from effuse.core.errors import RunError
from effuse.core.metric import Subject

T = TypeVar("T")
Tensors = dict[str, Tensor]
Key = tuple[str | int | bool, ...]  # everything that a value depends on


def once(subject: Subject, key: Key, compute: Callable[[], T]) -> T:
    """Compute a value at its first use within an evaluation."""
    place = repr(key)
    if place not in subject.memo:
        subject.memo[place] = compute()
    return subject.memo[place]


def kept(folder: Path | None, kind: str, key: Key, compute: Callable[[], Tensors]) -> Tensors:
    """Tensors from a file named after everything they depend on, computed and written when there is none."""
    if folder is None:
        return compute()
    path = folder / f"{kind}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.safetensors"
    if path.is_file():
        try:
            return safetensors.torch.load_file(path)
        except SafetensorError:
            pass  # a damaged file is worth no more than a missing one
    tensors = {name: t.detach().cpu().contiguous() for name, t in compute().items()}
    _write(path, tensors)
    return tensors


def _write(path: Path, tensors: Tensors) -> None:
    """Write beside the target and rename, so that nobody ever reads half a file."""
    partial = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(safetensors.torch.save(tensors))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"cannot keep {path}: {error.strerror}; free space there or choose another cache folder") from None
