"""Image folders with one subfolder per class or with a table of attributes; groups and a test split are optional."""

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from effuse.core.data import Dataset, Source, Split
from effuse.core.errors import DataError, MissingError
from effuse.core.spec import spec
from effuse.data.files import locate, standard
from effuse.data.holdout import held_out
from effuse.data.images import SUFFIXES, read_image, stack
from effuse.data.tables import AttributeTable, label_rows, read_table
from effuse.data.transforms import Transform, moves

SPLIT_COLUMN = "split"
SPLIT_WORDS = {"train": "train", "0": "train", "test": "test", "2": "test", "val": "val", "valid": "val", "1": "val"}
CELEBA_CLASSES = ("Male", "Young", "Black_Hair|Brown_Hair|Blond_Hair|Gray_Hair")


@dataclasses.dataclass(frozen=True)
class Listing:
    """The image files of a folder, not yet read."""

    root: Path
    files: list[str]  # relative to root
    labels: np.ndarray
    classes: tuple[str, ...]
    splits: list[str] | None = None  # train, test or val for each file; None: split by holdout
    groups: np.ndarray | None = None


@spec
class Folder(Source):
    """An image folder with one subfolder per class (optionally below train/ and test/), or with a table of attributes."""

    path: str
    attributes: str | None = None  # a CSV in the folder (file name, then columns), or CelebA's list_attr_celeba.txt
    classes_from: tuple[str, ...] = ()  # columns whose combinations are the classes; "A|B": the first true one
    groups: str | None = None  # a CSV (or .txt without heading) of file name and group, or a column of the attributes
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the test share, if no folder, column or file defines the split
    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        root = locate(self.path)
        if not root.is_dir():
            raise DataError(f"{root}: not a folder; give the folder that holds the images")
        if self.attributes is None:
            listing = list_subfolders(root)
        else:
            listing = list_table(root, read_table(_beside(root, self.attributes)), self.classes_from, self.groups)
        if self.groups is not None and listing.groups is None:
            listing = _with_groups(listing, read_table(_beside(root, self.groups), headings=("group",)))
        return load_listing(listing, split, self.holdout, self.transforms)


@spec
class CelebA(Source, name="celeba"):
    """CelebA's 16 classes, Male x Young x hair colour, from EFFUSE_DATA/celeba; images without hair colour are left out."""

    classes_from: tuple[str, ...] = CELEBA_CLASSES  # ["Male", "Young"] makes four classes of all images
    transforms: tuple[Transform, ...] = ()

    def load(self, split: Split) -> Dataset:
        folder = standard(
            "celeba",
            "put img_align_celeba/, list_attr_celeba.txt and list_eval_partition.txt there, from "
            "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        )
        table = read_table(_beside(folder, "list_attr_celeba.txt"))
        listing = list_table(folder / "img_align_celeba", table, self.classes_from, None)
        return load_listing(listing, split, 0.2, self.transforms)


def load_listing(listing: Listing, split: Split, holdout: float, transforms: tuple[Transform, ...]) -> Dataset:
    """Open the images of one split."""
    if listing.splits is None:
        chosen = held_out(listing.labels, holdout, listing.groups) == (split == "test")
        remedy = f"raise holdout={holdout} or add images"
    else:
        chosen = np.array(listing.splits) == split
        remedy = "add images to it"
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise DataError(f"{listing.root}: no images in the {split} split; {remedy}")
    paths = [listing.root / listing.files[i] for i in rows]
    images, peak = stack([str(path) for path in paths], lambda i: read_image(paths[i]), transforms)
    return Dataset(
        images=images,
        labels=torch.from_numpy(listing.labels[rows]),
        classes=listing.classes,
        peak=peak,
        groups=None if listing.groups is None else torch.from_numpy(listing.groups[rows]),
        **moves(transforms, split),
    )


def list_subfolders(root: Path) -> Listing:
    """Images whose class is the subfolder they are in."""
    train, test = root / "train", root / "test"
    top = train if train.is_dir() else root
    parts = {"train": top, "test": test} if train.is_dir() and test.is_dir() else {"train": top}
    classes = _subfolder_names(top)
    if not classes:
        raise DataError(f"{top}: no subfolders; put the images of each class in one, or name a table with attributes=")
    files: list[str] = []
    labels: list[int] = []
    splits: list[str] = []
    for part, folder in parts.items():
        unknown = [name for name in _subfolder_names(folder) if name not in classes]
        if unknown:
            raise DataError(f"{folder / unknown[0]}: a class that {top} does not have; its classes: {', '.join(classes)}")
        for label, name in enumerate(classes):
            found = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not found and part == "train":
                raise DataError(f"{folder / name}: no images ({', '.join(SUFFIXES)}); add some or remove the folder")
            files += [p.relative_to(root).as_posix() for p in found]
            labels += [label] * len(found)
            splits += [part] * len(found)
    return Listing(root, files, np.array(labels, np.int64), classes, splits if "test" in parts else None)


def _subfolder_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")))


def list_table(root: Path, table: AttributeTable, classes_from: tuple[str, ...], groups: str | None) -> Listing:
    """Images listed in a table, with classes from its columns."""
    splits = _read_splits(table)
    described = [c for c in table.columns if c not in (SPLIT_COLUMN, groups)]
    columns = classes_from or (("label",) if "label" in described else tuple(described))
    if not classes_from and len(columns) != 1:
        found = ", ".join(described) or "none"
        raise DataError(f"{table.path}: the columns are {found}; name those that make the class with classes_from=")
    labels, classes = label_rows(table, columns)
    if not labels:
        raise DataError(f"{table.path}: no image has a class of {', '.join(columns)}; choose other columns for classes_from")
    listing = Listing(root, list(labels), np.array(list(labels.values()), np.int64), classes)
    if splits is not None:
        listing = dataclasses.replace(listing, splits=[_split_of(splits, file, table) for file in listing.files])
    if groups is not None and groups in table.columns:
        column = {file: [group] for file, group in zip(table.rows, table.values(groups))}
        listing = _with_groups(listing, AttributeTable(table.path, (groups,), column))
    return listing


def _read_splits(table: AttributeTable) -> dict[str, str] | None:
    """The split of each file, from a column or from CelebA's list_eval_partition file."""
    if SPLIT_COLUMN in table.columns:
        return dict(zip(table.rows, table.values(SPLIT_COLUMN)))
    if table.path.name.startswith("list_attr_"):
        for path in (table.path.with_name("list_eval_partition.txt"), table.path.with_name("list_eval_partition.csv")):
            if path.is_file():
                return {file: row[0] for file, row in read_table(path, headings=(SPLIT_COLUMN,)).rows.items()}
    return None


def _split_of(splits: dict[str, str], file: str, table: AttributeTable) -> str:
    word = splits.get(file, "")
    if word.lower() not in SPLIT_WORDS:
        raise DataError(f"{table.path}: {file} is in split '{word}'; use train, val or test")
    return SPLIT_WORDS[word.lower()]


def _with_groups(listing: Listing, table: AttributeTable) -> Listing:
    if not table.columns:
        raise DataError(f"{table.path}: no group column; expected file name and group")
    for file in listing.files:
        if file not in table.rows:
            raise DataError(f"{table.path}: no line for {file}; give every image a group")
    names = [table.rows[file][0] for file in listing.files]
    return dataclasses.replace(listing, groups=np.unique(names, return_inverse=True)[1].reshape(-1))


def _beside(root: Path, name: str) -> Path:
    path = root / Path(name).expanduser()  # an absolute path replaces root
    if not path.is_file():
        raise MissingError(f"{path}: not found; give a table's path from {root} or, for groups, a column of the attributes")
    return path
