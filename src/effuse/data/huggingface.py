"""Image data sets of the Hugging Face hub or in its formats on disk, read with the optional `datasets` library."""

from typing import Any

import numpy as np
from torch import Tensor

from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import DataError, MissingError, nearest
from effuse.core.spec import spec
from effuse.data.files import label_tensor
from effuse.data.images import image_tensor, stack
from effuse.data.transforms import Transform, moves


@spec
class Hf(Source):
    """A data set by its hub name or local path, `hf:NAME` for short, read with the `datasets` library."""

    path: str
    config: str | None = None
    image: str | None = None  # the column of images; None: the only one of that type
    label: str | None = None  # the column of labels; None: the only one of class labels
    train: str = "train"  # if a set has no test split, slices such as "train[:80%]" work
    test: str = "test"
    revision: str | None = None  # a commit of the hub, for reproducible data
    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        rows = self._rows(self.train if split == "train" else self.test)
        place = f"hf:{self.path} {split}"
        image = self.image or _only_column(rows, "Image", "image", place)
        label = self.label or _only_column(rows, "ClassLabel", "label", place)
        for column in (image, label):
            if column not in rows.features:
                raise DataError(f"{place}: no column '{column}'; {nearest(column, rows.features)}")
        if not len(rows):
            raise DataError(f"{place}: has no images; name another split")
        classes = getattr(rows.features[label], "names", None)
        stored = list(rows[label])
        if classes is None:
            classes = self._distinct(label)
            number = {name: k for k, name in enumerate(classes)}
            stored = [number.get(str(value), -1) for value in stored]
        labels = label_tensor(np.array(stored), len(rows), len(classes), place)
        places = [f"{place}: row {i}" for i in range(len(rows))]

        def read(i: int) -> tuple[Tensor, int]:
            try:
                return image_tensor(rows[i][image], places[i])
            except DataError:
                raise
            except Exception as error:  # the library and its decoders raise many types
                raise DataError(f"{places[i]}: cannot be read as an image ({error}); remove the row") from None

        images, peak = stack(places, read, self.transforms)
        return Dataset(images=images, labels=labels, classes=tuple(classes), peak=peak, **moves(self.transforms, split))

    def _rows(self, split: str) -> Any:
        try:
            import datasets
        except ImportError:
            raise MissingError(f"hf:{self.path}: needs the datasets library; pip install effuse[hf]") from None
        try:
            return datasets.load_dataset(self.path, self.config, split=split, revision=self.revision)
        except Exception as error:  # the library raises many types; all mean that loading failed
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = "check name, config, split and network"
            raise MissingError(f"hf:{self.path}: split '{split}' cannot be loaded ({reason}); {remedy}") from None

    def _distinct(self, label: str) -> list[str]:
        """Class names from the training labels, if the column does not name them."""
        values = set(self._rows(self.train)[label])
        return [str(value) for value in sorted(values)]


def _only_column(rows: Any, kind: str, what: str, place: str) -> str:
    found = [name for name, feature in rows.features.items() if type(feature).__name__ == kind]
    if len(found) != 1:
        columns = ", ".join(rows.features)
        raise DataError(f"{place}: {len(found)} columns of type {kind} among {columns}; name one with {what}=")
    return str(found[0])
