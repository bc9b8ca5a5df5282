"""npz archives with MedMNIST's keys: train_images, train_labels, and the same with test_ and val_."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch

from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import DataError
from effuse.core.spec import spec
from effuse.data.files import label_tensor, locate, pixel_tensor, require_room, standard
from effuse.data.transforms import Transform, prepared

# RuntimeError: encrypted, or compressed in a way that zipfile does not know
UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PATHMNIST_CLASSES = (
    "adipose",
    "background",
    "debris",
    "lymphocytes",
    "mucus",
    "smooth muscle",
    "normal colon mucosa",
    "cancer-associated stroma",
    "colorectal adenocarcinoma epithelium",
)


@spec
class Npz(Source):
    """An npz archive: images N x H x W or N x H x W x C of uint8 or uint16, labels N or N x 1, optionally SPLIT_groups."""

    path: str
    classes: tuple[str, ...] = ()  # names; by default numbers up to the largest training label
    val: Literal["ignore", "train", "test"] = "ignore"  # the split to which validation images are added
    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        return read_npz(locate(self.path), split, self.classes, self.val, self.transforms)


@spec
class CIFAR10(Source):
    """Photographs in ten classes: 50,000 training and 10,000 test images, 32x32 RGB, from EFFUSE_DATA/cifar10.npz."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        return _cifar("cifar10.npz", "train_labels", split, CIFAR10_CLASSES, self.transforms)


@spec
class CIFAR100(Source):
    """Photographs in 100 classes: 50,000 training and 10,000 test images, 32x32 RGB, from EFFUSE_DATA/cifar100.npz."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        classes = tuple(map(str, range(100)))
        return _cifar("cifar100.npz", "train_labels (the fine ones)", split, classes, self.transforms)


def _cifar(file: str, labels: str, split: Split, classes: tuple[str, ...], transforms: tuple[Transform, ...]) -> Dataset:
    path = standard(
        file,
        "convert https://www.cs.toronto.edu/~kriz/cifar.html with numpy.savez to the arrays train_images "
        f"(50000x32x32x3 uint8), {labels}, test_images and test_labels",
    )
    return read_npz(path, split, classes, "ignore", transforms)


@spec
class PathMNIST(Source, name="pathmnist"):
    """MedMNIST's colon pathology: nine tissues, 28x28 RGB, from EFFUSE_DATA/pathmnist.npz."""

    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        path = standard("pathmnist.npz", "download pathmnist.npz from https://medmnist.com")
        return read_npz(path, split, PATHMNIST_CLASSES, "ignore", self.transforms)


def read_npz(path: Path, split: Split, names: tuple[str, ...], val: str, transforms: tuple[Transform, ...]) -> Dataset:
    """One split of an archive; pickled arrays are refused."""
    try:
        archive = np.load(path, allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as an npz archive ({error}); fetch or write the file again") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: holds a single array; expected an npz archive of train_images, train_labels, ...")
    with archive:
        classes = names or _count_classes(_array(archive, "train_labels", path), path)
        parts: list[str] = [split, "val"] if val == split else [split]
        images, peak = pixel_tensor(_joined(archive, parts, "images", path), f"{path}: {split}_images")
        labels = _joined(archive, parts, "labels", path)
        groups = None
        if f"{split}_groups" in archive:
            stored = _joined(archive, parts, "groups", path)
            groups = torch.from_numpy(np.unique(stored, return_inverse=True)[1].reshape(-1))
    if groups is not None and len(groups) != len(images):
        raise DataError(f"{path}: {split}_groups has {len(groups)} entries for {len(images)} images; give one group to each")
    if labels.shape == (len(images), 1):  # MedMNIST's shape
        labels = labels[:, 0]
    checked = label_tensor(labels, len(images), len(classes), f"{path}: {split}_labels")
    return prepared(images, checked, classes, split=split, transforms=transforms, peak=peak, groups=groups)


def _array(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> np.ndarray:
    assert archive.zip is not None
    if f"{key}.npy" not in archive.zip.namelist():
        found = ", ".join(archive.files) or "nothing"
        raise DataError(f"{path}: no array '{key}', only {found}; name the arrays as MedMNIST does")
    stored = archive.zip.getinfo(f"{key}.npy")
    require_room(stored.file_size, stored.compress_size, f"{path}: array '{key}'")
    try:
        with archive.zip.open(stored) as file:
            _require_filled(file, stored.file_size)
        return archive[key]
    except UNREADABLE as error:
        raise DataError(f"{path}: array '{key}' cannot be read ({error}); fetch or write the file again") from None


def _require_filled(file: IO[bytes], size: int) -> None:
    """Refuse an array whose header promises more or less than the file's bytes; numpy takes memory by the header alone."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"numpy's format {version[0]}.{version[1]} is for arrays with named columns")
    shape, _, dtype = HEADERS[version](file)
    if not dtype.hasobject and file.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array {shape} of {dtype} does not fill its {size} bytes")


def _joined(archive: np.lib.npyio.NpzFile, parts: list[str], kind: str, path: Path) -> np.ndarray:
    arrays = [_array(archive, f"{part}_{kind}", path) for part in parts]
    first = arrays[0]
    for part, array in zip(parts, arrays):
        if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            raise DataError(
                f"{path}: {part}_{kind} has rows of {array.shape[1:]} {array.dtype}, {parts[0]}_{kind} of "
                f"{first.shape[1:]} {first.dtype}; store both in one form or set val='ignore'"
            )
    return np.concatenate(arrays) if len(arrays) > 1 else first


def _count_classes(labels: np.ndarray, path: Path) -> tuple[str, ...]:
    if not np.issubdtype(labels.dtype, np.integer) or not labels.size:
        raise DataError(f"{path}: train_labels are {labels.size} values of {labels.dtype}; store them as integers from 0")
    count = int(labels.max()) + 1
    if count > labels.size:  # surely a mistake, and it would make huge networks
        row = int(labels.reshape(-1).argmax())
        value = f"label {count - 1} in a set of {labels.size} images"
        raise DataError(f"{path}: train_labels: row {row} has {value}; number the classes from 0")
    return tuple(str(c) for c in range(count))
