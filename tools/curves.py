"""Write the rounds of all runs in a folder as one CSV table, or plot a metric over rounds.

    python tools/curves.py runs/TABLE --csv curves.csv --png curves.png --metric fid --cells '*-0'

Images trained on, seconds and bytes are sums up to and including a round. Seconds exclude evaluation and checkpoints.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from effuse.runs.folder import RunFolder

FIXED = ("cell", "round", "phase", "images", "loss", "seconds", "bytes")
COLOURS, STYLES = 10, ("-", "--", ":", "-.")
Row = dict[str, Any]


def rows_of(run: RunFolder) -> list[Row]:
    """One row per round of a run."""
    found: list[Row] = []
    images, seconds, sent = 0, 0.0, 0
    for record in run.each_record():
        images += record.images
        seconds += record.seconds.round
        sent += record.traffic.bytes.total
        values = (run.path.name, record.federated, record.phase, images, record.loss, seconds, sent)
        found.append({**dict(zip(FIXED, values)), **(record.metrics or {})})
    if found and run.result.exists():  # a run that copied another run's rounds is evaluated only at the end
        found[-1] = {name: m.value for name, m in run.read_result().metrics.items()} | found[-1]
    return found


def rows_in(folder: Path, cells: str = "*") -> list[Row]:
    """The rows of all runs in a folder whose names match."""
    return [row for path in sorted(folder.glob(f"{cells}/rounds.jsonl")) for row in rows_of(RunFolder(path.parent))]


def write(rows: list[Row], file: TextIO) -> None:
    metrics = sorted({name for row in rows for name in row} - set(FIXED))
    table = csv.DictWriter(file, (*FIXED, *metrics), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def curves(rows: list[Row], metric: str) -> Iterator[tuple[str, list[int], list[float]]]:
    """For every cell with several evaluations: its name, the evaluated federated rounds, and the values."""
    federated = [row for row in rows if row["round"] and row.get(metric) is not None]  # skip warm-up phases
    for cell in dict.fromkeys(row["cell"] for row in federated):
        points = [(row["round"], row[metric]) for row in federated if row["cell"] == cell]
        if len(points) > 1:
            yield cell, *map(list, zip(*points))


def draw(rows: list[Row], metric: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for i, (cell, rounds, values) in enumerate(curves(rows, metric)):
        axes.plot(
            rounds, values, STYLES[i // COLOURS % len(STYLES)], color=f"C{i % COLOURS}", marker="o", markersize=3, label=cell
        )
    axes.set(xlabel="federated rounds", ylabel=metric, yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder that contains runs, such as that of a table")
    parser.add_argument("--csv", type=Path, help="the table to write; without --csv and --png, rows go to standard output")
    parser.add_argument("--png", type=Path, help="the plot to write")
    parser.add_argument("--metric", default="fid", help="the metric to plot")
    parser.add_argument("--cells", default="*", help="a pattern for the names of runs, such as '*-shard-0'")
    options = parser.parse_args()
    rows = rows_in(options.folder, options.cells)
    if not rows:
        which = "" if options.cells == "*" else f" called {options.cells}"
        sys.exit(f"{options.folder}: no run{which} with a finished round; name the folder that `effuse reproduce` wrote")
    if options.png and not any(curves(rows, options.metric)):
        known = sorted({name for row in rows for name in row} - set(FIXED))
        sys.exit(f"--metric {options.metric}: no run has two values of it; valid: {', '.join([*known, 'loss'])}")
    if options.csv:
        with open(options.csv, "w") as file:
            write(rows, file)
    if options.png:
        draw(rows, options.metric, options.png)
    if not options.csv and not options.png:
        write(rows, sys.stdout)


if __name__ == "__main__":
    main()
