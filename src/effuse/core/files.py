"""Atomic writes, file locks and the cache folder."""

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from effuse.core.errors import RunError, shown


def write_atomically(path: Path, blob: bytes, wait: bool = True, mode: int = 0o666) -> None:
    """Write a file so that a crash leaves either the old or the new one; with `wait`, return once it is on disk."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(blob)
            file.flush()
            if wait:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if wait:
            sync_file(path.parent)  # the rename must reach the disk too
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
        partial.unlink(missing_ok=True)


def clear_partial(folder: Path) -> None:
    """Delete what writes that were killed have left in a folder."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system, raised by a library that writes within, into a RunError."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # safetensors reports the system's error number as text
        raise disk_error(path, OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system while a file is read into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}; restore it from a backup, or check its permissions") from None


def parsed(blob: bytes, where: object) -> Any:
    """The JSON of a file, or of a line of one."""
    try:
        return json.loads(blob)
    except (ValueError, RecursionError) as error:  # nested too deeply, or digits without end
        raise RunError(f"{where} is damaged: {shown(str(error), 120)}; restore it from a backup") from None


def disk_error(path: Path, error: OSError) -> RunError:
    """An error of the operating system as a sentence with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{path}: the disk is full; free some space, then `effuse resume` goes on from the last checkpoint")
    return RunError(f"{path}: {error.strerror or error}; check the folder and its permissions")


@contextlib.contextmanager
def held(lock: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a file; yields whether the lock was acquired, which is certain with `wait`."""
    with contextlib.ExitStack() as stack:
        with writing(lock):
            file = stack.enter_context(open(lock, "a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            acquired = True
        except BlockingIOError:
            acquired = False
        yield acquired


def cache_folder() -> Path:
    """The folder of cached reference features and encoders: EFFUSE_CACHE, or effuse/ in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EFFUSE_CACHE") or Path(home) / "effuse")
