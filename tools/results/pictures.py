"""Quality against traffic: one picture a paper."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import runs
from runs import Amount
from text import spread

from effuse.runs.records import Result

KEPT = "Comment"  # where a PNG keeps the numbers that it shows
Point = tuple[str, float, float, float]  # name, amount sent, mean over seeds, deviation


@dataclass(frozen=True)
class Picture:
    paper: str
    across: str
    up: str
    points: tuple[Point, ...]
    scale: str = "linear"  # of the amount

    @property
    def file(self) -> Path:
        return runs.RESULTS / f"traffic-{self.paper}.png"

    @property
    def numbers(self) -> str:
        return "; ".join(f"{name}: {sent:.4g}, {value:.3f} ± {apart:.3f}" for name, sent, value, apart in self.points)

    def draw(self) -> None:
        from matplotlib.figure import Figure

        plot = Figure(figsize=(7.5, 3.8), layout="constrained")
        axes = plot.subplots()
        for (name, sent, value, deviation), marker in zip(self.points, cycle("os^Dv")):
            axes.errorbar(sent, value, deviation, marker=marker, linestyle="", capsize=3, label=name)
        axes.set(xlabel=self.across, ylabel=self.up, xscale=self.scale)
        axes.margins(x=0.08, y=0.08)
        axes.spines[["top", "right"]].set_visible(False)
        plot.legend(loc="outside right center", fontsize=8, frameon=False)
        plot.savefig(self.file, dpi=110, metadata={KEPT: self.numbers})

    def kept(self) -> str:
        """The numbers that the committed picture shows."""
        from PIL import Image

        with Image.open(self.file) as image:
            return str(image.info.get(KEPT, ""))


def points(
    found: dict[str, list[Result]], quality: Callable[[list[Result]], list[float]], sent: Amount
) -> tuple[Point, ...]:
    """A point for every method that was run."""
    kept = {name: these for name, these in found.items() if these}
    values = {name: quality(these) for name, these in kept.items()}
    return tuple(
        (name, statistics.fmean(map(sent, these)), statistics.fmean(values[name]), spread(values[name]) or 0.0)
        for name, these in kept.items()
    )
