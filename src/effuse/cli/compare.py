"""`effuse compare`: several runs in one table and on one page."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Json, Quiet
from effuse.cli.progress import console
from effuse.core.errors import shown
from effuse.report.compare import cells, comparison
from effuse.report.facts import read_facts
from effuse.report.writer import save


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    by: Annotated[str | None, typer.Option(help="The metric that sorts; by default the first that all runs have.")] = None,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("compare.html"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare runs: a sorted table, quality against traffic, and samples side by side, on one page."""
    page, rows = comparison([read_facts(run) for run in runs], by)
    save(out, page, private=True)
    if as_json:
        print(json.dumps({"page": str(out), "runs": rows}))
    elif not quiet:
        table = Table(box=SIMPLE_HEAD, padding=0)
        body, head = cells(rows)
        for i, name in enumerate(head):
            table.add_column(shown(name), justify="left" if i < 2 else "right", overflow="fold")
        for row in body:
            table.add_row(*(shown(str(cell)) for cell in row))
        console().print(table)
        print(f"the page is {out}")
