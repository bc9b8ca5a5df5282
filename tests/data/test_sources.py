"""Sources without files, and the split of test images."""

import numpy as np
import pytest
import torch

from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.core.errors import DataError, RecipeError
from effuse.core.spec import text
from effuse.data.holdout import held_out
from effuse.data.npz import Npz
from effuse.data.sources import Digits, Labels, Some, Union, Validation
from effuse.data.transforms import Channels, Flip, Resize, Shift


def test_held_out_takes_each_fifth_of_every_class():
    """Class 0 has ten images: the 5th and 10th; class 1 has four: none."""
    labels = np.array([0] * 10 + [1] * 4)
    assert np.flatnonzero(held_out(labels, 0.2)).tolist() == [4, 9]


def test_held_out_takes_whole_groups():
    groups = np.array([3, 1, 1, 2, 3, 4])
    assert held_out(np.zeros(6), 0.5, groups).tolist() == [False, False, False, True, False, True]  # groups 2 and 4


def test_digits_split_is_fixed_stratified_and_full_range():
    train, test = Digits().load("train"), Digits().load("test")
    assert (len(train), len(test)) == (1442, 355) and train.shape == (8, 1, 10)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert (int(train.images.min()), int(train.images.max())) == (0, 255)
    assert max(abs(a / (a + b) - 0.8) for a, b in zip(train.histogram(), test.histogram())) < 0.01
    assert torch.equal(Digits().load("test").images, test.images)


def test_digits_transforms_reach_both_splits():
    source = Digits(transforms=(Resize(side=16), Channels(n=3), Flip()))
    assert source.load("train").shape == source.load("test").shape == (16, 3, 10)
    assert source.load("train").flip and not source.load("test").flip


def test_labels_has_shapes_and_no_pixels():
    source = build_text("labels(sizes=[6000]*10, side=32, channels=3)", Source, "data")
    train, test = source.load("train"), source.load("test")
    assert train.histogram() == [6000] * 10 and test.histogram() == [1000] * 10
    assert train.images.is_meta and train.shape == (32, 3, 10)
    assert train.labels[:6000].eq(0).all() and train.labels[6000] == 1  # sorted by class
    assert Labels(sizes=(5, 5), test=(1, 2)).load("test").histogram() == [1, 2]


@pytest.mark.parametrize(
    "source", ["labels(sizes=[])", "labels(sizes=[5], test=[1, 1])", "labels(sizes=[0])", "union(sources=[])"]
)
def test_sizes_that_make_no_data_are_refused(source: str):
    with pytest.raises(RecipeError):
        build_text(source, Source, "data")


def test_validation_sets_a_part_of_the_training_images_aside():
    """Of 1,442 training digits every tenth of each class, at most; none of the 355 test images. They are not mirrored."""
    source = build_text("validation(source=digits(transforms=[flip(), shift(pad=1)]))", Source, "data")
    assert source == Validation(source=Digits(transforms=(Flip(), Shift(pad=1))), share=0.1)
    train, test, whole = source.load("train"), source.load("test"), Digits().load("train")
    of_class = torch.tensor(whole.histogram())
    assert test.histogram() == (of_class // 10).tolist() and train.histogram() == (of_class - of_class // 10).tolist()
    aside = torch.from_numpy(held_out(whole.labels.numpy(), 0.1))
    assert torch.equal(test.images, whole.images[aside]) and torch.equal(train.images, whole.images[~aside])
    assert train.flip and not test.flip and (train.shift, test.shift) == (1, 0)
    assert train.classes == test.classes == whole.classes
    assert torch.equal(source.load("test").images, test.images), "the same images every time"


def test_validation_takes_whole_groups(tmp_path):
    """A patient's images are all for training or all for testing."""
    images, labels, groups = (
        np.arange(40, dtype=np.uint8).repeat(64).reshape(40, 8, 8),
        np.zeros(40, int),
        np.arange(40) // 4,
    )
    columns = {"train_images": images, "train_labels": labels, "test_images": images[:1] + 100, "test_labels": labels[:1]}
    np.savez(tmp_path / "a.npz", **columns, train_groups=groups)
    source = Validation(source=Npz(path=str(tmp_path / "a.npz")), share=0.5)
    train, test = source.load("train"), source.load("test")
    patients, others = set(train.groups.tolist()), set(test.groups.tolist())
    assert len(patients) == len(others) == 5 and not patients & others
    assert sorted(train.images[:, 0, 0, 0].tolist() + test.images[:, 0, 0, 0].tolist()) == list(range(40))


def test_union_numbers_its_domains(tmp_path):
    images, labels = np.zeros((20, 28, 28, 3), np.uint8), np.arange(20) % 10
    np.savez(
        tmp_path / "a.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        train_groups=np.arange(20) // 2,
    )
    union = Union(
        sources=(Digits(transforms=(Resize(side=28), Channels(n=3))), Npz(path=str(tmp_path / "a.npz"))),
        transforms=(Resize(side=16), Flip(), Shift(pad=2)),
    )
    joined = union.load("train")
    assert joined.shape == (16, 3, 10) and joined.domains.bincount().tolist() == [1442, 20]
    assert joined.flip and joined.shift == 2 and (union.load("test").flip, union.load("test").shift) == (False, 0)
    assert len(joined.groups.unique()) == 1442 + 10  # an image without a group is its own group
    assert build_text(text(union), Source, "data") == union


def test_a_union_of_different_sources_names_the_difference():
    with pytest.raises(DataError, match=r"images of \(1, 28, 28\).*add resize and channels"):
        Union(sources=(Digits(), Digits(transforms=(Resize(side=28),)))).load("train")
    with pytest.raises(DataError, match="name the same classes"):
        Union(sources=(Labels(sizes=(5, 5)), Labels(sizes=(5,)))).load("train")
    with pytest.raises(DataError, match="union's own transforms"):
        Union(sources=(Digits(transforms=(Flip(),)), Digits())).load("train")
    with pytest.raises(DataError, match=r"labels\(\) only"):
        Union(sources=(Digits(), Labels(sizes=(9,) * 10, side=8))).load("train")


def test_some_images_of_a_source():
    """A fixed random subset in the source's order; all test images; also of labels without images."""
    whole, some = Digits().load("train"), Some(source=Digits(), n=100)
    chosen = some.load("train")
    assert len(chosen) == 100 and len(some.load("test")) == 355 and chosen.classes == whole.classes
    assert torch.equal(some.load("train").images, chosen.images)
    assert not torch.equal(Some(source=Digits(), n=100, seed=1).load("train").images, chosen.images)
    assert len(set(chosen.labels.tolist())) == 10, "not the first hundred of a sorted set"
    assert build_text("some(digits(), 100)", Source, "data") == some
    hollow = Some(source=Labels(sizes=(30, 30)), n=10).load("train")
    assert len(hollow) == 10 and hollow.images.is_meta
    with pytest.raises(DataError, match=r"some: n=2000, but digits\(\) has 1442 training images; lower n"):
        Some(source=Digits(), n=2000).load("train")
