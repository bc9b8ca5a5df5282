"""A published table again: its cells are run one after another, and ours stands beside what was printed.

Several processes may be at one table, each at another cell.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from effuse.core.errors import RecipeError, RunError, TrainingError
from effuse.core.files import held, write_atomically, writing
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.table import Cell, Table
from effuse.recipes import find_recipe
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.tools.check import check

CHECKED = "check.json"
DIVERGED = "diverged.txt"  # why a cell has no number and will have none


@dataclasses.dataclass(frozen=True)
class Planned:
    """A cell at some scale: the recipe that gives its number, and where the run lies."""

    cell: Cell
    recipe: Recipe
    settings: tuple[str, ...]
    folder: RunFolder


def value_at(recipe: Recipe, key: str) -> int | None:
    """What a dotted key of a recipe holds; None where the recipe has no such key."""
    value: Any = recipe
    for word in key.split("."):
        value = getattr(value, word, None)
    return value


def training(recipe: Recipe) -> Recipe:
    """A recipe without what begins when training is over."""
    return dataclasses.replace(recipe, sampler=None, evaluate=Evaluate())


def _mean(values: list[float]) -> dict[str, float | None]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values) if values else None, "std": spread}


class Reproduction:
    """A table at one scale in one folder; whatever lies there already is part of it."""

    def __init__(self, name: str, table: Table, out: Path, scale: str | None = None) -> None:
        self.name, self.table, self.out = name, table, out
        self.scale_name, self.scale = table.scale(scale)
        self.planned = {cell.name: self._plan(cell) for cell in table.cells}

    def _plan(self, cell: Cell) -> Planned:
        settings = (*cell.settings, *self.scale.settings)
        recipe = find_recipe(cell.recipe.replace("{scale}", self.scale_name))[1].changed(list(settings))
        scaled = tuple(
            f"{key}={max(1, round(factor * count))}"
            for key, factor in self.scale.factors.items()
            if (count := value_at(recipe, key)) is not None
        )
        return Planned(cell, recipe.changed(list(scaled)), (*settings, *scaled), RunFolder(self.out / cell.name))

    def select(self, only: str | None) -> list[Planned]:
        """The cells to run; a folder that holds something else is refused before anything is computed."""
        chosen = [self.planned[cell.name] for cell in self.table.chosen(only)]
        for plan in chosen:
            if plan.folder.manifest.exists():
                plan.folder.require_same(plan.recipe)
        return chosen

    def complete(self, plan: Planned, device: str = "auto", observer: Observer | None = None, wait: bool = False) -> bool:
        """See one cell through, from where it stopped; a finished one costs nothing. Not if another process is at it, unless we `wait`."""
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with held(self.out / f".{plan.cell.name}.lock", wait) as ours:
            if ours:
                self._complete(plan, device, observer)
        return ours

    def _complete(self, plan: Planned, device: str, observer: Observer | None) -> None:
        name, path = plan.cell.name, plan.folder.path
        try:
            if self._state(plan)[0] == "failed":
                pass  # it always will; whoever wants to see it again removes its folder
            elif self.table.rehearsed:
                self._rehearse(plan)
            elif plan.folder.manifest.exists():
                driver.resume(path, device=None if device == "auto" else device, observer=observer)
            else:
                trained = self._trained_alike(plan)
                driver.run(plan.recipe, path, name=f"{self.name} {name}", device=device, observer=observer, trained=trained)
        except RecipeError as error:
            others = [f"--scale {scale}" for scale in self.table.scales if scale != self.scale_name]
            also = f"; the table has {' and '.join(others)}, too" if others else ""
            raise RecipeError(f"{name}: {error}{also}") from None
        except TrainingError as error:  # this cell diverges: the others have not been tried
            write_atomically(path / DIVERGED, f"{error}\n".encode())
        self._save()

    def _trained_alike(self, plan: Planned) -> Path | None:
        """The run of a finished cell that differs in nothing but how the model is looked at in the end."""
        if plan.recipe.evaluate.every:  # what it would have seen on its way, nobody else has looked at
            return None
        wanted = training(plan.recipe)
        alike = (p for p in self.planned.values() if training(p.recipe) == wanted and self._state(p)[0] == "done")
        return next((p.folder.path for p in alike if p.folder.unreadable() is None), None)

    def _rehearse(self, plan: Planned) -> None:
        found = check(plan.recipe, plan.cell.name)
        kept = {"recipe": plan.recipe.saved(), "figures": found["figures"], "traffic": found["traffic"]}
        with writing(plan.folder.path):
            plan.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.folder.path / CHECKED, (json.dumps(kept, indent=2) + "\n").encode())

    def _save(self) -> None:
        """Leave the table as far as it is known in its folder."""
        with held(self.out / ".lock", wait=True):  # or a cell of another process, finished meanwhile, could be written over
            write_atomically(self.out / "table.json", (json.dumps(self.report(), indent=2) + "\n").encode())

    def report(self, only: str | None = None) -> dict[str, Any]:
        """Every cell of the table, or those that `only` picks, run or not."""
        return {
            "table": self.name,
            "title": ", ".join(filter(None, (self.table.title, self.scale.told))),
            "scale": self.scale_name,
            "comparable": self.scale.comparable,
            "out": str(self.out),
            "cells": (rows := [self.row(self.planned[cell.name]) for cell in self.table.chosen(only)]),
            "against": self.table.against and self.table.against[1],
            "means": self._means(rows),
        }

    def _means(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mean and standard deviation over the cells that repeat each other, as far as they are done."""
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows if self.table.repeats else []:
            labels = {k: v for k, v in row["labels"].items() if k != self.table.repeats}
            groups.setdefault(tuple(labels.items()), []).append(row)
        means = []
        for labels, group in groups.items():
            ours = [row["ours"] for row in group if row["ours"] is not None]
            mean = {"labels": dict(labels), "metric": group[0]["metric"], "printed": group[0]["printed"]}
            mean |= {"done": len(ours), "of": len(group), **_mean(ours)}
            if self.table.against:
                mean["difference"] = _mean(self._differences(group))
            also = dict.fromkeys(name for row in group for name in row["also"])
            others = {name: [row["also"][name] for row in group if name in row["also"]] for name in also}
            means.append(mean | {"also": {name: _mean(values) for name, values in others.items()}})
        return means

    def _differences(self, group: list[dict[str, Any]]) -> list[float]:
        """Ours minus that of the row which all are held against, repeat by repeat: what a seed does to both of them falls out."""
        assert self.table.against
        theirs = dict([self.table.against])
        plans = {tuple(plan.cell.labels.items()): plan for plan in self.planned.values()}
        pairs = ((row, plans.get(tuple((row["labels"] | theirs).items()))) for row in group if row["ours"] is not None)
        found = ((row["ours"], self.row(plan)["ours"]) for row, plan in pairs if plan and plan.cell.name != row["name"])
        return [a - b for a, b in found if b is not None]

    def row(self, plan: Planned) -> dict[str, Any]:
        """One cell: the printed number, ours, and how far ours has come."""
        cell, (state, note) = plan.cell, self._state(plan)
        row: dict[str, Any] = {"name": cell.name, "labels": dict(cell.labels), "state": state, "note": note}
        row |= {"metric": self._metric(cell.metric), "printed": cell.printed, "printed_spread": cell.spread}
        row |= {"beside": dict(cell.beside), "ours": None, "ours_spread": None, "also": {}}
        if state == "done":
            found, measured = self._numbers(plan)
            row |= measured | {"ours": found.get(row["metric"])}
            row["also"] = {name: found[name] for name in map(self._metric, self.table.also) if name in found}
        return row | {"recipe": cell.recipe, "settings": list(plan.settings), "run": str(plan.folder.path)}

    def _numbers(self, plan: Planned) -> tuple[dict[str, float], dict[str, Any]]:
        """What was found of a finished cell by name, figures and metrics, and what its row says besides."""
        if self.table.rehearsed:
            kept = json.loads((plan.folder.path / CHECKED).read_text())
            return kept["figures"], {f"{name}_sent": kept["traffic"][name]["total"] for name in ("parameters", "bytes")}
        result = plan.folder.read_result()
        # figures follow from the network and its messages
        found = {**(result.figures or {}), **{name: m.value for name, m in result.metrics.items()}}
        ours, sent = result.metrics.get(self._metric(plan.cell.metric)), result.traffic
        measured: dict[str, Any] = {"parameters_sent": sent.parameters.total, "bytes_sent": sent.bytes.total}
        measured |= {"ours_spread": ours and ours.std, "seconds": result.seconds}
        return found, measured | ({} if result.round_seconds is None else {"round_seconds": result.round_seconds})

    def _rehearsed(self, plan: Planned) -> str:
        file = plan.folder.path / CHECKED
        if not file.exists():
            return "missing"
        try:  # as a recipe and not as text: that of an earlier release lacks the keys that have come since
            there = Recipe.restore(json.loads(file.read_text())["recipe"])
        except RecipeError:
            return "other"
        return "done" if there == plan.recipe else "other"

    def _metric(self, name: str) -> str:
        return self.scale.metrics.get(name, name)

    def _state(self, plan: Planned) -> tuple[str, str]:
        folder = plan.folder
        if self.table.rehearsed:
            return self._rehearsed(plan), ""
        if not folder.manifest.exists():
            return "missing", ""
        try:
            folder.require_same(plan.recipe)
        except RunError as error:
            return "other", str(error)
        if folder.result.exists():
            return "done", ""
        if (folder.path / DIVERGED).exists():
            return "failed", (folder.path / DIVERGED).read_text().strip()
        rounds = [record.federated for record in folder.records()]
        return "unfinished", f"after round {max(rounds, default=0)} of {plan.recipe.rounds}"
