"""How numbers are written."""

import statistics
from collections.abc import Iterable, Sequence


def spread(numbers: Sequence[float]) -> float | None:
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def plus_minus(value: float, deviation: float | None, digits: int = 1) -> str:
    shown = f"{value:z.{digits}f}"  # z: no -0.0
    return shown if deviation is None else f"{shown} ± {deviation:.{digits}f}"


def mean(numbers: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation; the number itself where there is one; nothing where there is none."""
    return plus_minus(statistics.fmean(numbers), spread(numbers), digits) if numbers else ""


def each(numbers: Iterable[float], digits: int = 1) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def seeds(numbers: Sequence[float], wanted: int, digits: int = 1) -> str:
    """The number of every seed that was wanted."""
    missing = wanted - len(numbers)
    return ", ".join([*(each([number], digits) for number in numbers), *["not run"] * missing]) if numbers else "not run"


def less(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    """Differences seed by seed; those of the first seeds where fewer were run."""
    return [a - b for a, b in zip(ours, other)]


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(*sentences: str) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
