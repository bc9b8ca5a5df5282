"""The same from Python: `effuse.run("demo", rounds=2)`, `effuse.load(run).sample(64)`."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from effuse.core.recipe import Recipe
from effuse.core.spec import text
from effuse.engines import driver
from effuse.engines.observer import Observer
from effuse.engines.save import load
from effuse.recipes import find_recipe

__all__ = ["Finished", "load", "run"]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that is over: its folder and its result."""

    path: Path
    result: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        return {name: m["value"] for name, m in self.result["metrics"].items()}

    @property
    def weights_sha256(self) -> str:
        return str(self.result["weights_sha256"])


def run(
    recipe: str | Recipe, *, out: Path | str | None = None, engine: str = "simulator", device: str = "auto",
    workers: int | None = None, observer: Observer | None = None, **changes: Any,
) -> Finished:  # fmt: skip
    """Run a recipe, by name or as an object, with any of its keys changed: `effuse.run("demo", rounds=2, seed=1)`."""
    name, chosen = find_recipe(recipe) if isinstance(recipe, str) else ("run", recipe)
    chosen = chosen.changed([f"{k}={v if isinstance(v, str) else text(v)}" for k, v in changes.items()])
    folder = new_folder(name) if out is None else Path(out)
    places: dict[str, Any] = {"engine": engine, "device": device, "workers": workers}
    return Finished(folder, driver.run(chosen, folder, name=name, **places, observer=observer))


def new_folder(name: str) -> Path:
    """A run folder that nobody uses yet: runs/NAME-DATE-TIME."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken, folder = 1, base
    while folder.exists():
        taken += 1
        folder = base.with_name(f"{base.name}-{taken}")
    return folder
