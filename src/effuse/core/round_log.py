"""What clients and the server program tell of one round."""

import dataclasses
from typing import Any

from effuse.core.watch import Seen


@dataclasses.dataclass
class RoundLog:
    """What is told during a round, for its line in the run's records."""

    losses: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # (loss, weight) that clients reported
    updates: dict[int, Seen] = dataclasses.field(default_factory=dict)  # where clients are watched
    reported: dict[int, float] = dataclasses.field(default_factory=dict)  # the last loss of each client
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)  # of each client; of a remote one, until it answered
    silent: set[int] = dataclasses.field(default_factory=set)  # clients that gave an order no answer that could be used
    noted: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the algorithm records

    @property
    def loss(self) -> float | None:
        """The weighted mean of the reported losses; None where there are none."""
        weight = sum(w for _, w in self.losses)
        return sum(x * w for x, w in self.losses) / weight if weight else None
