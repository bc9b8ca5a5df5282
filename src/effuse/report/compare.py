"""Several runs on one page: a sorted table, quality against traffic, grids side by side, and a paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effuse.core.errors import RunError, nearest
from effuse.report.charts import Point, Series, chart
from effuse.report.facts import Facts, grids_of, rank, readable
from effuse.report.html import Cell, document, paragraph, picture, section, table, text
from effuse.report.words import amount, duration, number

PICTURES = 5_000_000  # bytes of pictures in a page
FALLS = ("fid", "kid", "loss")  # metrics of which less is better


def run_row(facts: Facts) -> dict[str, Any]:
    """A run as a flat record."""
    found = {name: values[-1][2] for name, values in facts.measured.items()}
    if facts.result is not None:
        found |= {name: m.value for name, m in facts.result.metrics.items()}
    losses = [record.loss for record in facts.records if record.loss is not None]
    row: dict[str, Any] = {"run": facts.path.name, "algorithm": facts.algorithm, "clients": facts.count("clients")}
    row |= {"rounds": facts.rounds, "loss": losses[-1] if losses else None} | found
    row["bytes"] = facts.sent[-1][1] if facts.sent else 0
    row["seconds"] = sum(record.seconds.round for record in facts.records)
    if facts.result is not None and facts.result.privacy is not None:
        row["epsilon"] = facts.result.privacy["epsilon"]
    return row


def sorted_rows(rows: Sequence[Mapping[str, Any]], by: str | None) -> tuple[list[Mapping[str, Any]], str]:
    """The rows, best first, and the metric that decides: the one that is named, or the first that all have."""
    fixed = ("run", "algorithm", "clients", "rounds", "bytes", "seconds", "epsilon")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    metrics = sorted((key for key in keys if key not in fixed and key != "loss"), key=rank)
    if by is not None and by not in keys:
        raise RunError(f"--by {by}: no run has it; {nearest(by, keys)}")
    shared = [key for key in metrics if all(row.get(key) is not None for row in rows)]
    by = by or next(iter([*shared, *metrics]), "loss")
    known = [row for row in rows if row.get(by) is not None]
    rises = not by.startswith(FALLS) and by not in fixed
    ordered = sorted(known, key=lambda row: row[by], reverse=rises and not isinstance(known[0][by], str))
    return [*ordered, *(row for row in rows if row.get(by) is None)], by


def comparison(runs: Sequence[Facts], by: str | None = None) -> tuple[str, list[Mapping[str, Any]]]:
    """The page of several runs, and its rows."""
    names = [facts.path.name for facts in runs]
    shared = len(set(names)) < len(names)
    made = []
    for facts in runs:
        with readable(facts.path):
            made.append(run_row(facts) | ({"run": str(facts.path)} if shared else {}))
    rows, by = sorted_rows(made, by)
    parts = [
        "<h1>Runs compared</h1>",
        paragraph(f"{len(rows)} runs, by {by}. A heading sorts the table by its column.", "verdict"),
        section("Table", table(*cells(rows), "runs")),
        section("Quality against traffic", against_traffic(rows, by)),
        section("Curves", curves(runs, [row["run"] for row in made], by)),
        section("Samples", side_by_side({row["run"]: facts.path for row, facts in zip(made, runs)})),
    ]
    return document("effuse: runs compared", parts, interactive=True), rows


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[list[object]], list[str]]:
    """Cells and headings of flat records."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    words = {"bytes": amount, "seconds": duration}
    return [[_cell(row.get(key), words.get(key, number)) for key in keys] for row in rows], [
        "sent" if k == "bytes" else k for k in keys
    ]


def against_traffic(rows: Sequence[Mapping[str, Any]], by: str) -> str:
    """A point for every run."""
    known = [row for row in rows if isinstance(row.get(by), (int, float))]
    points = [
        Series(str(row["run"]), [Point(row["bytes"], row[by], f"{amount(row['bytes'])} sent")], line=False) for row in known
    ]
    return _wide(chart(f"{by} against traffic", points, "bytes sent"))


def curves(runs: Sequence[Facts], names: Sequence[str], by: str) -> str:
    """The metric, or else the loss, of every run over rounds."""
    series = []
    for facts, name in zip(runs, names):
        found = [Point(r.federated, v) for r, _, v in facts.measured.get(by, [])]
        losses = [Point(r.federated, r.loss) for r in facts.records if r.loss is not None]
        series.append(Series(name, losses if by == "loss" else found))
    return _wide(chart(by, [s for s in series if s.points], "round"))


def side_by_side(runs: Mapping[str, Path]) -> str:
    """The last grid of every run, as far as there is room."""
    left, figures = PICTURES, []
    for name, run in runs.items():
        grids = grids_of(run)
        last = next((grid for grid in grids if grid.round == grids[-1].round), None)
        if last is None or (size := last.path.stat().st_size) > left:
            continue
        left -= size
        words = f"{name}, round {last.round}"
        shown = picture(last.path.read_bytes(), f"generated images of {words}")
        figures.append(f"<figure>{shown}<figcaption>{text(words)}</figcaption></figure>")
    return f'<div class="pictures side">{"".join(figures)}</div>' if figures else ""


def table_page(report: Mapping[str, Any]) -> str:
    """The page of a reproduced table: the paper's numbers beside ours."""
    rows = report["cells"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    flat = [_table_row(row) for row in rows]
    beside = "may be compared" if report["comparable"] else "cannot be compared"
    scale = f"At scale {report['scale']}, ours {beside} with the printed numbers."
    done = sum(row["state"] == "done" for row in rows)
    points = [
        Series(row["name"], [Point(row["bytes_sent"], row["ours"], f"{amount(row['bytes_sent'])} sent")], line=False)
        for row in rows
        if row["ours"] is not None and row.get("bytes_sent") is not None
    ]
    parts = [
        f"<h1>{text(report['title'])}</h1>",
        paragraph(f"{done} of {len(rows)} cells are done. {scale} Ours: {', '.join(metrics)}.", "verdict"),
        section("Table", table(*cells(flat), "printed numbers beside ours")),
        section("Means", table(*cells([_mean_row(row) for row in report["means"]]), "means") if report["means"] else ""),
        section("Quality against traffic", _wide(chart("ours against traffic", points, "bytes sent"))),
        section("Samples", side_by_side({row["name"]: Path(row["run"]) for row in rows})),
    ]
    return document(f"effuse: {report['table']}", parts, interactive=True)


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A cell of a reproduced table as a flat record."""
    flat: dict[str, Any] = {key: str(value) for key, value in row["labels"].items()} | {"state": row["state"]}
    flat |= {"printed": row["printed"], "ours": row["ours"]} | row["also"]
    flat |= {f"{name}, printed": value for name, value in row["beside"].items()}
    return flat | {"bytes": row.get("bytes_sent"), "seconds": row.get("round_seconds")}


def _mean_row(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {key: str(value) for key, value in row["labels"].items()}
    return flat | {
        "printed": row["printed"],
        "ours": row["mean"],
        "deviation": row["std"],
        "runs": f"{row['done']} of {row['of']}",
    }


def _cell(value: Any, words: Any) -> object:
    if value is None:
        return "-"
    if isinstance(value, str) or (isinstance(value, int) and words is number):
        return value
    return Cell(words(value), value)


def _wide(figure: str) -> str:
    return f'<div class="charts">{figure}</div>' if figure else ""
