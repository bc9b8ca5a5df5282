"""Find data files, check their arrays, and report what is missing or wrong."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from effuse.core.errors import DataError, MissingError, misspelt

SMALL = 256 << 20  # bytes; compressed files that unpack to less are read whatever their ratio
RATIO = 200  # by which images may at most have been compressed
ROOT = "EFFUSE_DATA"  # the environment variable that names the data root


def data_root() -> Path | None:
    """The folder that EFFUSE_DATA names, if it is set."""
    value = os.environ.get(ROOT)
    return Path(value).expanduser() if value else None


def standard(name: str, remedy: str) -> Path:
    """A well-known file or folder under the data root; `remedy` says how to get it."""
    root = data_root()
    if root is None:
        raise MissingError(f"{name}: {ROOT} is not set; set it to a folder with {name} in it: {remedy}")
    path = root / name
    if not path.exists():
        raise MissingError(f"{path}: not found; {remedy}")
    return path


def locate(path: str) -> Path:
    """A path given by the user: absolute, relative to the working folder, or relative to the data root."""
    given = Path(path).expanduser()
    root = data_root()
    candidates = [given] if given.is_absolute() or root is None else [given, root / given]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    searched, hint = "", ""
    if not given.is_absolute():
        searched = f" in {Path.cwd()}" + ("" if root is None else f" nor in {root} ({ROOT})")
        hint = f", or set {ROOT} to the folder that contains it" if root is None else ""
    raise MissingError(f"{path}: not found{searched}; {misspelt(*candidates) or f'check the path{hint}'}")


def require_room(size: int, stored: int, place: str) -> None:
    """Refuse to read `size` bytes from a file of `stored` ones, by what its header says, before any memory is taken."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory // 2:
        what = f"{size / 2**30:,.1f} GiB when unpacked, and this machine has {memory / 2**30:,.1f} GiB of memory"
        remedy = "at most half of it is used: store fewer or smaller images, or fetch the file again if it should hold less"
        raise DataError(f"{place}: {what}; {remedy}")
    if size > SMALL and size > RATIO * stored:
        what = f"unpacks to {size / stored:,.0f} times its size, and images to at most {RATIO} times"
        raise DataError(f"{place}: {what}; store it uncompressed if these are your images")


def pixel_tensor(images: np.ndarray, place: str) -> tuple[Tensor, int]:
    """8- or 16-bit pixels, N x H x W or N x H x W x C, as an N x C x H x W tensor and the integer that means white."""
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise DataError(f"{place}: images of shape {images.shape}; expected N x H x W or N x H x W x C without zeros")
    if images.dtype not in (np.uint8, np.uint16):
        raise DataError(f"{place}: pixels are {images.dtype}; store them as uint8 or uint16")
    peak = int(np.iinfo(images.dtype).max)
    if images.dtype == np.uint16:
        images = images.astype(np.int32)  # torch has few operations on uint16
    stacked = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(stacked)), peak


def label_tensor(labels: np.ndarray, images: int, classes: int, place: str) -> Tensor:
    """Labels as a tensor; an error names the first row with a wrong label."""
    if labels.shape != (images,):
        raise DataError(f"{place}: {images} images but labels of shape {labels.shape}; each image needs one label")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{place}: labels are {labels.dtype}; store them as integers from 0")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        row = wrong[0]
        raise DataError(f"{place}: row {row} has label {labels[row]}; {classes} classes are numbered 0 to {classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))
