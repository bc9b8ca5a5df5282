"""A published table: recipes with the numbers that were printed for them."""

import dataclasses
import re
from collections.abc import Mapping

from effuse.core.errors import RecipeError, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One number: the run that gives ours, and the one that was printed."""

    labels: Mapping[str, str | int]  # where it stands: method, clients, ...
    recipe: str  # a recipe's name or call; {scale} in it stands for the scale's name
    settings: tuple[str, ...] = ()  # KEY=VALUE, as `--set` takes them
    metric: str  # the key of our number in a run's metrics
    printed: float | None = None  # None where a figure shows a point without its number
    spread: float | None = None
    beside: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what else was printed for the same run

    @property
    def name(self) -> str:
        """Its labels in one word, which names its run folder too."""
        return "-".join(str(value) for value in self.labels.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of a table's protocol is kept: all of it, or what a small machine can do in minutes."""

    settings: tuple[str, ...] = ()  # after a cell's own
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # on keys that count, where a recipe has them
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)  # metrics that stand in for the table's
    comparable: bool = True  # whether ours may be held against the printed numbers
    told: str = ""  # what a table's title says of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells in the order of print, and the scales they can be run at, the published one first."""

    title: str
    cells: tuple[Cell, ...]
    repeats: str | None = None  # the label by which cells repeat each other, such as seed: their mean is reported too
    against: tuple[str, str] | None = (
        None  # (label, value): means also say how far they are from that row's, repeat by repeat
    )
    also: tuple[str, ...] = ()  # metrics shown beside, for which nothing was printed
    scales: Mapping[str, Scale] = dataclasses.field(default_factory=lambda: {"paper": Scale()})
    rehearsed: bool = False  # its numbers follow from the recipes: `check` gives them, and nothing is trained

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        for name in names:
            if names.count(name) > 1 or not re.fullmatch(r"[\w.-]+", name):
                raise RecipeError(f"table '{self.title}': '{name}' must name one cell, in letters, digits, dots and dashes")
        if len({tuple(cell.labels) for cell in self.cells}) != 1:
            raise RecipeError(f"table '{self.title}': its cells must have the same labels, and there must be some")
        if self.against and not any(cell.labels.get(self.against[0]) == self.against[1] for cell in self.cells):
            raise RecipeError(
                f"table '{self.title}': no cell has {'='.join(self.against)}, which the others are held against"
            )

    def scale(self, name: str | None) -> tuple[str, Scale]:
        """The scale of this name, or the published one."""
        name = name or next(iter(self.scales))
        if name not in self.scales:
            raise RecipeError(f"--scale {name}: there is none; {nearest(name, self.scales)}")
        return name, self.scales[name]

    def chosen(self, only: str | None) -> list[Cell]:
        """The cells that `KEY=VALUE,KEY=VALUE` picks: every key must agree, and a key given twice may be either."""
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
        found = [cell for cell in self.cells if all(str(cell.labels[k]) in v for k, v in wanted.items())]
        if not found:
            raise RecipeError(f"--only {only}: no cell has all of that; leave something out")
        return found
