"""The records of a run as values: result.json and the lines of rounds.jsonl.

Three rules convert them to JSON and back. A field whose default is None is left out where it is None.
A field without a default is required. A key without a field is ignored.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Self

from effuse.core.errors import RunError
from effuse.core.metric import Measurement


class Record:
    """Base of all records."""

    def to_json(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_json(cls, found: Any, where: str) -> Self:
        """The inverse of `to_json`; errors name the file `where`."""
        return made(found, cls, where)


@dataclasses.dataclass(frozen=True)
class Sums(Record):
    """One quantity of traffic, by direction."""

    up: int
    down: int
    total: int


@dataclasses.dataclass(frozen=True)
class Traffic(Record):
    """The traffic of a round or a run, as the ledger counts it."""

    parameters: Sums
    bytes: Sums
    wire_bytes: Sums
    messages: Sums
    links: Mapping[str, Mapping[str, Mapping[str, int]]]  # by link, direction and quantity
    clients: Mapping[str, Mapping[str, int]] | None = None  # bytes by client and direction; only in a round's record
    edges: Mapping[str, Mapping[str, int]] | None = None  # the same by edge, if there are edges
    discarded: Mapping[str, int] | None = None  # uploads that were rejected or late: how many, and their wire bytes
    evaluation: "Traffic | None" = None  # what an evaluation of this round sent


@dataclasses.dataclass(frozen=True)
class Seconds(Record):
    """The time of a round without and with its evaluation and checkpoint."""

    round: float
    total: float


@dataclasses.dataclass(frozen=True)
class ClientRecord(Record):
    """What is known of one client in a round."""

    loss: float | None = None  # the last that it reported
    seconds: float | None = None  # of its work; of a remote client, until its answers came


@dataclasses.dataclass(frozen=True)
class Split(Record):
    """Who holds what: partition.json of a run whose clients are all on this machine, or what sites told their server."""

    labels: list[list[int]]  # of each client, its images of each class
    groups: list[int] | None = None  # of each client, the number of its groups, such as patients
    sites: list[int] | None = None  # the clients whose rows these are, where sites told them; None: all, in order

    @property
    def clients(self) -> list[int]:
        """Whose the rows are."""
        return list(range(len(self.labels))) if self.sites is None else self.sites


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRecord(Record):
    """A line of rounds.jsonl."""

    t: int
    phase: str
    federated: int  # federated rounds up to here
    loss: float | None  # weighted mean of the clients' losses
    images: int  # trained on
    evaluations: int = 0  # network calls while drawing images
    seconds: Seconds
    at_a_time: int | None = None  # clients that this machine trains in parallel
    gpu_bytes: int | None = None
    noted: Mapping[str, Any] | None = None  # facts that the algorithm adds
    updates: Mapping[str, Mapping[str, float | None]] | None = None  # of each remote client: weight, loss, norm, cosine
    clients: Mapping[str, ClientRecord] | None = None
    silent: list[int] | None = None  # clients that gave no answer that could be used
    metrics: Mapping[str, float] | None = None  # None where the model was not evaluated
    measuring: int | None = None  # network calls of that evaluation
    traffic: Traffic

    @property
    def alone(self) -> bool:
        """Whether the loss is one client's: one reported it, or one of those that were asked was not silent."""
        losses = sum(own.loss is not None for own in (self.clients or {}).values())
        asked = {int(k) for k in self.traffic.clients or {}}
        return 1 in (losses, len(asked.difference(self.silent or ())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Record):
    """result.json: the result of a finished run."""

    weights_sha256: str
    metrics: Mapping[str, Measurement]
    rounds: int
    traffic: Traffic
    parameters: int
    figures: Mapping[str, float] | None = None  # the cost of the network and its traffic, for tables
    images: int
    seconds: float
    round_seconds: float | None = None  # without preparation and evaluation, to compare methods
    privacy: dict[str, Any] | None = None  # what the run cost each client, where the recipe has a budget
    pruned: str | None = None  # a note, if the network was pruned
    personal: str | None = None  # a note, if each client has its own model


def plain(value: Any) -> Any:
    """A value of dictionaries, lists and numbers, for JSON."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {f.name: plain(item) for f, item in fields if item is not None or f.default is not None}


def made(found: Any, cls: type, where: str) -> Any:
    """A dataclass from parsed JSON."""
    if not isinstance(found, dict):
        raise RunError(f"{where}: expected keys and values, not {type(found).__name__}; restore it from a backup")
    for f in dataclasses.fields(cls):
        if f.name not in found and f.default is dataclasses.MISSING:
            raise RunError(f"{where} has no '{f.name}', which every version of effuse writes; restore it from a backup")
    return cls(**{name: _read(found[name], hint, where) for name, hint in _hints(cls).items() if name in found})


def _read(value: Any, hint: Any, where: str) -> Any:
    """A value of the type that a field declares."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in args:
            return None
        options = [option for option in args if option is not types.NoneType]
        return _read(value, options[0], where) if len(options) == 1 else _checked(value, options, where)
    if dataclasses.is_dataclass(hint):
        return made(value, hint, where)  # type: ignore[arg-type]
    if origin is list:
        return [_read(item, args[0], where) for item in _checked(value, [list], where)]
    if origin is not None:
        return {key: _read(item, args[1], where) for key, item in _checked(value, [dict], where).items()}
    return value if hint is Any else _checked(value, [hint], where)


def _checked(value: Any, types_: Sequence[type], where: str) -> Any:
    """The same value, if it has one of these types. An integer is a float too."""
    if type(value) not in types_ and not (type(value) is int and float in types_):
        names = " or ".join(kind.__name__ for kind in types_)
        raise RunError(f"{where}: expected {names}, not {type(value).__name__}; restore it from a backup")
    return value


_hints = functools.cache(typing.get_type_hints)
