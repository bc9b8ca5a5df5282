"""`effuse partition`: who would hold what, before anything runs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from effuse.cli import app
from effuse.cli.options import Clients, Data, Json, Quiet, RecipeName, Seed, Settings, chosen
from effuse.cli.progress import console
from effuse.core.errors import shown
from effuse.report.heat import shade
from effuse.report.partition import Division
from effuse.report.writer import save

SHADES = (
    "dim",
    "",
    "on grey23",
    "black on grey50",
    "black on grey70",
    "black on grey93",
)  # of a cell, from few to many images


@app.command()
def partition(
    recipe: RecipeName,
    set: Settings = None,
    data: Data = None,
    clients: Clients = None,
    seed: Seed = None,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("partition.html"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Divide RECIPE's data and draw who would hold what: a table here, and a page."""
    name, wanted, _ = chosen(recipe, set, None, seed, clients, data)
    division = Division.of(wanted, name)
    save(out, division.page(), private=True)
    if as_json:
        print(json.dumps({"page": str(out), "classes": division.classes} | division.split.to_json()))
    elif not quiet:
        console().print(drawn(division))
        print(f"the page is {out}")


def drawn(division: Division) -> Table:
    """The partition as a table; the more images, the lighter a cell."""
    labels, groups = division.split.labels, division.split.groups
    table = Table(title=f"partition of {shown(division.name)}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("client", "images", *(["groups"] if groups else []), *division.classes):
        table.add_column(Text(shown(name)), justify="right")
    most = max((n for row in labels for n in row), default=1) or 1
    for client, row in enumerate(labels):
        own = [f"{groups[client]:,}"] if groups else []
        table.add_row(str(client), f"{sum(row):,}", *own, *(Text(f"{n:,}", SHADES[shade(n, most)]) for n in row))
    return table
