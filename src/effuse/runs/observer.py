"""The events of a run, for displays and trackers."""

from collections.abc import Sequence
from typing import Any, Self

from effuse.core.machine import Meter
from effuse.core.recipe import Recipe
from effuse.runs.records import Result, RoundRecord


class Observer:
    """Receives the events of a run and ignores them; a display overrides those that it shows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Release what `__enter__` acquired; here nothing."""

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        """A run begins at round `first`; earlier rounds sent `traffic` bytes."""

    def phase(self, words: str) -> None:
        """The run begins an activity, such as evaluating."""

    def evaluating(self, evaluations: int) -> None:
        """An evaluation begins; drawing its images takes so many network evaluations."""

    def waiting(self, clients: Sequence[int], until: float) -> None:
        """The server waits for these sites, until a time of `time.monotonic()`; for none, when it goes on."""

    def replied(self, t: int, client: int, loss: float | None) -> None:
        """A client's reply was accepted."""

    def said(self, words: str) -> None:
        """A message for the user: a client joined or left, or its reply was refused and why."""

    def closed(self, record: RoundRecord) -> None:
        """A round is finished; `record` is its line of rounds.jsonl."""

    def finished(self, result: Result) -> None:
        """The run is finished."""
