"""The idx files of MNIST and its relatives, plain or gzipped, under the data root."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import DataError, MissingError
from effuse.core.spec import spec
from effuse.data.files import label_tensor, pixel_tensor, require_room, standard
from effuse.data.transforms import Transform, prepared

UNSIGNED_BYTE = 0x08  # the third byte of the magic number; the fourth is the number of dimensions
STEMS = {"train": "train", "test": "t10k"}
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
HOW_TO_GET = {
    "mnist": "put its four idx files (train-images-idx3-ubyte.gz, ...) there, from "
    "https://yann.lecun.com/exdb/mnist or a mirror of it",
    "fashion_mnist": "put its four idx files (train-images-idx3-ubyte.gz, ...) there, from "
    "https://github.com/zalandoresearch/fashion-mnist or from Debian's package dataset-fashion-mnist",
}


@spec
class MNIST(Source):
    """Handwritten digits: 60,000 training and 10,000 test images, 28x28 grey, from EFFUSE_DATA/mnist."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        return _load("mnist", tuple("0123456789"), split, self.transforms)


@spec
class FashionMNIST(Source):
    """Articles of clothing, in MNIST's format and numbers, from EFFUSE_DATA/fashion_mnist."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        return _load("fashion_mnist", FASHION, split, self.transforms)


def _load(name: str, classes: tuple[str, ...], split: Split, transforms: tuple[Transform, ...]) -> Dataset:
    folder = standard(name, HOW_TO_GET[name])
    images, peak = pixel_tensor(*_read(folder, f"{STEMS[split]}-images-idx3-ubyte", 3, name))
    stored, place = _read(folder, f"{STEMS[split]}-labels-idx1-ubyte", 1, name)
    labels = label_tensor(stored, len(images), len(classes), place)
    return prepared(images, labels, classes, split=split, transforms=transforms, peak=peak)


def _read(folder: Path, stem: str, dimensions: int, name: str) -> tuple[np.ndarray, str]:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return read_idx(path, dimensions), str(path)
    raise MissingError(f"{folder / stem}: not found, plain or .gz; {HOW_TO_GET[name]}")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An array of unsigned bytes with this number of dimensions."""
    packed, stored = path.suffix == ".gz", path.stat().st_size
    try:
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = _shape(head, dimensions, path)
            size = len(head) + math.prod(shape)
            if packed:
                require_room(size, stored, str(path))
            body = file.read(size - len(head)) if packed or stored == size else b""
            found = f"over {size}" if packed and file.read(1) else len(head) + len(body) if packed else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch the file again") from None
    if found != size:
        raise DataError(f"{path}: {found} bytes, but its header {shape} means {size}; fetch the file again")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()  # torch needs a writable array


def _shape(head: bytes, dimensions: int, path: Path) -> tuple[int, ...]:
    """The shape that the first bytes of a file name."""
    expected = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if head[:4] != expected:
        found = head[:4].hex() or "nothing"
        raise DataError(f"{path}: begins with {found} instead of the magic number {expected.hex()}; fetch the file again")
    if len(head) < 4 + 4 * dimensions:
        raise DataError(f"{path}: {len(head)} bytes, but its header alone needs {4 + 4 * dimensions}; fetch the file again")
    return tuple(int(n) for n in np.frombuffer(head, ">u4", dimensions, offset=4))
