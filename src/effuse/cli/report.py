"""`effuse report`: a run as one page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json, Quiet, RunPath
from effuse.report.writer import write_report


@app.command()
def report(
    run: RunPath,
    public: Annotated[
        bool,
        typer.Option("--public", help="A page that may be passed on, without single clients; writes RUN/public.html."),
    ] = False,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Show the audit's real images too; writes RUN/audit/private/report.html."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The file of the page; by default report.html in the run folder.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page of RUN, finished or not: samples, curves, partition, traffic, clients, privacy and cost in one file."""
    path = write_report(run, public=public, nearest=nearest, out=out)
    if as_json:
        print(json.dumps({"run": str(run), "page": str(path)}))
    elif not quiet:
        print(f"the page is {path}" + ("" if public else "; only you can read it, and --public writes one to pass on"))
