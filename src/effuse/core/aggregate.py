"""Aggregation: the fields of a reply that are reduced, and the weighted mean that reduces them."""

import dataclasses
import enum
import functools
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, Self

from pydantic import PositiveFloat

from effuse.core.errors import FederationError, RecipeError
from effuse.core.message import is_message
from effuse.core.model import Model
from effuse.core.params import Mean, Params
from effuse.core.spec import Spec, spec
from effuse.core.watch import Watch


class CountsAs(enum.Enum):
    """What a reply counts for in the mean of a field, as `model: Annotated[Model, by_weight]` declares it."""

    WEIGHT = "by weight"  # the reply's `weight`, or the server's own weight for the client
    COUNT = "by count"  # one, whatever the weight


by_weight, by_count = CountsAs.WEIGHT, CountsAs.COUNT
Fields = Mapping[str, CountsAs]


@functools.cache
def reduced_fields(reply: Any) -> Fields:
    """The fields of a reply that are reduced, each with what the reply counts for."""
    hints = typing.get_type_hints(reply, include_extras=True) if is_message(reply) else {}
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark for name, marks in metadata.items() for mark in marks if isinstance(mark, CountsAs)}


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The result of reducing a cohort's replies."""

    value: SimpleNamespace  # the reduced fields under the reply's own names; None where no reply had a value
    weight: float  # the total of the weights
    heard: tuple[int, ...] = ()  # the clients whose reply was accepted, in cohort order

    @classmethod
    def of(cls, weight: float, **values: Any) -> Self:
        """An earlier result to go on from: the means of these fields, and the total of their weights."""
        return cls(SimpleNamespace(**values), weight)


class Reduction(Protocol):
    """A reduction in progress: replies are added one by one."""

    weight: float  # the total of the weights so far
    nbytes: int  # of the replies that it holds in memory

    def add(self, client: int, values: Mapping[str, Any], weight: float) -> None: ...
    def value(self) -> SimpleNamespace: ...


class Means:
    """Running means of the fields; one reply is in memory at a time."""

    nbytes = 0

    def __init__(self, fields: Fields, start: Reduced | None = None) -> None:
        self.fields, self.weight = fields, 0.0
        self._means: dict[str, Mean[Any]] = defaultdict(Mean)
        self._parts: dict[str, dict[str, Mean[Params]]] = defaultdict(lambda: defaultdict(Mean))
        self._numbers: dict[str, list[tuple[float, float]]] = defaultdict(list)
        if start is not None:
            self.weight = start.weight
            for name, value in vars(start.value).items():
                if not (fields[name] is by_weight and isinstance(value, (Model, Params))):
                    raise FederationError(f"'{name}' cannot continue from `start`: only models and Params by weight can")
            self._means |= {name: Mean(value, start.weight) for name, value in vars(start.value).items()}

    def add(self, client: int, values: Mapping[str, Any], weight: float) -> None:
        self.weight += weight
        for name, value in values.items():
            share = weight if self.fields[name] is by_weight else 1.0
            if isinstance(value, (int, float)):
                self._numbers[name].append((value, share))
            elif isinstance(value, dict):
                means = self._parts[name]
                for part, params in value.items():
                    means[part].add(params, share)
            elif value is not None:
                self._means[name].add(value, share)

    def value(self) -> SimpleNamespace:
        fields: dict[str, Any] = dict.fromkeys(self.fields)
        fields |= {name: mean.value for name, mean in self._means.items()}
        fields |= {name: {part: mean.value for part, mean in parts.items()} for name, parts in self._parts.items()}
        fields |= {name: mean_number(pairs, self.fields[name]) for name, pairs in self._numbers.items()}
        return SimpleNamespace(**fields)


def mean_number(pairs: Sequence[tuple[float, float]], counts_as: CountsAs) -> float:
    """The mean of (number, weight) pairs."""
    if counts_as is by_count:
        return sum(number for number, _ in pairs) / len(pairs)
    return sum(number * weight for number, weight in pairs) / sum(weight for _, weight in pairs)


@spec
class Reducer(Spec, ABC):
    """The rule by which the replies of a cohort become one."""

    holds: ClassVar[bool] = False  # whether it holds all replies of the cohort in CPU memory; their parts must then be equal

    def lacks(self, replies: int) -> str | None:
        """Why so few replies are not enough, in a sentence."""
        return None

    @abstractmethod
    def begin(self, fields: Fields, start: Reduced | None) -> Reduction:
        """A new reduction; a mean continues from `start`."""

    def unfit(self, clients: int) -> str | None:
        """Why this rule cannot be used with so many clients, in a sentence."""
        return None

    def weighed(self, client: int, weight: float) -> float:
        """What a client's reply counts for, given the weight that it claims."""
        return weight

    def prepared(self, values: dict[str, Any], message: Any, wire: str) -> dict[str, Any]:
        """The values to add for a reply, given the message that it answers and the wire's number format."""
        return values


@spec
class Average(Reducer, name="mean"):
    """The weighted mean. By default a reply has the weight that it claims."""

    weights: tuple[PositiveFloat, ...] = ()  # declared by the operator, one for each client: claims do not count
    cap: PositiveFloat | None = None  # the most that a claim counts for

    def __post_init__(self) -> None:
        if self.weights and self.cap is not None:
            raise RecipeError(f"{self.name}: declared weights need no cap; give one of weights and cap")

    def unfit(self, clients: int) -> str | None:
        if len(self.weights) in (0, clients):
            return None
        return f"{len(self.weights)} weights, but there are {clients} clients; give one for each"

    def weighed(self, client: int, weight: float) -> float:
        if self.weights:
            return self.weights[client]
        return weight if self.cap is None else min(weight, self.cap)

    def begin(self, fields: Fields, start: Reduced | None) -> Reduction:
        return Means(fields, start)


class Groups:
    """One reduction for each group of clients."""

    def __init__(
        self, by: Reducer, fields: Fields, group_of: Mapping[int, Any], starts: Mapping[Any, Reduced | None]
    ) -> None:
        self.by, self.fields, self.group_of = by, fields, group_of
        self.reductions = {g: by.begin(fields, starts.get(g)) for g in dict.fromkeys(group_of.values())}
        self.heard: dict[Any, list[int]] = {g: [] for g in self.reductions}

    @property
    def nbytes(self) -> int:
        return sum(reduction.nbytes for reduction in self.reductions.values())

    def add(
        self, client: int, reply: Any, weight: float | None, message: Any, wire: str, watch: Watch | None = None
    ) -> None:
        """Add a client's reply to `message`, with the server's weight or, where that is None, the reply's own."""
        group = self.group_of[client]
        if weight is None:
            weight = self.by.weighed(client, getattr(reply, "weight", 1.0))
        elif weight == 0:
            self.heard[group].append(client)
            return
        values = {name: getattr(reply, name) for name in self.fields}
        self.reductions[group].add(client, self.by.prepared(values, message, wire), weight)
        self.heard[group].append(client)
        if watch is not None:
            watch.add(client, values, message, wire, weight, getattr(reply, "loss", None))

    def results(self) -> dict[Any, Reduced]:
        return {g: Reduced(r.value(), r.weight, tuple(self.heard[g])) for g, r in self.reductions.items()}
