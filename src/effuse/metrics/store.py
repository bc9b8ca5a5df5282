"""Caches: tensors on disk between runs, and values in memory within an evaluation."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from effuse.core.files import held, write_atomically, writing
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


def cached(folder: Path | None, kind: str, key: Key, compute: Callable[[], Tensors]) -> Tensors:
    """Tensors from a file named after everything they depend on; computed and written at their first use.

    One process computes and the others wait: all processes of a table must use the same trained classifier, and training
    it twice may give different bits.
    """
    if folder is None:
        return compute()
    path = folder / f"{kind}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.safetensors"
    if (found := _read(path)) is not None:
        return found
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(path.with_suffix(".lock"), wait=True):
        if (found := _read(path)) is not None:
            return found
        tensors = {name: t.detach().cpu().contiguous() for name, t in compute().items()}
        write_atomically(path, safetensors.torch.save(tensors), wait=False)
        return tensors


def _read(path: Path) -> Tensors | None:
    with contextlib.suppress(FileNotFoundError, SafetensorError):  # a damaged file counts as missing
        return safetensors.torch.load_file(path)
    return None
