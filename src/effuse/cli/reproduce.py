"""`effuse reproduce`: run a published table, and show our numbers beside the printed ones."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as Page

from effuse.cli import Interrupted, app
from effuse.cli.options import Device, Json, Quiet
from effuse.cli.progress import console, watched
from effuse.core.errors import TrainingError
from effuse.recipes import find_table
from effuse.tools.reproduce import Planned, Reproduction


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table's name or call; `effuse list` shows them.")],
    only: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...", help="Only the cells with these labels; repeat a key to select several of its values."
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="The scale of the runs, such as smoke; by default the published one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the cells' runs; by default runs/TABLE-SCALE.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the finished results without running anything.")] = False,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the cells of TABLE one after another. Repeat the command to resume; start it several times to share the cells."""
    name, found = find_table(table)
    silent = as_json or quiet
    word = re.sub(r"[^\w.]+", "-", table).strip("-")  # with its arguments: two profiles are two tables
    again = Reproduction(name, found, out or Path("runs") / f"{word}-{found.scale(scale)[0]}", scale)
    chosen = [] if show else again.select(only)

    def show_line(line: str) -> None:
        if not silent:
            console().print(line, soft_wrap=True)

    def complete(i: int, plan: Planned, wait: bool) -> bool:
        show_line(f"cell {i} of {len(chosen)}: {plan.cell.name}")
        try:
            with watched(plan.folder.path, as_json, quiet) as observer:
                completed = again.complete(plan, device, observer, wait)
        except Interrupted:
            raise Interrupted("repeat the command to resume") from None
        row = again.row(plan)
        beside = f"printed {_printed(row)}" + ("" if again.scale.comparable else " (not comparable)")
        show_line(
            f"{row['name']}: {row['metric']} {_ours(row)}, {beside}"
            if completed
            else f"{row['name']}: skipped, another process is running it"
        )
        return completed

    skipped = [(i, plan) for i, plan in enumerate(chosen, start=1) if not complete(i, plan, wait=False)]
    for i, plan in skipped:  # the other process may have died
        complete(i, plan, wait=True)
    report = again.report(only if show else None)
    if as_json:
        print(json.dumps(report))
    elif not quiet:
        show_table(report)
    failed = [row for row in (again.row(plan) for plan in chosen) if row["state"] == "failed"]
    if failed:
        names = ", ".join(row["name"] for row in failed)
        raise TrainingError(
            f"{names}: {failed[0]['note']}; a cell that diverged runs again only after its folder is removed"
        )


def show_table(report: dict[str, Any]) -> None:
    """Print every cell, including those that were not run."""
    rows = report["cells"]
    page = _page(report["title"])
    also = list(dict.fromkeys(metric for row in rows for metric in row["also"]))
    metrics = dict.fromkeys(row["metric"] for row in rows)
    for label in rows[0]["labels"]:
        page.add_column(label, no_wrap=True)
    beside = list(dict.fromkeys(name for row in rows for name in row["beside"]))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"printed": _printed, "ours": _ours}
    columns |= {metric: _number_in("also", metric) for metric in also}
    columns |= {f"{name}, printed": _number_in("beside", name) for name in beside}
    columns |= {
        "MB sent": lambda row: _number(row.get("bytes_sent"), 1e-6),
        "s": lambda row: _number(row.get("round_seconds")),
    }
    shown = {name: cells for name, cell in columns.items() if {*(cells := [cell(row) for row in rows])} != {"-"}}
    for column in shown:
        page.add_column(column, justify="right", overflow="fold")
    for i, row in enumerate(rows):
        page.add_row(*map(str, row["labels"].values()), *(cells[i] for cells in shown.values()))
    console().print(page)
    if report["means"]:
        console().print(_means(report["means"], report["against"]))
    owners = "; ± over clients that own their models" if any(row["ours_spread"] is not None for row in rows) else ""
    console().print(f"ours: {', '.join(metrics)}{owners}", soft_wrap=True)
    for row in rows:
        if row["note"]:
            console().print(f"{row['name']}: {row['state']}, {row['note']}", soft_wrap=True)
    if not report["comparable"]:
        console().print(f"scale {report['scale']}: ours are not comparable with the printed numbers", soft_wrap=True)
    written = "runs and table.json" if Path(report["out"], "table.json").exists() else "runs"
    console().print(f"{written} are in {report['out']}", soft_wrap=True)


def _page(title: str) -> Page:
    return Page(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)  # tables have many columns


def _means(means: list[dict[str, Any]], against: str | None) -> Page:
    """One row for the cells that differ in the repeated label only."""
    page = _page("mean ± standard deviation")
    for label in means[0]["labels"]:
        page.add_column(label, no_wrap=True)
    also = list(dict.fromkeys(metric for row in means for metric in row["also"]))
    printed = any(row["printed"] is not None for row in means)
    for column in (*(["printed"] if printed else []), "ours", *([f"minus {against}"] if against else []), *also, "runs"):
        page.add_column(column, justify="right", overflow="fold")
    for row in means:
        numbers = [*([_number(row["printed"])] if printed else []), _mean(row)]
        numbers += [_mean(row["difference"])] if against else []
        numbers += [_mean(row["also"].get(metric, {})) for metric in also]
        page.add_row(*map(str, row["labels"].values()), *numbers, f"{row['done']} of {row['of']}")
    return page


def _mean(row: dict[str, Any]) -> str:
    """A mean, rounded to the second digit of its standard deviation."""
    std = row.get("std")
    if not std:
        return _number(row.get("mean")) + ("" if std is None else " ± 0")
    digits = max(0, 1 - math.floor(math.log10(std)))
    return f"{row['mean']:.{digits}f} ± {std:.{digits}f}"


def _printed(row: dict[str, Any]) -> str:
    return _number(row["printed"]) + ("" if row["printed_spread"] is None else f" ± {_number(row['printed_spread'])}")


def _ours(row: dict[str, Any]) -> str:
    if row["state"] != "done":
        return str(row["state"])
    return _number(row["ours"]) + ("" if row["ours_spread"] is None else f" ± {_number(row['ours_spread'])}")


def _number_in(part: str, name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _number(row[part].get(name))


def _number(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value * unit:.4g}"
