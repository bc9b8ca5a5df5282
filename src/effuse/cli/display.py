"""The progress of a run: a live line on a terminal, and a line a round in pipes and logs."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from effuse.core.algorithm import FEDERATE
from effuse.core.machine import Meter
from effuse.core.recipe import Recipe
from effuse.runs.observer import Observer
from effuse.runs.records import RoundRecord

BAR, SHORTEST_BAR = 24, 4
SILENCE = 20.0  # seconds after which an evaluation is reported in a pipe


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
    """A console without markup, so that [fid()] prints as it is, and without wrapping or live lines in files.

    Only a terminal counts as one: in CI, FORCE_COLOR would let rich write cursor movements into logs.
    """
    force = None if sys.stdout.isatty() else False
    page = Console(markup=False, emoji=False, highlight=False, force_terminal=force)
    if not page.is_terminal and "COLUMNS" not in os.environ:
        page.width = 1000
    return page


def stamped(line: str) -> str:
    """A line of a log, with the time in UTC."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}"


class Display(Observer):
    """A live line with round, loss, images per second, traffic and time left; without a terminal, one line per round."""

    def __init__(self) -> None:
        self.console = console()
        self.rounds = self.done = self.first = self.every = 0
        self.cohort = self.replies = 0  # clients that answer in a round, and that have answered in this one
        self.loss: float | None = None
        self.traffic = 0
        self.words = "starting"
        self.meter = Meter()
        self.began = time.monotonic()
        self.trained = 0.0  # seconds of training before the present activity
        self.since: float | None = None  # since when the run trains; None while it does something else
        self.left: float | None = None  # seconds left, as shown last
        self.waited: tuple[Sequence[int], float] | None = None  # the clients that are waited for, until when
        self.measured = self.told = 0.0  # when the evaluation began, and was last reported in a pipe
        self.calls = self.of = 0  # network evaluations before this evaluation, and in it
        self.last = 0.0  # seconds of the last evaluation
        self.live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self.live = Live(get_renderable=self._line, console=self.console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live:
            self.live.stop()

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        self.rounds, self.first, self.done, self.meter, self.traffic = recipe.rounds, first, first, meter, traffic
        self.began = time.monotonic()
        self.waited = None
        self.cohort, self.every = recipe.clients, recipe.evaluate.every
        meter.watcher = self._tick
        rounds = f"{recipe.rounds} round{'s' * (recipe.rounds > 1)}"
        start = f"from round {first + 1} of {rounds}" if first else rounds
        self._say(f"{recipe.algorithm.name}, {recipe.clients} clients, {start}, into {folder}")
        self.phase("training")

    def phase(self, words: str) -> None:
        if self.since is not None:
            self.trained += time.monotonic() - self.since
        self.since = time.monotonic() if words == "training" else None
        self.words, self.of = words, 0

    def evaluating(self, evaluations: int) -> None:
        self.phase("evaluating")
        self.calls, self.of = self.meter.evaluations, evaluations
        self.measured = self.told = time.monotonic()

    def waiting(self, clients: Sequence[int], until: float) -> None:
        self.waited = (clients, until) if clients else None

    def replied(self, t: int, client: int, loss: float | None) -> None:
        self.loss, self.words = (self.loss if loss is None else loss), f"round {t + 1}, client {client} done"
        self.replies += 1

    def said(self, words: str) -> None:
        self._say(words)

    def closed(self, record: RoundRecord) -> None:
        self.done = record.federated
        self.cohort, self.replies, self.left, self.waited = self.replies or self.cohort, 0, None, None
        self.loss = record.loss if record.loss is not None else self.loss
        self.traffic += record.traffic.bytes.total
        if record.metrics is not None:
            self.last = record.seconds.total - record.seconds.round
        self.phase("training")
        if self.live is None or record.metrics is not None:
            self._say(self._closed(record))

    def _closed(self, record: RoundRecord) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in (record.metrics or {}).items())
        loss = "" if record.loss is None else f", loss {record.loss:.4f}"
        place = f"round {self.done}/{self.rounds}" if record.phase == FEDERATE else record.phase
        seconds = max(1e-9, record.seconds.round)
        # images are 0 if no client trained, and unknown at remote sites
        speed = f", {record.images / seconds:,.0f} images/s" if record.images else ""
        if record.evaluations and record.phase != FEDERATE and not record.images:
            speed = f", {record.evaluations / seconds:,.0f} network evaluations/s"
        left = "" if self.done >= self.rounds or not self.done else f", {self._left()} left"
        return f"{place}{loss}{speed}, {amount(self.traffic)} sent so far{metrics}{left}"

    def _say(self, line: str) -> None:
        self.console.print(line if self.console.is_terminal else stamped(line), soft_wrap=True)

    def _tick(self) -> None:
        """Report a long evaluation where there is no live line."""
        now = time.monotonic()
        if self.live is None and self.of and now - self.told > SILENCE:
            self.told = now
            self._say(f"{self._activity()}, {duration(now - self.measured)} so far")

    def _activity(self) -> str:
        """What the run does, or for whom it waits and until when."""
        if self.waited is not None:
            clients, until = self.waited
            names = ", ".join(map(str, clients[:8])) + ", ..." * (len(clients) > 8)
            end = time.localtime(time.time() + min(until - time.monotonic(), 1e9))
            limit = "" if until == float("inf") else f" until {time.strftime('%H:%M:%S', end)}"
            return f"waiting for client{'s' * (len(clients) > 1)} {names}{limit}"
        if self.of:
            return f"evaluating: {min(1.0, (self.meter.evaluations - self.calls) / self.of):.0%}"
        return self.words

    def _left(self) -> str:
        """The time left, by the clients that have finished; within a round it does not rise."""
        part = min(1.0, self.replies / max(1, self.cohort)) if self.replies else 0.0
        rounds = self.done - self.first + part
        if not rounds:
            return "?"
        trained = self.trained + (0.0 if self.since is None else time.monotonic() - self.since)
        estimate = trained / rounds * max(0.0, self.rounds - self.done - part) + self.last * self._evaluations_left()
        self.left = estimate if self.left is None else min(self.left, estimate)
        return duration(self.left)

    def _evaluations_left(self) -> int:
        every = self.every or self.rounds
        return self.rounds // every - self.done // every + (self.rounds % every > 0)

    def _line(self) -> Text:
        """All facts in one line; the least important are left out where there is no room."""
        spent = time.monotonic() - self.began
        trained = self.trained + (0.0 if self.since is None else time.monotonic() - self.since)
        rate = self.meter.images / trained if trained > 0.05 else 0.0
        facts = [
            (9, f"{self.done}/{self.rounds}" if self.rounds else ""),
            (5, "" if self.loss is None else f"loss {self.loss:.4f}"),
            (3, f"{rate:,.0f} images/s" if rate >= 1 else ""),
            (2, amount(self.traffic) if self.rounds else ""),
            (1, f"{duration(spent)} elapsed"),
            (8, f"{self._left()} left" if self.rounds else ""),
            (9, self._activity()),
        ]
        # only one line can be erased afterwards, so leave room for the ^C that a terminal prints
        room = self.console.width - 3
        facts = [(weight, words) for weight, words in facts if words]
        whole = len(facts)
        while len(line := "  ".join(words for _, words in facts)) > room and min(facts)[0] < 9:
            facts.remove(min(facts))
        width = min(BAR, room - len(line) - 1)
        if width < SHORTEST_BAR or len(facts) < whole or not self.rounds:
            return Text(line[:room], no_wrap=True)
        filled = int(width * self.done / self.rounds)
        return Text("━" * filled + "╌" * (width - filled) + " " + line, no_wrap=True)
