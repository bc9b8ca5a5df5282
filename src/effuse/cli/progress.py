"""Show the progress and the result of a run."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from effuse.cli import Interrupted
from effuse.cli.display import SILENCE, Display, amount, console, duration, stamped
from effuse.core.machine import Meter
from effuse.core.metric import Measurement
from effuse.core.spans import Profile
from effuse.runs.observer import Observer
from effuse.runs.records import Result
from effuse.runs.trackers import tracked


@contextlib.contextmanager
def watched(
    folder: Path,
    as_json: bool,
    quiet: bool,
    resume: str = "effuse resume",
    warnings: Sequence[str] = (),
    track: Sequence[str] | None = None,
) -> Iterator[Observer]:
    """Show the progress of a run, unless silent; after Ctrl-C say how to continue it."""
    with tracked(track or (), Observer() if as_json or quiet else Display()) as observer:
        for words in warnings:
            observer.said(f"warning: {words}")
        try:
            yield observer
        except KeyboardInterrupt:
            started = (folder / "manifest.json").exists()
            raise Interrupted(f"`{resume} {folder}` goes on from the last checkpoint" if started else "") from None


@contextlib.contextmanager
def drawing(meter: Meter, silent: bool) -> Iterator[None]:
    """Show the progress of a long draw: on a terminal at once, in a pipe from time to time."""
    if silent:
        yield
        return
    page, began = console(), time.monotonic()
    told = began

    def words() -> str:
        rate = meter.evaluations / max(1e-9, time.monotonic() - began)
        return f"drawing: {meter.evaluations:,} network evaluations, {rate:,.0f} a second"

    def say() -> None:
        nonlocal told
        if time.monotonic() - told > SILENCE:
            told = time.monotonic()
            page.print(stamped(words()), soft_wrap=True)

    if not page.is_terminal:
        meter.watcher = say
        yield
        return
    with page.status("drawing") as status:
        meter.watcher = lambda: status.update(words())
        yield


def show_metrics(metrics: Mapping[str, Measurement]) -> None:
    """Print the metrics with their counts and encoders; the full protocols are in result.json."""
    table = Table(title="metrics", title_justify="left")
    table.add_column("name")
    table.add_column("value", justify="right")
    table.add_column("measured on")
    for name, m in metrics.items():
        spread = "" if m.std is None else f" ± {m.std:.4g}"
        table.add_row(name, f"{m.value:.4g}{spread}", "; ".join(filter(None, (_measured(m), m.warning))))
    console().print(table)


def _measured(metric: Measurement) -> str:
    """The essential part of a protocol: the numbers of images, and the encoder."""
    protocol = metric.protocol
    counts = [f"{protocol['generated']:,} generated"] if "generated" in protocol else []
    if "reference" in protocol:
        counts.append(f"{protocol['reference']:,} real ({protocol.get('split', '')})")
    encoder = str(protocol.get("encoder", "")).partition("(")[0]
    return ", ".join([*counts, *([f"by {encoder}"] if encoder else [])])


def tell(result: Result, folder: Path, spans: Profile | None, as_json: bool, quiet: bool) -> None:
    """Print a finished run as JSON, as tables, or not at all."""
    if as_json:
        print(json.dumps({"run": str(folder)} | result.to_json() | ({"profile": spans.report()} if spans else {})))
    elif not quiet:
        show_result(result, folder)
        if spans:
            show_profile(spans.report(), folder)


def show_profile(report: dict[str, Any], folder: Path) -> None:
    """Print where the time went, and how to open the trace."""
    table = Table(title="time", title_justify="left", show_footer=True)
    table.add_column("in", "whole")
    table.add_column("seconds", f"{report['seconds']:.2f}", justify="right")
    table.add_column("share", "100.0 %", justify="right")
    for name, s in report["spans"].items():
        table.add_row(name, f"{s['seconds']:.2f}", f"{100 * s['share']:.1f} %")
    console().print(table)
    console().print(f"{folder / 'trace.json'} opens in Perfetto or chrome://tracing", soft_wrap=True)


def show_result(result: Result, folder: Path) -> None:
    """Print the summary of a finished run."""
    if result.metrics:
        show_metrics(result.metrics)
    table = Table(title="run", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    traffic = result.traffic.bytes
    table.add_row("rounds", str(result.rounds))
    if result.images:  # a server does not know how many images its sites trained on
        table.add_row("images trained", f"{result.images:,}")
    table.add_row("traffic", f"{amount(traffic.up)} up, {amount(traffic.down)} down")
    table.add_row("parameters", f"{result.parameters:,}")
    if result.privacy is not None:
        table.add_row("privacy", promise(result.privacy))
    table.add_row("time", duration(result.seconds))
    table.add_row("weights_sha256", result.weights_sha256)
    grids = sorted((folder / "samples").glob("*.png"))
    if grids:
        table.add_row("samples", str(grids[-1]))
    table.add_row("model", str(folder / "model"))
    if result.pruned:
        table.add_row("note", result.pruned)
    console().print(table)


def promise(plan: dict[str, Any]) -> str:
    """A privacy plan in one sentence."""
    return (
        f"epsilon {plan['epsilon']:.4g} of {plan['budget']:g} at delta {plan['delta']:g} for each {plan['unit']}, which is "
        f"replaced by nothing ({plan['accountant']}); not covered: {plan['not_covered']}"
    )


def show_spread(spread: dict[str, Any], seeds: list[int]) -> None:
    """Print mean and spread over seeds."""
    if not spread:
        console().print("the recipe has no metrics, so seeds cannot be compared")
        return
    table = Table(title=f"over seeds {', '.join(map(str, seeds))}", title_justify="left")
    for column in ("name", "mean", "std", *(f"seed {s}" for s in seeds)):
        table.add_column(column, justify="left" if column == "name" else "right")
    for name, s in spread.items():
        table.add_row(name, f"{s['mean']:.4g}", f"{s['std']:.2g}", *(f"{v:.4g}" for v in s["values"]))
    console().print(table)
