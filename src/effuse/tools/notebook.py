"""The commands as Python functions: `effuse.run("demo", rounds=2)`, `effuse.load(run).sample(64)`; see `help(effuse)`."""

import re
import time
from pathlib import Path
from typing import Any

from effuse.core.recipe import Recipe
from effuse.core.spec import text
from effuse.recipes import find_recipe
from effuse.report.run import Run
from effuse.report.writer import Reporting
from effuse.runs import driver
from effuse.runs.observer import Observer
from effuse.runs.save import load
from effuse.tools import check as rehearsal

__all__ = ["Run", "check", "load", "recipe", "resume", "run"]


def recipe(source: str | Recipe, **changes: Any) -> Recipe:
    """A recipe by its name, call or manifest, with any of its keys changed: `effuse.recipe("demo", rounds=2, seed=1)`."""
    return _named(source, changes)[1]


def check(recipe: str | Recipe, **changes: Any) -> dict[str, Any]:
    """Rehearse a recipe: its parameters, partition, traffic, steps and memory, with nothing computed."""
    name, chosen = _named(recipe, changes)
    return rehearsal.check(chosen, name)


def run(
    recipe: str | Recipe,
    *,
    out: Path | str | None = None,
    engine: str = "simulator",
    device: str = "auto",
    workers: int | None = None,
    warm: Path | str | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Run:
    """Run a recipe, by name or as an object, with any of its keys changed: `effuse.run("demo", rounds=2, seed=1)`.

    `observer=effuse.Display()` shows the progress, as the command line does. `warm`: a run whose preparation to take over.
    """
    name, chosen = _named(recipe, changes)
    folder = new_folder(name) if out is None else Path(out)
    options: dict[str, Any] = {"engine": engine, "device": device, "workers": workers}
    with Reporting(observer or Observer()) as watching:
        run = driver.begin(
            chosen, folder, name=name, **options, warm=None if warm is None else Path(warm), observer=watching
        )
        run.complete()
    return Run(folder)


def resume(
    run: Path | str, *, device: str | None = None, workers: int | None = None, observer: Observer | None = None
) -> Run:
    """Continue a run from its last checkpoint; a finished run returns its result."""
    with Reporting(observer or Observer()) as watching:
        driver.resume(Path(run), device=device, workers=workers, observer=watching)
    return Run(Path(run))


def _named(source: str | Recipe, changes: dict[str, Any]) -> tuple[str, Recipe]:
    name, chosen = find_recipe(source) if isinstance(source, str) else ("run", source)
    return name, chosen.changed([f"{k}={v if isinstance(v, str) else text(v)}" for k, v in changes.items()])


def new_folder(name: str) -> Path:
    """The path of a new run folder: runs/NAME-DATE-TIME. A foreign manifest's name cannot lead elsewhere."""
    plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip(".")[:80] or "run"
    base = Path("runs") / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, folder = 1, base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
