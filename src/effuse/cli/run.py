"""`effuse run`: train by a recipe."""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from effuse.cli import app
from effuse.cli.options import (
    Clients,
    Data,
    Device,
    Json,
    Profiled,
    Quiet,
    RecipeName,
    Rounds,
    Seed,
    Settings,
    Track,
    Workers,
    chosen,
)
from effuse.cli.progress import show_spread, tell, watched
from effuse.core.errors import RecipeError
from effuse.core.files import write_atomically
from effuse.report.writer import Reporting
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.runs.profile import profiled
from effuse.tools.notebook import new_folder


@app.command()
def run(
    recipe: RecipeName,
    set: Settings = None,
    data: Data = None,
    engine: Annotated[
        str,
        typer.Option(help="How to run clients: simulator, loopback (encodes every message) or flower (one process each)."),
    ] = "simulator",
    device: Device = "auto",
    workers: Workers = None,
    rounds: Rounds = None,
    clients: Clients = None,
    seed: Seed = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,2", help="Run or resume one run per seed; writes mean and spread to seeds.json."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one under runs/.")] = None,
    warm: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take over RUN's preparation, such as FedDDPM's warm-up, instead of repeating it."),
    ] = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    profile: Profiled = False,
) -> None:
    """Train by RECIPE, evaluate the model, and write a run folder."""
    name, wanted, warnings = chosen(recipe, set, rounds, seed, clients, data)
    options: dict[str, Any] = {"engine": engine, "device": device, "workers": workers, "warm": warm}
    if seeds is None:
        folder = out or new_folder(name)
        with watched(folder, as_json, quiet, warnings=warnings, track=track) as observer, profiled(folder, profile) as spans:
            result = driver.begin(wanted, folder, name=name, **options, observer=Reporting(observer)).complete()
        tell(result, folder, spans, as_json, quiet)
        return
    if seed is not None:
        raise RecipeError(f"--seed {seed} and --seeds {seeds}: give only one of them")
    root = out or Path("runs") / f"{name}-seeds"
    planned = {n: (wanted.changed([f"seed={n}"]), root / f"seed-{n}") for n in _numbers(seeds)}
    begun = {n for n, (_, folder) in planned.items() if (folder / "manifest.json").exists()}
    for n in begun:
        changed, folder = planned[n]
        RunFolder(folder).require_same(changed)
    results = {}
    for n, (changed, folder) in planned.items():
        with watched(folder, as_json, quiet, warnings=warnings, track=track) as observer, profiled(folder, profile) as spans:
            if n in begun:
                results[n] = driver.resume(folder, observer=Reporting(observer))
            else:
                results[n] = driver.run(changed, folder, name=name, **options, observer=Reporting(observer))
        tell(results[n], folder, spans, False, as_json or quiet)
    names = next(iter(results.values())).metrics
    spread = {name: _spread([r.metrics[name].value for r in results.values()]) for name in names}
    report = {"runs": {n: str(folder) for n, (_, folder) in planned.items()}, "metrics": spread}
    write_atomically(root / "seeds.json", (json.dumps(report, indent=2) + "\n").encode())
    if as_json:
        print(json.dumps(report))
    elif not quiet:
        show_spread(spread, list(results))


def _numbers(seeds: str) -> list[int]:
    try:
        return sorted({int(s) for s in seeds.split(",")})
    except ValueError:
        raise RecipeError(f"--seeds {seeds}: expected whole numbers separated by commas, such as 0,1,2") from None


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0, "values": values}
