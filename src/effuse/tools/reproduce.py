"""Reproduce a published table: run its cells one after another, and show our numbers beside the printed ones.

Several processes can share one table; each takes a different cell.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from effuse.core.errors import RecipeError, RunError, TrainingError
from effuse.core.files import held, parsed, write_atomically, writing
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.table import Cell, Table
from effuse.recipes import find_recipe
from effuse.report.compare import table_page
from effuse.report.writer import Reporting, save
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.runs.warm import difference
from effuse.tools.check import check

CHECKED = "check.json"
DIVERGED = "diverged.txt"  # the error of a cell that diverged; it is not run again


@dataclasses.dataclass(frozen=True)
class Planned:
    """A cell at one scale: its recipe and its run folder."""

    cell: Cell
    recipe: Recipe
    settings: tuple[str, ...]
    folder: RunFolder


def value_at(recipe: Recipe, key: str) -> int | None:
    """The value of a dotted key of a recipe; None if the recipe has no such key."""
    value: Any = recipe
    for word in key.split("."):
        value = getattr(value, word, None)
    return value


def training(recipe: Recipe) -> Recipe:
    """A recipe without its sampler and evaluation."""
    return dataclasses.replace(recipe, sampler=None, evaluate=Evaluate())


def _mean(values: list[float]) -> dict[str, float | None]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values) if values else None, "std": spread}


class Reproduction:
    """A table at one scale in one folder, including the cells that earlier commands ran there."""

    def __init__(self, name: str, table: Table, out: Path, scale: str | None = None) -> None:
        self.name, self.table, self.out = name, table, out
        self.scale_name, self.scale = table.scale(scale)
        self.planned = {cell.name: self._plan(cell) for cell in table.cells}

    def _plan(self, cell: Cell) -> Planned:
        settings = (*cell.settings, *self.scale.settings)
        source = cell.recipe.replace("{scale}", self.scale_name).replace("{out}", self.out.as_posix())
        recipe = find_recipe(source)[1].changed(list(settings))
        scaled = tuple(
            f"{key}={max(1, round(factor * count))}"
            for key, factor in self.scale.factors.items()
            if (count := value_at(recipe, key)) is not None
        )
        return Planned(cell, recipe.changed(list(scaled)), (*settings, *scaled), RunFolder(self.out / cell.name))

    def select(self, only: str | None) -> list[Planned]:
        """The cells to run; refuses a folder that holds another run before anything is computed."""
        chosen = [self.planned[cell.name] for cell in self.table.chosen(only)]
        for plan in chosen:
            if plan.folder.manifest.exists():
                plan.folder.require_same(plan.recipe)
        return chosen

    def complete(self, plan: Planned, device: str = "auto", observer: Observer | None = None, wait: bool = False) -> bool:
        """Run or resume one cell. Returns False if another process runs it, unless `wait` is set."""
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with held(self.out / f".{plan.cell.name}.lock", wait) as acquired:
            if acquired:
                self._complete(plan, device, observer)
        return acquired

    def _complete(self, plan: Planned, device: str, observer: Observer | None) -> None:
        name, path = plan.cell.name, plan.folder.path
        observer = Reporting(observer or Observer())
        try:
            if self._state(plan)[0] == "failed":
                pass  # it would fail again; remove its folder to repeat it
            elif self.table.rehearsed:
                self._rehearse(plan)
            elif plan.folder.manifest.exists():
                driver.resume(path, device=None if device == "auto" else device, observer=observer)
            else:
                begin: dict[str, Any] = {"trained": (trained := self._same_training(plan))}
                if trained is None:
                    begin["warm"] = self._same_preparation(plan)
                driver.run(plan.recipe, path, name=f"{self.name} {name}", device=device, observer=observer, **begin)
        except RecipeError as error:
            others = [f"--scale {scale}" for scale in self.table.scales if scale != self.scale_name]
            also = f"; the table also has {' and '.join(others)}" if others else ""
            raise RecipeError(f"{name}: {error}{also}") from None
        except TrainingError as error:  # other cells may still work
            write_atomically(path / DIVERGED, f"{error}\n".encode())
        self._save()

    def _same_training(self, plan: Planned) -> Path | None:
        """The run of a finished cell that differs only in its final evaluation."""
        if plan.recipe.evaluate.every:  # evaluations between rounds cannot be taken from another run
            return None
        wanted = training(plan.recipe)
        same = (p for p in self.planned.values() if training(p.recipe) == wanted and self._state(p)[0] == "done")
        return next((p.folder.path for p in same if p.folder.unreadable() is None), None)

    def _same_preparation(self, plan: Planned) -> Path | None:
        """The first cell whose preparation is finished and the same."""
        runs = (p.folder for p in self.planned.values() if p.folder.prepared.exists() and p.folder.manifest.exists())
        return next((folder.path for folder in runs if difference(plan.recipe, folder) is None), None)

    def _rehearse(self, plan: Planned) -> None:
        found = check(plan.recipe, plan.cell.name)
        saved = {"recipe": plan.recipe.saved(), "figures": found["figures"], "traffic": found["traffic"]}
        with writing(plan.folder.path):
            plan.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.folder.path / CHECKED, (json.dumps(saved, indent=2) + "\n").encode())

    def _save(self) -> None:
        """Write the table's present state to its folder."""
        with held(self.out / ".lock", wait=True):  # or this could overwrite a newer table of another process
            report = self.report()
            write_atomically(self.out / "table.json", (json.dumps(report, indent=2) + "\n").encode())
            save(self.out / "table.html", table_page(report), private=False)

    def report(self, only: str | None = None) -> dict[str, Any]:
        """Every cell of the table, or those that `only` selects, whether run or not."""
        return {
            "table": self.name,
            "title": ", ".join(filter(None, (self.table.title, self.scale.label))),
            "scale": self.scale_name,
            "comparable": self.scale.comparable,
            "out": str(self.out),
            "cells": (rows := [self.row(self.planned[cell.name]) for cell in self.table.chosen(only)]),
            "against": self.table.against and self.table.against[1],
            "means": self._means(rows),
        }

    def _means(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mean and standard deviation over the finished cells that differ in the repeated label only, such as the seed."""
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows if self.table.repeats else []:
            labels = {k: v for k, v in row["labels"].items() if k != self.table.repeats}
            groups.setdefault(tuple(labels.items()), []).append(row)
        means = []
        for values, group in groups.items():
            ours = [row["ours"] for row in group if row["ours"] is not None]
            mean: dict[str, Any] = {"labels": dict(values), "metric": group[0]["metric"], "printed": group[0]["printed"]}
            mean |= {"done": len(ours), "of": len(group), **_mean(ours)}
            if self.table.against:
                mean["difference"] = _mean(self._differences(group))
            also = dict.fromkeys(name for row in group for name in row["also"])
            others = {name: [row["also"][name] for row in group if name in row["also"]] for name in also}
            means.append(mean | {"also": {name: _mean(found) for name, found in others.items()}})
        return means

    def _differences(self, group: list[dict[str, Any]]) -> list[float]:
        """Our values minus those of the baseline row of the same repeat, so that effects of the seed cancel."""
        assert self.table.against
        baseline: dict[str, Any] = dict([self.table.against])
        plans = {tuple(plan.cell.labels.items()): plan for plan in self.planned.values()}
        pairs = ((row, plans.get(tuple((row["labels"] | baseline).items()))) for row in group if row["ours"] is not None)
        found = ((row["ours"], self.row(plan)["ours"]) for row, plan in pairs if plan and plan.cell.name != row["name"])
        return [a - b for a, b in found if b is not None]

    def row(self, plan: Planned) -> dict[str, Any]:
        """One cell: the printed number, ours, and the state of our run."""
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
        """The figures and metrics of a finished cell by name, and the other fields of its row."""
        if self.table.rehearsed:
            saved = parsed((file := plan.folder.path / CHECKED).read_bytes(), file)
            return saved["figures"], {f"{name}_sent": saved["traffic"][name]["total"] for name in ("parameters", "bytes")}
        result = plan.folder.read_result()
        found = {**(result.figures or {}), **{name: m.value for name, m in result.metrics.items()}}
        ours, sent = result.metrics.get(self._metric(plan.cell.metric)), result.traffic
        measured: dict[str, Any] = {"parameters_sent": sent.parameters.total, "bytes_sent": sent.bytes.total}
        measured |= {"ours_spread": ours and ours.std, "seconds": result.seconds}
        return found, measured | ({} if result.round_seconds is None else {"round_seconds": result.round_seconds})

    def _rehearsed(self, plan: Planned) -> str:
        file = plan.folder.path / CHECKED
        if not file.exists():
            return "missing"
        try:  # compare recipes, not text: an earlier release may lack newer keys
            saved = Recipe.restore(parsed(file.read_bytes(), file)["recipe"])
        except RecipeError:
            return "other"
        return "done" if saved == plan.recipe else "other"

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
