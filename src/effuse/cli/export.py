"""`effuse export`: the synthetic images that a run's server holds."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Quiet, RunPath
from effuse.core.errors import RecipeError
from effuse.tools.export import FORMATS, export_auxiliary, require_empty


@app.command()
def export(
    run: RunPath,
    format: Annotated[str, typer.Option(help="Output format: grid, imagefolder, npz or parquet.")] = "npz",
    out: Annotated[
        Path | None, typer.Option(help="The file or folder to write; by default RUN/exports/auxiliary-FORMAT.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the auxiliary images that RUN's server drew from its clients' models, each with the number of its client."""
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    where = out or run / "exports" / f"auxiliary-{format}"
    if format == "imagefolder":
        require_empty(where)
    written, n = export_auxiliary(run, format, where)
    if as_json:
        print(json.dumps({"written": str(written), "n": n, "format": format}))
    elif not quiet:
        print(f"{n} images in {written}")
