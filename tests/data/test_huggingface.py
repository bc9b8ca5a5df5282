"""The hub source with a fake of the `datasets` library that has the functions it calls."""

import sys
import types
from typing import Any

import pytest
from PIL import Image as Pillow

from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.core.errors import DataError
from effuse.data.huggingface import Hf
from effuse.data.transforms import Resize


class Image:
    """The feature type of the library, known by its name."""


class ClassLabel:
    names = ["cat", "dog"]


class Value:
    """A plain feature."""


class Rows:
    """A table of the library: rows by number, columns by name."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features = columns, features

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        row = {name: column[key] for name, column in self.columns.items()}
        for value in row.values():
            if isinstance(value, Exception):
                raise value
        return row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rows]:
    splits: dict[str, Rows] = {}
    asked: list[tuple] = []

    def load_dataset(path: str, config: str | None, *, split: str, revision: str | None) -> Rows:
        asked.append((path, config, split, revision))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}".\nmore lines')
        return splits[split]

    module = types.ModuleType("datasets")
    module.load_dataset, module.asked = load_dataset, asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return splits


def pictures(n: int) -> list[Any]:
    return [Pillow.new("L", (4 + i, 4), i) for i in range(n)]


def test_class_labels_are_read(hub):
    hub["train"] = Rows({"img": pictures(3), "kind": [1, 0, 1]}, {"img": Image(), "kind": ClassLabel()})
    source = build_text("hf:owner/pets", Source, "data")
    assert source == Hf(path="owner/pets")
    train = Hf(path="owner/pets", config="small", revision="abc", transforms=(Resize(side=4),)).load("train")
    assert train.labels.tolist() == [1, 0, 1] and train.classes == ("cat", "dog")
    assert train.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert sys.modules["datasets"].asked == [("owner/pets", "small", "train", "abc")]


def test_plain_labels_are_numbered_by_the_training_split(hub):
    features = {"image": Image(), "word": Value()}
    hub["train"] = Rows({"image": pictures(1) * 3, "word": ["b", "a", "b"]}, features)
    hub["test"] = Rows({"image": pictures(1) * 2, "word": ["b", "c"]}, features)
    source = Hf(path="words", label="word")
    assert source.load("train").labels.tolist() == [1, 0, 1] and source.load("train").classes == ("a", "b")
    with pytest.raises(DataError, match="hf:words test: row 1 has label -1"):
        source.load("test")


def test_ambiguous_columns_must_be_named(hub):
    hub["train"] = Rows({"a": pictures(1), "b": pictures(1), "y": [0]}, {"a": Image(), "b": Image(), "y": ClassLabel()})
    with pytest.raises(DataError, match="2 columns of type Image among a, b, y; name one with image="):
        Hf(path="two").load("train")
    assert len(Hf(path="two", image="b").load("train")) == 1
    with pytest.raises(DataError, match="no column 'c'"):
        Hf(path="two", image="c").load("train")


def test_a_row_that_cannot_be_decoded_is_named(hub):
    hub["train"] = Rows({"x": [*pictures(1), OSError("truncated")], "y": [0, 1]}, {"x": Image(), "y": ClassLabel()})
    with pytest.raises(DataError, match=r"row 1: cannot be read as an image \(truncated\)"):
        Hf(path="broken").load("train")


def test_a_set_that_cannot_be_loaded_ends_in_one_line(hub):
    with pytest.raises(DataError, match=r"^hf:none: split 'test' cannot be loaded \(Unknown split .*\); check name[^\n]*$"):
        Hf(path="none").load("test")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install effuse\[hf\]"):
        Hf(path="any").load("train")
