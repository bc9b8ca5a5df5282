"""Readers of data files: archives, idx files, images and tables."""

import contextlib
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import Reader
from PIL import Image

from effuse.data.folders import Folder
from effuse.data.idx import read_idx
from effuse.data.images import FORMATS, read_image
from effuse.data.npz import read_npz
from effuse.data.tables import label_rows, read_table


def written(path: Path, read: Callable[[], Any], mode: int = 0o644) -> Callable[[bytes, int], Any]:
    """Reads a file that holds the input."""

    def call(blob: bytes, base: int) -> Any:
        path.write_bytes(blob)
        path.chmod(mode)
        return read()

    return call


def archives(folder: Path) -> Reader:
    """npz archives, plain and compressed."""
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    arrays = {f"{split}_{kind}": a for split in ("train", "test") for kind, a in (("images", images), ("labels", labels))}
    valid = []
    for save in (np.savez, np.savez_compressed):
        save(file := io.BytesIO(), **arrays, train_groups=labels)
        valid.append(file.getvalue())
    path = folder / "a.npz"
    return Reader(valid, written(path, lambda: [read_npz(path, split, (), "ignore", ()) for split in ("train", "test")]))


def idx(folder: Path) -> Reader:
    """idx files, plain and gzipped."""
    blob = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (2, 3, 3)) + bytes(18)

    def read(made: bytes, base: int) -> None:
        path = folder / ("a.gz" if base else "a")
        path.write_bytes(made)
        read_idx(path, 3)

    return Reader([blob, gzip.compress(blob)], read)


def pictures(folder: Path) -> Reader:
    """Images in every format that is read."""
    valid = []
    for form in FORMATS:
        for mode in ("L", "RGB", "P"):
            with contextlib.suppress(OSError):  # a format without this mode
                Image.new(mode, (5, 4), 3).save(file := io.BytesIO(), form)
                valid.append(file.getvalue())
    path = folder / "a.png"
    return Reader(valid, written(path, lambda: read_image(path)))


def tables(folder: Path) -> Reader:
    """Tables of attributes as CSV and as CelebA's text, and a folder of images with such a table."""
    csv, celeba = b"file,Male,split\na.png,1,train\nb.png,-1,test\n", b"2\nMale Young\na.png 1 -1\nb.png -1 1\n"
    root = folder / "images"
    root.mkdir()
    for name in "ab":
        Image.new("L", (4, 4), 3).save(root / f"{name}.png")

    def read(blob: bytes, base: int) -> None:
        path = root / ("t.csv" if base == 0 else "t.txt")
        path.write_bytes(blob)
        label_rows(read_table(path), ("Male",))
        Folder(path=str(root), attributes=path.name, classes_from=("Male",), holdout=0.5).load("train")

    return Reader([csv, celeba], read)
