"""`effuse run`: train by a recipe."""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RecipeName, Rounds, Seed, Settings, chosen
from effuse.cli.progress import Display, show_result, show_spread
from effuse.core.errors import RecipeError
from effuse.core.recipe import Recipe
from effuse.engines import driver
from effuse.engines.notebook import new_folder
from effuse.engines.observer import Observer


@app.command()
def run(
    recipe: RecipeName,
    set: Settings = None,
    engine: Annotated[str, typer.Option(help="simulator or loopback (through the wire format).")] = "simulator",
    device: Device = "auto",
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Run or resume one run per seed; print mean and spread.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one under runs/.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train by a recipe, evaluate, and write a run folder."""
    name, wanted = chosen(recipe, set, rounds, seed)
    if seeds is None:
        folder = out or new_folder(name)
        result = _one(wanted, folder, name, engine, device, as_json, quiet)
        if as_json:
            print(json.dumps({"run": str(folder)} | result))
        return
    results = {}
    root = out or Path("runs") / f"{name}-seeds"
    for number in _numbers(seeds):
        folder = root / f"seed-{number}"
        if (folder / "manifest.json").exists():
            results[number] = driver.resume(folder, observer=_observer(as_json, quiet))
        else:
            results[number] = _one(wanted.changed([f"seed={number}"]), folder, name, engine, device, as_json, quiet)
    spread = {k: _spread([r["metrics"][k]["value"] for r in results.values()]) for k in next(iter(results.values()))["metrics"]}
    if as_json:
        print(json.dumps({"runs": {s: str(root / f"seed-{s}") for s in results}, "metrics": spread}))
    elif not quiet:
        show_spread(spread, list(results))


def _one(recipe: Recipe, folder: Path, name: str, engine: str, device: str, as_json: bool, quiet: bool) -> dict[str, Any]:
    observer = _observer(as_json, quiet)
    with observer:
        result = driver.run(recipe, folder, name=name, engine=engine, device=device, observer=observer)
    if not as_json and not quiet:
        show_result(result, folder)
    return result


def _observer(as_json: bool, quiet: bool) -> Any:
    return Observer() if as_json or quiet else Display()


def _numbers(seeds: str) -> list[int]:
    try:
        return sorted({int(s) for s in seeds.split(",")})
    except ValueError:
        raise RecipeError(f"--seeds {seeds}: expected whole numbers with commas between, such as 0,1,2") from None


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0, "values": values}
