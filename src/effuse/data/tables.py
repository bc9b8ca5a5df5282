"""Read tables of attributes and groups of an image folder, as CSV or in CelebA's text format."""

import csv
import dataclasses
import itertools
import math
from pathlib import Path

from effuse.core.errors import DataError, nearest

MOST_CLASSES = 10_000
TRUE = ("1", "true", "yes")  # everything else, such as CelebA's -1, is false
ALTERNATIVES = "|"  # "Black_Hair|Brown_Hair": the first that is true


@dataclasses.dataclass(frozen=True)
class AttributeTable:
    """Columns of text by image file."""

    path: Path
    columns: tuple[str, ...]
    rows: dict[str, list[str]]  # file name -> one value per column

    def values(self, column: str) -> list[str]:
        """A column, in the order of the file."""
        i = self.index(column)
        return [row[i] for row in self.rows.values()]

    def index(self, column: str) -> int:
        if column not in self.columns:
            raise DataError(f"{self.path}: no column '{column}'; {nearest(column, self.columns)}")
        return self.columns.index(column)


def read_table(path: Path, headings: tuple[str, ...] | None = None) -> AttributeTable:
    """A table whose first column names image files; `headings` names the columns of a .txt file without headings."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write it as UTF-8 text") from None
    if path.suffix == ".txt":
        cells, start = _read_celeba(lines, headings, path)
    else:
        try:
            cells, start = list(csv.reader(lines)), 1
        except csv.Error as error:
            raise DataError(f"{path}: not a CSV ({error}); write commas between the values") from None
    if not cells:
        raise DataError(f"{path}: empty; expected a heading, then one line per image")
    if len(cells[0]) == 1 and cells[0][0].count(";"):
        raise DataError(f"{path}: its values are separated by semicolons; export it with commas between them")
    columns = tuple(name.strip() for name in cells[0][1:])
    rows: dict[str, list[str]] = {}
    for number, row in enumerate(cells[1:], start=start + 1):
        if not row:
            continue
        if len(row) != len(columns) + 1:
            raise DataError(f"{path}: line {number} has {len(row)} values; the heading has {len(columns) + 1} columns")
        file, *values = (value.strip() for value in row)
        if file in rows:
            raise DataError(f"{path}: line {number} names {file} again; keep one line per image")
        rows[file] = values
    return AttributeTable(path, columns, rows)


def _read_celeba(lines: list[str], headings: tuple[str, ...] | None, path: Path) -> tuple[list[list[str]], int]:
    """CelebA's text: the number of images, attribute names, and one line per image; with `headings`, only the latter."""
    rows = [line.split() for line in lines]
    if headings is not None:
        return [["file", *headings], *rows], 0
    if len(rows) < 2 or len(rows[0]) != 1 or not (rows[0][0].isascii() and rows[0][0].isdigit()):
        raise DataError(
            f"{path}: the first two lines must be the number of images and the attribute names; use a .csv for other tables"
        )
    found = sum(1 for row in rows[2:] if row)
    if str(found) != (rows[0][0].lstrip("0") or "0"):  # as text: Python reads no number of 5,000 digits
        raise DataError(f"{path}: its first line says {rows[0][0]} images, but it has {found}; fetch the file again")
    return [["file", *rows[1]], *rows[2:]], 2


def label_rows(table: AttributeTable, columns: tuple[str, ...]) -> tuple[dict[str, int], tuple[str, ...]]:
    """A label for each file from the combination of columns, and the names of all combinations.

    The first column varies slowest. A column `A|B|C` means the first of these attributes that is true. Files without any of
    them get no label.
    """
    choices = [_choices(table, column) for column in columns]
    sizes = [len(names) for _, names in choices]
    if math.prod(sizes) > MOST_CLASSES:
        raise DataError(
            f"{table.path}: {', '.join(columns)} combine to {math.prod(sizes):,} classes, more than {MOST_CLASSES:,}; "
            "choose columns with fewer values"
        )
    labels: dict[str, int] = {}
    for i, file in enumerate(table.rows):
        label: int | None = 0
        for (picks, _), size in zip(choices, sizes):
            pick = picks[i]
            label = None if label is None or pick is None else label * size + pick
        if label is not None:
            labels[file] = label
    if len(columns) == 1:
        return labels, tuple(choices[0][1])
    named = [
        names if ALTERNATIVES in column else [f"{column}={name}" for name in names]
        for column, (_, names) in zip(columns, choices)
    ]
    return labels, tuple(" ".join(combination) for combination in itertools.product(*named))


def _choices(table: AttributeTable, column: str) -> tuple[list[int | None], list[str]]:
    if ALTERNATIVES in column:
        names = column.split(ALTERNATIVES)
        flags = [[value.lower() in TRUE for value in table.values(name)] for name in names]
        return [next((k for k, flag in enumerate(row) if flag), None) for row in zip(*flags)], names
    values = table.values(column)
    names = sorted(set(values), key=_natural)
    number = {name: k for k, name in enumerate(names)}
    return [number[value] for value in values], names


def _natural(value: str) -> tuple[int, int, str]:
    """A sort key: integers in numerical order, before other text."""
    try:
        return (0, int(value), value)
    except ValueError:
        return (1, 0, value)
