"""`effuse release`: publish what a run made, with what was measured and what was not."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath
from effuse.core.build import build_text
from effuse.core.metric import Metric
from effuse.tools.release import STATEMENTS, release


@app.command("release")
def release_(
    run: RunPath,
    to: Annotated[Path, typer.Option(help="The folder to write; it must be new or empty.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Number of images, where the server keeps none.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same images.")] = 0,
    name: Annotated[str, typer.Option(help="What the release is called.")] = "",
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics of the released images instead of the recipe's, such as '\\[kid(n=1000), cas(n=1000)]'."),
    ] = None,
    license: Annotated[str, typer.Option(help=STATEMENTS["license"])] = "",
    contact: Annotated[str, typer.Option(help=STATEMENTS["contact"])] = "",
    purpose: Annotated[str, typer.Option(help=STATEMENTS["purpose"])] = "",
    limits: Annotated[str, typer.Option(help=STATEMENTS["limits"])] = "",
    source: Annotated[str, typer.Option(help=STATEMENTS["source"])] = "",
    basis: Annotated[str, typer.Option(help=STATEMENTS["basis"])] = "",
    url: Annotated[str, typer.Option(help=STATEMENTS["url"])] = "",
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write RUN's images, model, documents and release report to a folder that can be published."""
    said = {"license": license, "contact": contact, "purpose": purpose, "limits": limits}
    said |= {"source": source, "basis": basis, "url": url}
    chosen = None if metrics is None else build_text(metrics, tuple[Metric, ...], "--metrics")
    made = release(
        run, to, n=n, seed=seed, name=name, metrics=chosen, stated={k: v for k, v in said.items() if v}, device=device
    )
    if as_json:
        print(json.dumps({"written": str(made.folder), "images": made.held.images, "not_measured": list(made.missing)}))
    elif not quiet:
        print(f"{made.held.images:,} images and the model in {made.folder}; read {made.folder / 'report.html'} first")
        if made.held.note:
            print(f"note: {made.held.note}")
        print(f"not measured: {len(made.missing)}")
        for words in made.missing:
            print(f"  {words}")
