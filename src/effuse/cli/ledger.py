"""`effuse ledger`: how much privacy all runs together have cost a site's data."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Json
from effuse.cli.progress import console
from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.core.errors import RecipeError, RunError
from effuse.core.privacy import Budget
from effuse.privacy.ledger import Entry, Ledger, ledger_path


@app.command()
def ledger(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The ledger; by default that of --data.")] = None,
    data: Annotated[str | None, typer.Option(help="The site's data, as for `effuse join`.")] = None,
    delta: Annotated[float, typer.Option(help="The delta at which the spend is computed.")] = 1e-5,
    as_json: Json = False,
) -> None:
    """Print what all runs have charged a site's data, and the epsilon that it composes to."""
    if (file is None) == (data is None):
        raise RecipeError("give either the ledger's FILE or --data, such as --data 'folder(\"scans\")'")
    if not 0 < delta < 1:
        raise RecipeError(f"--delta {delta}: it must lie between 0 and 1")
    path = file or ledger_path(build_text(data or "", Source, "--data").load("train").digest)
    if not path.is_file():
        raise RunError(f"{path}: there is no such ledger, so nothing has been charged under this name")
    book = Ledger(path, Budget(epsilon=1.0, delta=delta))  # the cap is not looked at
    entries, epsilon = book.entries(), book.spent()[0]
    if as_json:
        charges = [dataclasses.asdict(entry) for entry in entries]
        print(json.dumps({"ledger": str(path), "epsilon": epsilon, "delta": delta, "charges": charges}))
    else:
        show(path, entries)
        print(f"all of it composes to epsilon {epsilon:.4g} at delta {delta:g}")


def show(path: Path, entries: list[Entry]) -> None:
    """Print a table of charges."""
    table = Table(title=str(path), title_justify="left")
    for name in ("time", "run", "what", "protects", "releases"):
        table.add_column(name)
    for entry in entries:
        said = ", ".join(
            f"{r.what}: {r.kind} {r.noise:.4g}" + (f", {r.steps} steps of rate {r.rate:.4g}" if r.steps > 1 else "")
            for r in entry.releases
        )
        table.add_row(entry.time, entry.run[:12], entry.what, f"each {entry.unit}", said)
    console().print(table)
