"""What became of every run in a folder, round by round, as one table of comma-separated values, and as a picture.

    python tools/curves.py runs/TABLE --csv curves.csv --png curves.png --metric fid --cells '*-0'

Images trained on, seconds and bytes are sums up to and including a round. Seconds are those of rounds alone, without evaluation and
checkpoints.
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
    """A row for every round of a run."""
    found: list[Row] = []
    images, seconds, sent = 0, 0.0, 0
    for record in run.each_record():
        images += record.images
        seconds += record.seconds.round
        sent += record.traffic.bytes.total
        told = (run.path.name, record.federated, record.phase, images, record.loss, seconds, sent)
        found.append({**dict(zip(FIXED, told)), **(record.metrics or {})})
    if found and run.result.exists():  # a cell that took over another's training was looked at when its rounds were written
        found[-1] = {name: m.value for name, m in run.read_result().metrics.items()} | found[-1]
    return found


def rows_in(folder: Path, cells: str = "*") -> list[Row]:
    """The rows of every run that lies in a folder, or of those whose names match."""
    return [row for path in sorted(folder.glob(f"{cells}/rounds.jsonl")) for row in rows_of(RunFolder(path.parent))]


def write(rows: list[Row], file: TextIO) -> None:
    metrics = sorted({name for row in rows for name in row} - set(FIXED))
    table = csv.DictWriter(file, (*FIXED, *metrics), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def curves(rows: list[Row], metric: str) -> Iterator[tuple[str, list[int], list[float]]]:
    """Of every cell that was looked at more than once: the federated rounds after which it was, and what was seen."""
    federated = [row for row in rows if row["round"] and row.get(metric) is not None]  # a warm-up's loss is on no such axis
    for cell in dict.fromkeys(row["cell"] for row in federated):
        seen = [(row["round"], row[metric]) for row in federated if row["cell"] == cell]
        if len(seen) > 1:
            yield cell, *map(list, zip(*seen))


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
    parser.add_argument("folder", type=Path, help="the folder of a table, or any that has runs in it")
    parser.add_argument("--csv", type=Path, help="where to write the rows; to standard output if neither file is named")
    parser.add_argument("--png", type=Path, help="where to draw a metric over rounds")
    parser.add_argument("--metric", default="fid", help="which one to draw")
    parser.add_argument("--cells", default="*", help="a pattern for the names of runs, such as '*-shard-0'")
    asked = parser.parse_args()
    rows = rows_in(asked.folder, asked.cells)
    if not rows:
        which = "" if asked.cells == "*" else f" called {asked.cells}"
        sys.exit(f"{asked.folder}: no run in it{which} has a round; name the folder that `effuse reproduce` wrote")
    if asked.png and not any(curves(rows, asked.metric)):
        known = sorted({name for row in rows for name in row} - set(FIXED))
        sys.exit(f"--metric {asked.metric}: no run was looked at twice by it; there are {', '.join([*known, 'loss'])}")
    if asked.csv:
        with open(asked.csv, "w") as file:
            write(rows, file)
    if asked.png:
        draw(rows, asked.metric, asked.png)
    if not asked.csv and not asked.png:
        write(rows, sys.stdout)


if __name__ == "__main__":
    main()
