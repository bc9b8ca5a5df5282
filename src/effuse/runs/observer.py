"""What a run tells whoever watches it."""

from typing import Any, Self

from effuse.core.machine import Meter
from effuse.core.recipe import Recipe
from effuse.runs.records import Result, RoundRecord


class Observer:
    """Hears of everything and does nothing; a display overrides what it shows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Nothing to put away."""

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        """A run begins at round `first`; `traffic` bytes passed in the rounds before."""

    def phase(self, words: str) -> None:
        """What the run is doing now."""

    def replied(self, t: int, client: int, loss: float | None) -> None:
        """A client's answer was taken."""

    def said(self, words: str) -> None:
        """The federation has news: who came, who went, whose answer was refused and why."""

    def closed(self, record: RoundRecord) -> None:
        """A round is over; `record` is its line of rounds.jsonl."""

    def finished(self, result: Result) -> None:
        """The run is over."""
