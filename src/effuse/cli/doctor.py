"""`effuse doctor`: what this machine has, and what to do about the rest."""

import dataclasses
import json
from pathlib import Path

from rich.table import Table

from effuse.cli import app
from effuse.cli.display import console
from effuse.cli.options import Json


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look for devices, versions, data and encoder files and free disk, and say what to do about what is missing."""
    from effuse.tools.doctor import examine

    found = examine(Path("runs"))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found]))
        return
    table = Table(title="effuse on this machine", title_justify="left")
    for column in ("what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(finding.what, finding.found, finding.remedy or "")
    console().print(table)
