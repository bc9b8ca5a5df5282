"""`effuse pack` and `effuse unpack`: cut a run into parts for another machine; unpack joins them there."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Quiet, RunPath
from effuse.tools import pack as packing


@app.command()
def pack(
    run: RunPath,
    to: Annotated[Path, typer.Option(help="The folder to create for the parts.")],
    part: Annotated[float, typer.Option(metavar="MIB", min=1e-3, help="Largest size of a part in MiB.")] = 16.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the files of RUN that `effuse resume` needs into parts of limited size, to move it to another machine."""
    written = packing.pack(run, to, round(part * packing.MIB))
    if as_json:
        print(json.dumps({"files": [str(path) for path in written]}))
    elif not quiet:
        total = sum(path.stat().st_size for path in written) / packing.MIB
        print(f"{len(written)} files, {total:.1f} MiB in {to}; on the other machine run `effuse unpack {to} --out RUN`")


@app.command()
def unpack(
    folder: Annotated[Path, typer.Argument(help="The folder that `effuse pack` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run folder to create.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Restore a packed run, so that `effuse resume` can continue it."""
    run = packing.unpack(folder, out)
    if as_json:
        print(json.dumps({"run": str(run)}))
    elif not quiet:
        print(f"the run is in {run}; continue it with `effuse resume {run}`")
