"""`effuse resume`: continue an interrupted run."""

from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Profiled, Quiet, RunPath, Track, Workers
from effuse.cli.progress import tell, watched
from effuse.report.writer import Reporting
from effuse.runs import driver
from effuse.runs.profile import profiled


@app.command()
def resume(
    run: RunPath,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: auto, cpu or cuda; by default as the run started.")
    ] = None,
    workers: Workers = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    profile: Profiled = False,
) -> None:
    """Continue RUN from its last checkpoint; the result is the same as without the interruption."""
    with watched(run, as_json, quiet, track=track) as observer, profiled(run, profile) as spans:
        result = driver.resume(run, device=device, workers=workers, observer=Reporting(observer))
    tell(result, run, spans, as_json, quiet)
