"""`effuse sample`: images out of a trained model."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath
from effuse.cli.progress import drawing
from effuse.core.build import build_text
from effuse.core.capabilities import Personal
from effuse.core.errors import RecipeError, RunError
from effuse.core.sampler import Sampler
from effuse.runs.save import load
from effuse.tools.export import FORMATS, export, require_empty
from effuse.transport.device import pick_device


@app.command()
def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="How many images.")] = 100,
    format: Annotated[str, typer.Option(help="grid, imagefolder or npz.")] = "grid",
    out: Annotated[Path | None, typer.Option(help="Where to write; by default in RUN/exports.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same images.")] = 0,
    label: Annotated[int | None, typer.Option(help="Draw this class only.")] = None,
    sampler: Annotated[str | None, typer.Option(help="Another sampler than the recipe's, such as 'ancestral()'.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images drawn together; part of the result.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="From the moving average of the weights.")] = False,
    client: Annotated[int | None, typer.Option(help="From this client's own model, where clients have one.")] = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw images from a run's model and write them with their provenance."""
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    opened = load(run, ema=ema, client=client, device=pick_device(device).type)
    if client is None and isinstance(opened.recipe.algorithm, Personal):
        algorithm, last = opened.recipe.algorithm.name, opened.recipe.clients - 1
        raise RunError(f"{run}: {algorithm} trains a model for each client; choose one with --client 0 to {last}")
    how = None if sampler is None else build_text(sampler, Sampler, "sampler")
    marks = {
        "seed": seed,
        "label": label,
        "client": client,
        "batch": batch,
        "sampler": how and re.sub(r"\W+", "-", str(how)).strip("-"),
    }
    marked = [f"{k}-{v}" for k, v in marks.items() if v is not None] + ["ema"] * ema
    where = out or run / "exports" / "-".join([format, str(n), *marked])  # tells exports of different requests apart
    if format == "imagefolder":
        require_empty(where)
    with drawing(opened.meter, as_json or quiet):
        images = opened.sample(n, seed=seed, labels=None if label is None else [label] * n, sampler=how, batch=batch)
    asked = {"n": n, "seed": seed, "label": label, "ema": ema, "client": client}
    written = export(images, format, where, opened, asked, opened.seeds(n, seed=seed, sampler=how, batch=batch), how)
    if as_json:
        print(json.dumps({"written": str(written), "n": n, "format": format}))
    elif not quiet:
        print(f"{n} images in {written}")
