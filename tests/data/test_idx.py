"""idx files made by hand: read, and refused when damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from effuse.core.errors import DataError
from effuse.data.idx import MNIST, FashionMNIST
from effuse.data.transforms import Pad

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 0, 9, 1], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root whose training files are plain and whose test files are gzipped."""
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    made = tmp_path / "mnist"
    made.mkdir()
    (made / "train-images-idx3-ubyte").write_bytes(idx(PIXELS))
    (made / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    (made / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS[:2])))
    (made / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS[:2])))
    return made


def test_plain_and_gzipped_files_are_read(folder: Path):
    train, test = MNIST().load("train"), MNIST(transforms=(Pad(side=32),)).load("test")
    assert torch.equal(train.images[:, 0], torch.from_numpy(PIXELS)) and train.labels.tolist() == [3, 0, 9, 1]
    assert train.shape == (28, 1, 10) and test.shape == (32, 1, 10) and test.labels.tolist() == [3, 0]


def test_a_missing_set_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match="fashion_mnist: not found.*Debian's package dataset-fashion-mnist"):
        FashionMNIST().load("train")
    monkeypatch.delenv("EFFUSE_DATA")
    with pytest.raises(DataError, match="EFFUSE_DATA is not set.*dataset-fashion-mnist"):
        FashionMNIST().load("train")


def test_a_missing_file_is_named(folder: Path):
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: not found, plain or .gz"):
        MNIST().load("train")


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("train-images-idx3-ubyte", b"", "begins with nothing instead of the magic number 00000803"),
        ("train-images-idx3-ubyte", idx(LABELS), "begins with 00000801 instead of the magic number 00000803"),
        ("train-images-idx3-ubyte", idx(PIXELS)[:10], "10 bytes, but its header alone needs 16"),
        ("train-images-idx3-ubyte", idx(PIXELS)[:-1], r"3151 bytes, but its header \(4, 28, 28\) means 3152"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\xff" * 12, "means 79228162458924105385300197391"),
        ("train-labels-idx1-ubyte", idx(np.array([3, 0, 17, 1], np.uint8)), "row 2 has label 17; 10 classes"),
        ("train-labels-idx1-ubyte", idx(LABELS[:3]), "4 images but labels of shape"),
    ],
)
def test_damaged_files_are_refused(folder: Path, file: str, content: bytes, message: str):
    (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{file}: .*{message}"):
        MNIST().load("train")


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda raw: b"no gzip", lambda raw: raw[:20] + b"\xff" * 40 + raw[60:]]
)
def test_a_damaged_gzip_is_refused(folder: Path, damage):
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte.gz: .*fetch the file again"):
        MNIST().load("test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(PIXELS[:2]) + b"\0", "over 1584 bytes, but its header"),
        # 400,000 images of 28 x 28 are 300 MiB; the file has 20 bytes of header and claims them
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 400_000, 28, 28), "images to at most 200 times"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 1000, 1000), "GiB of memory; at most half of it is used"),
    ],
)
def test_a_gzip_is_not_unpacked_beyond_what_its_header_may_claim(folder: Path, content: bytes, message: str):
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        MNIST().load("test")
