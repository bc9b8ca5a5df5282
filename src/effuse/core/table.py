"""A published table: recipes with the numbers that the paper printed for them."""

import dataclasses
import re
from collections.abc import Mapping

from effuse.core.errors import RecipeError, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One printed number, and the run that reproduces it."""

    labels: Mapping[str, str | int]  # its place in the table: method, clients, ...
    # a recipe's name or call; {scale} is replaced by the scale's name, {out} by the folder of all cells' runs
    recipe: str
    settings: tuple[str, ...] = ()  # KEY=VALUE, as `--set` takes them
    metric: str  # the key of the reproduced number in a run's metrics
    printed: float | None = None  # None where a figure shows a point but no number
    spread: float | None = None
    beside: Mapping[str, float] = dataclasses.field(default_factory=dict)  # other numbers that were printed for the same run

    @property
    def name(self) -> str:
        """Its labels in one word, which is also the name of its run folder."""
        return "-".join(str(value) for value in self.labels.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of a table's protocol is run: all of it, or what a small machine can do in minutes."""

    settings: tuple[str, ...] = ()  # applied after the cell's own
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # on countable keys, where a recipe has them
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)  # metrics that replace the table's
    comparable: bool = True  # whether results may be compared with the printed numbers
    label: str = ""  # the words for it in the table's title


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells in printed order, and the scales at which they can be run, the published one first."""

    title: str
    cells: tuple[Cell, ...]
    repeats: str | None = None  # a label, such as seed, over whose values the mean is also reported
    # (label, value): means also report their difference to that row, repeat by repeat
    against: tuple[str, str] | None = None
    also: tuple[str, ...] = ()  # metrics that are also shown, for which nothing was printed
    scales: Mapping[str, Scale] = dataclasses.field(default_factory=lambda: {"paper": Scale()})
    rehearsed: bool = False  # `check` computes its numbers from the recipes, without training

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        for name in names:
            if names.count(name) > 1 or not re.fullmatch(r"[\w.-]+", name):
                raise RecipeError(f"table '{self.title}': '{name}' must name one cell, in letters, digits, dots and dashes")
        if len({tuple(cell.labels) for cell in self.cells}) != 1:
            raise RecipeError(f"table '{self.title}': its cells must have the same labels, and there must be some")
        if self.against and not any(cell.labels.get(self.against[0]) == self.against[1] for cell in self.cells):
            row = "=".join(self.against)
            raise RecipeError(f"table '{self.title}': no cell has {row}, which the others are held against")

    def scale(self, name: str | None) -> tuple[str, Scale]:
        """The scale of this name, or the published one."""
        name = name or next(iter(self.scales))
        if name not in self.scales:
            raise RecipeError(f"--scale {name}: there is none; {nearest(name, self.scales)}")
        return name, self.scales[name]

    def chosen(self, only: str | None) -> list[Cell]:
        """The cells that `KEY=VALUE,KEY=VALUE` selects: every key must match, and a key given twice matches either value."""
        wanted: dict[str, set[str]] = {}
        for word in only.split(",") if only else ():
            key, equals, value = (piece.strip() for piece in word.partition("="))
            known = {str(cell.labels[key]) for cell in self.cells if key in cell.labels}
            if not equals:
                raise RecipeError(f"--only {word}: expected KEY=VALUE; keys: {', '.join(self.cells[0].labels)}")
            if not known:
                raise RecipeError(f"--only {word}: cells have no {key}; {nearest(key, self.cells[0].labels)}")
            if value not in known:
                raise RecipeError(f"--only {word}: no cell has that; {nearest(value, known)}")
            wanted.setdefault(key, set()).add(value)
        selected = [cell for cell in self.cells if all(str(cell.labels[k]) in v for k, v in wanted.items())]
        if not selected:
            raise RecipeError(f"--only {only}: no cell has all of that; leave something out")
        return selected
