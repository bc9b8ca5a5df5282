"""`effuse resume`: go on with a run that was interrupted."""

import json
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Quiet, RunPath
from effuse.cli.progress import show_result, watched
from effuse.engines import driver


@app.command()
def resume(
    run: RunPath,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; by default the one it started on.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with RUN from its last checkpoint, to the same end as if it had never stopped."""
    with watched(run, as_json, quiet) as observer:
        result = driver.resume(run, device=device, observer=observer)
    if as_json:
        print(json.dumps({"run": str(run)} | result))
    elif not quiet:
        show_result(result, run)
