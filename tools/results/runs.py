"""The committed runs under docs/results."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from effuse.core.recipe import read_manifest
from effuse.core.table import Cell
from effuse.recipes import find_table
from effuse.runs.folder import RunFolder
from effuse.runs.records import Result

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NOT_RUN, OWN = "not run", "our question"
Amount = Callable[[Result], float]


@cache
def run(folder: str) -> Result:
    """The result of one run, whose manifest must have the seed that ends the folder's name."""
    path = RESULTS / folder
    seed, called = read_manifest(path)["recipe"]["seed"], folder.rpartition("-")[2]
    if called.isdigit() and called != seed:
        raise SystemExit(f"{path}: its manifest has seed {seed}, its name {called}; rename it or remove it")
    return RunFolder(path).read_result()


def runs(name: str, seeds: Iterable[int] = (0, 1, 2)) -> list[Result]:
    """The results of NAME-SEED, of the first seeds or of all, so that two lists can be compared seed by seed."""
    folders = [f"{name}-{seed}" for seed in seeds]
    kept = [folder for folder in folders if (RESULTS / folder / "result.json").exists()]
    if kept != folders[: len(kept)]:
        raise SystemExit(f"{RESULTS / folders[0]} is missing, but a later seed is there; add it, or remove the later one")
    return [run(folder) for folder in kept]


def metric(found: Iterable[Result], name: str, factor: float = 1) -> list[float]:
    return [factor * one.metrics[name].value for one in found]


def accuracy(found: Iterable[Result], name: str = "accuracy") -> list[float]:
    """In per cent."""
    return metric(found, name, 100)


def gigabytes(one: Result) -> float:
    return one.traffic.bytes.total / 1e9


def megabytes(one: Result) -> float:
    return one.traffic.bytes.total / 1e6


def seconds(found: Iterable[Result]) -> str:
    taken = sorted(round(one.seconds) for one in found)
    return "" if not taken else f"{taken[0]}" if taken[0] == taken[-1] else f"{taken[0]} to {taken[-1]}"


def figure(name: str) -> Amount:
    """A figure that needs no run, such as a weighted cost."""
    return lambda one: (one.figures or {})[name]


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def page(file: str) -> str:
    return (RESULTS / file).read_text()


@cache
def printed(table: str, cell: str) -> Cell:
    """A cell of a published table, with what the paper printed."""
    return next(one for one in find_table(table)[1].cells if one.name == cell)
