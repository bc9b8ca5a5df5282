"""`effuse worth`: should this site take part?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath, Settings
from effuse.cli.progress import console, watched
from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.tools.worth import worth


@app.command("worth")
def worth_(
    run: RunPath,
    data: Annotated[
        str | None, typer.Option(help="The site's data, such as 'folder(\"scans\")'; by default the recipe's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write; only you can read it.")] = Path("worth"),
    metrics: Annotated[str | None, typer.Option(help="Metrics instead of the recipe's.")] = None,
    set: Settings = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on one site's data alone, and compare that model with RUN's on the site's own test images."""
    settings = [*([f"evaluate.metrics={metrics}"] if metrics else []), *(set or [])]
    source = None if data is None else build_text(data, Source, "--data")
    with watched(out / "run", as_json, quiet) as observer:
        found = worth(run, source, out, settings, device=device, observer=observer)
    if as_json:
        print(
            json.dumps([{"metric": c.metric, "federated": c.federated, "alone": c.alone, "better": c.better} for c in found])
        )
    elif not quiet:
        table = Table(title="on this site's test images", title_justify="left")
        for column in ("metric", "federated", "alone", "better"):
            table.add_column(column, justify="left" if column in ("metric", "better") else "right")
        for c in found:
            table.add_row(c.metric, f"{c.federated:.4g}", f"{c.alone:.4g}", c.better)
        console().print(table)
        print(f"one seed, one site: {out / 'worth.json'} has the protocols")
