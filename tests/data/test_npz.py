"""npz archives made by hand: read, and refused when damaged."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from effuse.core.errors import DataError
from effuse.data.npz import CIFAR10, CIFAR100, Npz, PathMNIST
from effuse.data.transforms import Crop, Resize

GREY = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
GOOD = {
    "train_images": GREY,
    "train_labels": np.array([[0], [1], [2], [0], [1], [2]], np.uint8),
    "val_images": GREY[:1],
    "val_labels": np.array([[2]], np.uint8),
    "test_images": GREY[:2],
    "test_labels": np.array([[1], [0]], np.uint8),
}


def write(path: Path, **changes) -> Npz:
    arrays = {key: value for key, value in (GOOD | changes).items() if value is not None}
    np.savez(path / "set.npz", **arrays)
    return Npz(path=str(path / "set.npz"))


def test_medmnist_keys_are_read(tmp_path: Path):
    source = write(tmp_path)
    train, test = source.load("train"), source.load("test")
    assert torch.equal(train.images[:, 0], torch.from_numpy(GREY)) and train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert train.classes == test.classes == ("0", "1", "2") and len(test) == 2


@pytest.mark.parametrize("val, sizes", [("ignore", (6, 2)), ("train", (7, 2)), ("test", (6, 3))])
def test_validation_images_join_the_split_that_is_asked_for(tmp_path: Path, val, sizes):
    write(tmp_path)
    source = Npz(path=str(tmp_path / "set.npz"), val=val)
    assert (len(source.load("train")), len(source.load("test"))) == sizes


def test_colour_becomes_channels_first(tmp_path: Path):
    colour = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    images = write(tmp_path, train_images=colour).load("train").images
    assert images.shape == (6, 3, 4, 4) and images.is_contiguous() and images[5, 2, 1, 3] == colour[5, 1, 3, 2]


def test_sixteen_bits_keep_their_range(tmp_path: Path):
    wide = np.array([0, 65535], np.uint16).repeat(48).reshape(6, 4, 4)
    write(tmp_path, train_images=wide)
    train = Npz(path=str(tmp_path / "set.npz"), transforms=(Resize(side=2),)).load("train")
    assert train.images.dtype == torch.int32 and train.peak == 65535 and train.images.max() == 65535
    assert train.floats(train.images).min() == -1 and train.floats(train.images).max() == 1


def test_groups_are_numbered(tmp_path: Path):
    train = write(tmp_path, train_groups=np.array(["p9", "p9", "p1", "p1", "p5", "p9"])).load("train")
    assert train.groups.tolist() == [2, 2, 0, 0, 1, 2]


def test_a_path_is_also_looked_for_under_the_data_root(tmp_path: Path, monkeypatch):
    write(tmp_path)
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    assert len(Npz(path="set.npz").load("train")) == 6
    with pytest.raises(DataError, match=rf"other.npz: not found in {tmp_path.parent} nor in {tmp_path} \(EFFUSE_DATA\)"):
        Npz(path="other.npz").load("train")


def test_standard_sets_have_names_and_say_how_to_get_them(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    with pytest.raises(DataError, match="cifar10.npz: not found; convert https"):
        CIFAR10().load("train")
    with pytest.raises(DataError, match="cifar100.npz: not found; convert https"):
        CIFAR100().load("train")
    with pytest.raises(DataError, match="medmnist.com"):
        PathMNIST().load("train")
    write(tmp_path)
    (tmp_path / "set.npz").rename(tmp_path / "cifar10.npz")
    assert CIFAR10().load("test").classes[1] == "automobile"
    (tmp_path / "cifar10.npz").rename(tmp_path / "cifar100.npz")
    assert len(CIFAR100().load("train")) == 6 and len(CIFAR100().load("test").classes) == 100


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_labels": None}, "no array 'train_labels', only train_images"),
        ({"train_images": GREY.astype(np.float32)}, "pixels are float32; store them as uint8 or uint16"),
        ({"train_images": GREY.reshape(6, 16)}, r"images of shape \(6, 16\)"),
        ({"train_labels": np.zeros((6, 14), np.uint8)}, "each image needs one label"),
        ({"train_labels": np.zeros(5, np.uint8)}, "6 images but labels of shape"),
        ({"train_labels": np.zeros(6, np.float32)}, "store them as integers from 0"),
        ({"train_labels": np.array([0, 1, 2, 0, -1, 2])}, "row 4 has label -1; 3 classes are numbered 0 to 2"),
        ({"train_labels": np.array([0, 1, 2, 0, 900, 2])}, "row 4 has label 900 in a set of 6 images"),
        ({"train_images": np.array([None] * 6)}, "'train_images' cannot be read .*allow_pickle"),
        ({"train_groups": np.zeros(2)}, "train_groups has 2 entries for 6 images"),
        ({"train_images": np.zeros((6, 4, 5), np.uint8)}, "4x5 are not square; add crop or resize"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(DataError, match=message):
        write(tmp_path, **changes).load("train")


def test_oblong_images_pass_when_cropped(tmp_path: Path):
    write(tmp_path, train_images=np.zeros((6, 4, 5), np.uint8))
    assert Npz(path=str(tmp_path / "set.npz"), transforms=(Crop(),)).load("train").shape.side == 4


def test_a_test_label_that_training_never_saw_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="test_labels: row 1 has label 3"):
        write(tmp_path, test_labels=np.array([0, 3])).load("test")


def test_validation_of_another_shape_is_refused(tmp_path: Path):
    write(tmp_path, val_images=np.zeros((1, 5, 5), np.uint8))
    with pytest.raises(DataError, match="store both in one form or set val='ignore'"):
        Npz(path=str(tmp_path / "set.npz"), val="train").load("train")


def test_files_other_than_archives_are_refused(tmp_path: Path):
    source = write(tmp_path)
    path = Path(source.path)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="set.npz: .*cannot be read.*again"):
            source.load("train")
    with path.open("wb") as file:
        np.save(file, GREY)
    with pytest.raises(DataError, match="holds a single array"):
        source.load("train")


def replaced(path: Path, content: bytes, name: str = "train_images.npy") -> Npz:
    """An archive in which one member has other content."""
    source = write(path)
    with zipfile.ZipFile(source.path) as old:
        members = {member: old.read(member) for member in old.namelist()}
    del members["train_images.npy"]
    with zipfile.ZipFile(source.path, "w", zipfile.ZIP_DEFLATED) as new:
        for member, blob in (members | {name: content}).items():
            new.writestr(member, blob)
    return source


def header(shape: tuple[int, ...], form: str = "|u1") -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array_header_2_0(made, {"descr": form, "fortran_order": False, "shape": shape})
    return made.getvalue()


def test_an_array_is_believed_only_as_far_as_its_file_goes(tmp_path: Path):
    """numpy takes memory by the header alone: 10^15 images in a file of some bytes."""
    assert torch.equal(
        replaced(tmp_path, header((6, 4, 4)) + GREY.tobytes()).load("train").images[:, 0], torch.from_numpy(GREY)
    )
    with pytest.raises(DataError, match=r"an array \(1000000000000000, 4, 4\) of uint8 does not fill its \d+ bytes"):
        replaced(tmp_path, header((10**15, 4, 4)) + GREY.tobytes()).load("train")
    with pytest.raises(DataError, match="cannot be read"):
        replaced(tmp_path, b"no array at all").load("train")
    with pytest.raises(DataError, match="no array 'train_images'"):
        replaced(tmp_path, b"no array at all", name="train_images").load("train")


def test_an_archive_that_unpacks_to_far_more_than_images_do_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("effuse.data.files.SMALL", 1000)
    shape = (1000, 28, 28)
    with pytest.raises(DataError, match="array 'train_images': unpacks to [89][0-9][0-9] times its size"):
        replaced(tmp_path, header(shape) + bytes(1000 * 28 * 28)).load("train")


def test_an_encrypted_archive_is_refused(tmp_path: Path):
    source = write(tmp_path)
    blob = bytearray(Path(source.path).read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags of every member, in both places
        place = -1
        while (place := blob.find(mark, place + 1)) >= 0:
            blob[place + at] |= 1
    Path(source.path).write_bytes(blob)
    with pytest.raises(DataError, match="array 'train_labels' cannot be read .*encrypted"):
        source.load("train")
