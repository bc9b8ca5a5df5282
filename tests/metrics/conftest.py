"""A subject made by hand: scikit-learn's digits, every fifth held out, and samples that a test chooses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from effuse.core.data import Dataset
from effuse.core.metric import Images, Subject

NAMES = tuple(str(i) for i in range(10))


@pytest.fixture(scope="session")
def digits() -> tuple[Dataset, Dataset]:
    raw = load_digits()
    images = torch.from_numpy((raw.images * (255 / 16)).round()).to(torch.uint8)[:, None]
    labels = torch.from_numpy(raw.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return Dataset(images[~held_out], labels[~held_out], NAMES), Dataset(images[held_out], labels[held_out], NAMES)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trained classifier is enough for the whole session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def subject_of(digits: tuple[Dataset, Dataset], shared_cache: Path) -> Callable[..., Subject]:
    def make(pixels: Tensor | None = None, labels: Tensor | None = None, **changes: object) -> Subject:
        train, test = digits
        if pixels is None:
            pixels, labels = test.floats(test.images), test.labels
        images = Images(pixels, labels)
        given = {"train": train, "test": test, "data": "digits()", "device": torch.device("cpu"), "cache": shared_cache}
        return Subject(samples=images.first, **given | changes)  # type: ignore[arg-type]

    return make
