"""The committed runs under docs/results, and how their numbers are written."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from effuse.runs.folder import RunFolder
from effuse.runs.records import Result

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
Amount = Callable[[Result], float]


def result(run: str) -> Result:
    return RunFolder(RESULTS / run).read_result()


def results(name: str, seeds: Iterable[int] = (0, 1, 2)) -> list[Result]:
    """The results of NAME-SEED, of those seeds that were run."""
    return [result(f"{name}-{seed}") for seed in seeds if (RESULTS / f"{name}-{seed}" / "result.json").exists()]


def metric(found: Iterable[Result], name: str, factor: float = 1) -> list[float]:
    return [factor * one.metrics[name].value for one in found]


def accuracy(found: Iterable[Result], name: str = "accuracy") -> list[float]:
    return metric(found, name, 100)


def gigabytes(one: Result) -> float:
    return one.traffic.bytes.total / 1e9


def megabytes(one: Result) -> float:
    return one.traffic.bytes.total / 1e6


def figure(name: str) -> Amount:
    """A figure that needs no run, such as a weighted cost."""
    return lambda one: (one.figures or {})[name]


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def spread(numbers: Sequence[float]) -> float | None:
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def mean(numbers: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation; the number itself where there is one; nothing where there is none."""
    if not numbers:
        return ""
    deviation = spread(numbers)
    text = f"{statistics.fmean(numbers):.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"


def each(numbers: Sequence[float], digits: int = 1) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def less(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    """Differences seed by seed; those of the first seeds where fewer were run."""
    return [a - b for a, b in zip(ours, other)]


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
