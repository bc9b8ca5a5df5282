"""Files that are either whole or not there."""

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from effuse.core.errors import RunError


def write_atomically(path: Path, blob: bytes, wait: bool = True) -> None:
    """Write a file so that a crash at any moment leaves either the old one or the new one; `wait` until a disk holds it."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(blob)
            file.flush()
            if wait:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if wait:
            sync_file(path.parent)  # makes the rename last
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
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
    """Libraries write within; what the operating system refuses them becomes a sentence of ours."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # safetensors hands the system's number on as text
        raise disk_error(path, OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from None


def disk_error(path: Path, error: OSError) -> RunError:
    """An operating system's refusal as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{path}: the disk is full; free some space, then `effuse resume` goes on from the last checkpoint")
    return RunError(f"{path}: {error.strerror or error}; check the folder and its permissions")


@contextlib.contextmanager
def held(lock: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a file that stands for something; whether nobody else does, unless we `wait` for that."""
    with writing(lock):
        file = open(lock, "a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            ours = True
        except BlockingIOError:
            ours = False
        yield ours


def cache_folder() -> Path:
    """Where reference features and encoders are kept between runs: EFFUSE_CACHE, or the user's own cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EFFUSE_CACHE") or Path(home) / "effuse")
