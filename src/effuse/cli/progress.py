"""Show the progress and the result of a run."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from effuse.cli import Interrupted
from effuse.core.algorithm import FEDERATE
from effuse.core.machine import Meter
from effuse.core.metric import Measurement
from effuse.core.recipe import Recipe
from effuse.core.spans import Profile
from effuse.runs.observer import Observer
from effuse.runs.records import Result, RoundRecord

BAR = 24


def amount(size: float) -> str:
    """Bytes with a unit, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return ""


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def console() -> Console:
    """A console without markup, so that [fid()] prints as it is, and without wrapping in files."""
    page = Console(markup=False, emoji=False, highlight=False)
    if not page.is_terminal and "COLUMNS" not in os.environ:
        page.width = 1000
    return page


@contextlib.contextmanager
def watched(
    folder: Path, as_json: bool, quiet: bool, resume: str = "effuse resume", warnings: Sequence[str] = ()
) -> Iterator[Observer]:
    """Show the progress of a run, unless silent; after Ctrl-C say how to continue it."""
    with Observer() if as_json or quiet else Display() as observer:
        for words in warnings:
            observer.said(f"warning: {words}")
        try:
            yield observer
        except KeyboardInterrupt:
            started = (folder / "manifest.json").exists()
            raise Interrupted(f"`{resume} {folder}` goes on from the last checkpoint" if started else "") from None


@contextlib.contextmanager
def drawing(meter: Meter, silent: bool) -> Iterator[None]:
    """Show the progress of a long draw on a terminal."""
    page = console()
    if silent or not page.is_terminal:
        yield
        return
    began = time.monotonic()
    with page.status("drawing") as status:

        def show() -> None:
            rate = meter.evaluations / max(1e-9, time.monotonic() - began)
            status.update(f"drawing: {meter.evaluations:,} network evaluations, {rate:,.0f} a second")

        meter.watcher = show
        yield


class Display(Observer):
    """A live line with round, loss, images per second, traffic and time left; without a terminal, one line per round."""

    def __init__(self) -> None:
        self.console = console()
        self.live = (
            Live("", console=self.console, refresh_per_second=8, transient=True) if self.console.is_terminal else None
        )
        self.rounds = self.done = self.first = 0
        self.loss: float | None = None
        self.traffic = 0
        self.words = "starting"
        self.meter = Meter()
        self.began = self.last = time.monotonic()
        self.rate = 0.0
        self.images = 0

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live:
            self.live.stop()

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        self.rounds, self.first, self.done, self.meter, self.traffic = recipe.rounds, first, first, meter, traffic
        self.began = self.last = time.monotonic()
        self.words = "training"
        meter.watcher = self._refresh
        rounds = f"{recipe.rounds} round{'s' * (recipe.rounds > 1)}"
        start = f"from round {first + 1} of {rounds}" if first else rounds
        self._say(f"{recipe.algorithm.name}, {recipe.clients} clients, {start}, into {folder}")
        self._refresh(force=True)

    def phase(self, words: str) -> None:
        self.words = words
        self._refresh(force=True)

    def replied(self, t: int, client: int, loss: float | None) -> None:
        self.loss, self.words = (self.loss if loss is None else loss), f"round {t + 1}, client {client} done"
        self._refresh(force=True)

    def said(self, words: str) -> None:
        self._say(words)

    def closed(self, record: RoundRecord) -> None:
        self.done = record.federated
        self.loss = record.loss if record.loss is not None else self.loss
        self.traffic += record.traffic.bytes.total
        self.words = "training"
        if self.live is None or record.metrics is not None:
            metrics = "".join(f", {name} {value:.4g}" for name, value in (record.metrics or {}).items())
            loss = "" if record.loss is None else f", loss {record.loss:.4f}"
            place = f"round {self.done}/{self.rounds}" if record.phase == FEDERATE else record.phase
            seconds = max(1e-9, record.seconds.round)
            # images are 0 if no client trained, and unknown at remote sites
            speed = f", {record.images / seconds:,.0f} images/s" if record.images else ""
            if record.evaluations and record.phase != FEDERATE and not record.images:
                speed = f", {record.evaluations / seconds:,.0f} network evaluations/s"
            self._say(f"{place}{loss}{speed}, {amount(self.traffic)} sent so far{metrics}")
        self._refresh(force=True)

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def _refresh(self, force: bool = False) -> None:
        now = time.monotonic()
        if self.live is None or (not force and now - self.last < 0.1):
            return
        if now - self.last >= 0.1:
            self.rate = 0.8 * self.rate + 0.2 * (self.meter.images - self.images) / (now - self.last)
            self.images, self.last = self.meter.images, now
        spent = now - self.began
        left = duration(spent / (self.done - self.first) * (self.rounds - self.done)) if self.done > self.first else "?"
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        rate = f"  {self.rate:,.0f} images/s" if self.rate >= 1 else ""
        facts = f" {self.done}/{self.rounds}{loss}{rate}  {amount(self.traffic)}  {duration(spent)} elapsed, {left} left"
        # only one line can be erased afterwards, so leave room for the ^C that a terminal prints
        room = self.console.width - 3
        width = max(0, min(BAR, room - len(facts)))
        filled = int(width * self.done / max(1, self.rounds))
        self.live.update(("━" * filled + "╌" * (width - filled) + facts + f"  {self.words}")[:room])


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
