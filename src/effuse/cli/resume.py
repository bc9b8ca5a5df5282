"""`effuse resume`: go on with a run that was interrupted."""

import json
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Quiet, RunPath
from effuse.cli.progress import Display, show_result
from effuse.engines import driver
from effuse.engines.observer import Observer


@app.command()
def resume(
    run: RunPath,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; by default the one it started on.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its last checkpoint, to the same end as if it had never stopped."""
    with Observer() if as_json or quiet else Display() as observer:
        result = driver.resume(run, device=device, observer=observer)
    if as_json:
        print(json.dumps({"run": str(run)} | result))
    elif not quiet:
        show_result(result, run)
