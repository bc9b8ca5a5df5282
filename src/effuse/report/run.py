"""A run folder in Python: flat records, charts and pages."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from effuse.core.errors import RunError, nearest
from effuse.report.charts import Point, Series, chart, standalone
from effuse.report.facts import Facts, grids_of, read_facts
from effuse.report.html import picture, table, text
from effuse.report.page import first_numbers, verdict
from effuse.report.people import client_rows
from effuse.report.writer import write_report
from effuse.runs.records import Result


@dataclasses.dataclass(frozen=True, repr=False)
class Chart:
    """A chart as SVG; a notebook shows it."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.svg)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, finished or not: `Run("runs/a")`."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @functools.cached_property
    def facts(self) -> Facts:
        """All that the folder says, as it was when first asked."""
        return read_facts(self.path)

    @property
    def result(self) -> Result:
        """The result, whose fields are the keys of result.json."""
        if self.facts.result is None:
            raise RunError(f"{self.path} is not finished and has no result yet; finish it with `effuse resume {self.path}`")
        return self.facts.result

    @property
    def metrics(self) -> dict[str, float]:
        return {name: m.value for name, m in self.result.metrics.items()}

    @property
    def weights_sha256(self) -> str:
        return self.result.weights_sha256

    @property
    def rounds(self) -> Any:
        """A row for each round: its loss, time, traffic and metrics. A pandas frame, or a list where pandas is missing."""
        rows = []
        for record, sent in self.facts.sent:
            row: dict[str, Any] = {name: getattr(record, name) for name in ("t", "phase", "federated", "loss", "images")}
            row |= {"seconds": record.seconds.round, "seconds_total": record.seconds.total}
            row |= {"bytes_up": record.traffic.bytes.up, "bytes_down": record.traffic.bytes.down, "bytes_so_far": sent}
            rows.append(row | {"silent": len(record.silent or ())} | dict(record.metrics or {}))
        return _frame(rows)

    @property
    def clients(self) -> Any:
        """A row for each client: its images, traffic, time, last loss, silent rounds and own metrics; as `rounds`."""
        return _frame(client_rows(self.facts))

    def plot(self, name: str = "loss", over: str = "round") -> Chart:
        """A curve of the loss or a metric over rounds, or over `bytes`."""
        measured = {"loss": [(r, s, r.loss) for r, s in self.facts.sent if r.loss is not None]} | self.facts.measured
        if not measured.get(name):
            raise RunError(
                f"{self.path}: there is no curve of {name}; {nearest(name, [k for k, v in measured.items() if v])}"
            )
        if over not in ("round", "bytes"):
            raise RunError(f"over={over!r}: there is no such axis; {nearest(over, ('round', 'bytes'))}")
        points = [Point(r.t + 1 if over == "round" else s, value) for r, s, value in measured[name]]
        return Chart(standalone(chart(name, [Series(name, points)], "round" if over == "round" else "bytes sent")))

    def report(self, *, public: bool = False, nearest: bool = False, out: Path | str | None = None) -> Path:
        """Write the run's page; returns where. `public` leaves out single clients; only `nearest` shows real images."""
        return write_report(self.path, public=public, nearest=nearest, out=None if out is None else Path(out))

    def _repr_html_(self) -> str:
        grids = grids_of(self.path)
        last = picture(grids[-1].path.read_bytes(), f"generated images, round {grids[-1].round}") if grids else ""
        names, values = zip(*first_numbers(self.facts))
        words = f"<p><b>{text(self.path)}</b></p><p>{text(verdict(self.facts))}</p>"
        return f"<div>{words}{table([values], names)}{last}</div>"


def _frame(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
