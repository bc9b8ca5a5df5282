"""`effuse sample`: draw images from a trained model."""

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
from effuse.core.grid import too_young
from effuse.core.sampler import Sampler
from effuse.runs.save import load
from effuse.tools.export import FORMATS, export, require_empty
from effuse.transport.device import pick_device


@app.command()
def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of images.")] = 100,
    format: Annotated[str, typer.Option(help="Output format: grid, imagefolder, npz or parquet.")] = "grid",
    out: Annotated[Path | None, typer.Option(help="The file or folder to write; by default in RUN/exports.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same images.")] = 0,
    label: Annotated[str | None, typer.Option(help="Draw this class only, by its name or number.")] = None,
    sampler: Annotated[str | None, typer.Option(help="A sampler instead of the recipe's, such as 'ancestral()'.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Number of images drawn together; other numbers give other images.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    client: Annotated[int | None, typer.Option(help="Use this client's own model, if the clients have their own.")] = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw images from a run's model, and write them with their provenance."""
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    opened = load(run, ema=ema, client=client, device=pick_device(device).type)
    if client is None and isinstance(opened.recipe.algorithm, Personal):
        algorithm, last = opened.recipe.algorithm.name, opened.recipe.clients - 1
        raise RunError(f"{run}: {algorithm} trains a model for each client; choose one with --client 0 to {last}")
    how = None if sampler is None else build_text(sampler, Sampler, "sampler")
    wanted = None if label is None else opened.label(label)
    marks = {
        "seed": seed,
        "label": wanted,
        "client": client,
        "batch": batch,
        "sampler": how and re.sub(r"\W+", "-", str(how)).strip("-"),
    }
    marked = [f"{k}-{v}" for k, v in marks.items() if v is not None] + ["ema"] * ema
    where = out or run / "exports" / "-".join([format, str(n), *marked])  # different requests get different names
    if format == "imagefolder":
        require_empty(where)
    with drawing(opened.meter, as_json or quiet):
        images = opened.sample(n, seed=seed, labels=None if wanted is None else [wanted] * n, sampler=how, batch=batch)
    asked = {"n": n, "seed": seed, "label": wanted, "ema": ema, "client": client}
    written = export(images, format, where, opened, asked, opened.seeds(n, seed=seed, sampler=how, batch=batch), how)
    if as_json:
        print(json.dumps({"written": str(written), "n": n, "format": format}))
    elif not quiet:
        print(f"{n} images in {written}")
        for words in filter(None, (opened.unfinished, too_young(images))):
            print(f"note: {words}")
