"""What a run writes down, as values: result.json and the lines of rounds.jsonl.

Three rules turn them into JSON and back. A field that may be None, and is None by default, is left out where it is None.
A field without a default must be there. A key that no field has is ignored; the file keeps it.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Self

from effuse.core.errors import RunError
from effuse.core.metric import Measurement


class Record:
    """Base of what is written down."""

    def to_json(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_json(cls, found: Any, where: str) -> Self:
        """The record that `to_json` gave; `where` is the file, for whoever reads the error."""
        return made(found, cls, where)


@dataclasses.dataclass(frozen=True)
class Sums(Record):
    """One quantity of traffic, by direction."""

    up: int
    down: int
    total: int


@dataclasses.dataclass(frozen=True)
class Traffic(Record):
    """What passed, as the ledger counts it."""

    parameters: Sums
    bytes: Sums
    wire_bytes: Sums
    messages: Sums
    links: Mapping[str, Mapping[str, Mapping[str, int]]]  # by link, direction and quantity
    clients: Mapping[str, Mapping[str, int]] | None = None  # bytes by client and direction; of rounds alone
    edges: Mapping[str, Mapping[str, int]] | None = None  # the same by edge, where there are edges
    evaluation: "Traffic | None" = None  # what an evaluation of this round sent


@dataclasses.dataclass(frozen=True)
class Seconds(Record):
    """How long a round took: by itself, and with evaluation and checkpoint."""

    round: float
    total: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRecord(Record):
    """A line of rounds.jsonl."""

    t: int
    phase: str
    federated: int  # federated rounds up to here
    loss: float | None  # as clients reported it, by weight
    images: int  # trained on
    evaluations: int = 0  # of networks, while drawing images
    seconds: Seconds
    at_a_time: int | None = None  # clients that work here side by side
    gpu_bytes: int | None = None
    noted: Mapping[str, Any] | None = None  # what the algorithm wants remembered
    metrics: Mapping[str, float] | None = None  # None where the model was not evaluated
    traffic: Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Record):
    """result.json: what a finished run came to."""

    weights_sha256: str
    metrics: Mapping[str, Measurement]
    rounds: int
    traffic: Traffic
    parameters: int
    figures: Mapping[str, float] | None = None  # what tables print of a network and its traffic
    images: int
    seconds: float
    round_seconds: float | None = None  # without preparation and evaluation: what methods are compared by
    pruned: str | None = None  # a note, where the network has lost channels
    personal: str | None = None  # a note, where each client keeps its own model


def plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {f.name: plain(item) for f, item in fields if item is not None or f.default is not None}


def made(found: Any, cls: type, where: str) -> Any:
    """A dataclass out of JSON."""
    if not isinstance(found, dict):
        raise RunError(f"{where}: expected keys and values, not {type(found).__name__}; restore it from a backup")
    for f in dataclasses.fields(cls):
        if f.name not in found and f.default is dataclasses.MISSING:
            raise RunError(f"{where} has no '{f.name}', which every version of effuse writes; restore it from a backup")
    return cls(**{name: _read(found[name], hint, where) for name, hint in _hints(cls).items() if name in found})


def _read(value: Any, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(h for h in typing.get_args(hint) if h is not type(None)) if value is not None else None
    if dataclasses.is_dataclass(hint):
        return made(value, hint, where)  # type: ignore[arg-type]
    item = typing.get_args(hint)[-1] if typing.get_args(hint) else None
    if dataclasses.is_dataclass(item):
        return {key: made(v, item, where) for key, v in value.items()}  # type: ignore[arg-type]
    return value


_hints = functools.cache(typing.get_type_hints)
