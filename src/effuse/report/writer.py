"""Write a run's page: by command, and while a run goes on."""

import time
from pathlib import Path
from typing import Any, Self

from effuse.core.errors import RunError
from effuse.core.files import reading, write_atomically, writing
from effuse.core.machine import Meter
from effuse.core.recipe import Recipe
from effuse.report.facts import Facts, read_facts, readable
from effuse.report.page import page
from effuse.report.public import shareable
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.runs.records import Result, RoundRecord

PRIVATE = 0o600  # pages with facts about single clients
SHARE = 0.01  # of the time since the last page that writing one may take


def write_report(run: Path, *, public: bool = False, nearest: bool = False, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not; returns where. Real images are in it only by `nearest`."""
    if public and nearest:
        raise RunError("a public page shows no real images; give one of --public and --nearest")
    facts = read_facts(run)
    pairs = None
    if nearest:
        file = run / "audit" / "private" / "nearest.png"
        if not file.is_file():
            raise RunError(f"{run} has no pictures of nearest pairs; make them with `effuse audit {run}`")
        with reading(file):
            pairs = file.read_bytes()
    usual = "public.html" if public else "audit/private/report.html" if nearest else "report.html"
    path = out or run / usual
    with readable(run):
        html = page(shareable(facts) if public else facts, pairs)
    save(path, html, private=not public)
    return path


def save(path: Path, html: str, private: bool) -> None:
    """Write a page; other users cannot read a private one."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html.encode("utf-8", "backslashreplace"), wait=False, mode=PRIVATE if private else 0o666)


class Reporting(Observer):
    """Passes events on, and writes the page after every evaluation and at the end.

    Pages between take at most a hundredth of the time, so a run of short rounds skips some. One that cannot be written
    never stops a run.
    """

    def __init__(self, inner: Observer) -> None:
        self.inner = inner
        self.folder: RunFolder | None = None
        self.written, self.cost = 0.0, 0.0
        for event in vars(Observer).keys() - vars(Reporting).keys():  # those that pages do not need
            if not event.startswith("_"):
                setattr(self, event, getattr(inner, event))

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        self.folder = RunFolder(Path(folder))
        self.inner.started(recipe, folder, first, meter, traffic)

    def closed(self, record: RoundRecord) -> None:
        self.inner.closed(record)
        if record.metrics is not None and self.cost <= SHARE * (time.monotonic() - self.written):
            self._write()

    def finished(self, result: Result) -> None:
        self._write()
        self.inner.finished(result)

    def _write(self) -> None:
        began = time.monotonic()
        try:
            assert self.folder is not None
            save(self.folder.path / "report.html", page(Facts.of(self.folder.path)), private=True)
        except Exception as error:  # the run is worth more than its page
            self.inner.said(f"warning: the report was not written: {error}")
        self.written = time.monotonic()
        self.cost = self.written - began
