"""How the replies of a cohort become one: what the fields of a reply declare, and the rules that a recipe can choose."""

import dataclasses
import enum
import functools
import math
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from effuse.core.errors import FederationError
from effuse.core.message import is_message
from effuse.core.model import Model
from effuse.core.params import Mean, Params
from effuse.core.spec import Spec, spec
from effuse.core.visit import each_params, through_wire

Rule = Callable[[Tensor], Tensor]  # one tensor of every reply, stacked, to one tensor


class CountsAs(enum.Enum):
    """What a reply counts for in the mean of a field, as `model: Annotated[Model, by_weight]` declares it."""

    WEIGHT = "by weight"  # the reply's `weight`, or what the server's own rule gives to its client
    COUNT = "by count"  # one, whatever the weight


by_weight, by_count = CountsAs.WEIGHT, CountsAs.COUNT
Fields = Mapping[str, CountsAs]


@functools.cache
def reduced_fields(reply: Any) -> Fields:
    """The fields of a reply that are reduced, and by what share."""
    hints = typing.get_type_hints(reply, include_extras=True) if is_message(reply) else {}
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark for name, found in marks.items() for mark in found if isinstance(mark, CountsAs)}


@dataclasses.dataclass(frozen=True)
class Reduced:
    """What became of a cohort's replies."""

    value: SimpleNamespace  # the reduced fields under the reply's own names; None where nobody brought one
    weight: float  # the total of the weights
    heard: tuple[int, ...] = ()  # the clients whose reply was accepted, in cohort order


class Means:
    """Running means of the fields; one reply is in memory at a time."""

    nbytes = 0  # of the replies that it holds

    def __init__(self, fields: Fields, start: Reduced | None = None) -> None:
        self.fields, self.weight = fields, 0.0
        self._means: dict[str, Mean[Any]] = defaultdict(Mean)
        self._parts: dict[str, dict[str, Mean[Params]]] = defaultdict(lambda: defaultdict(Mean))
        self._numbers: dict[str, list[tuple[float, float]]] = defaultdict(list)
        if start is not None:
            self.weight = start.weight
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
        found: dict[str, Any] = dict.fromkeys(self.fields)
        found |= {name: mean.value for name, mean in self._means.items()}
        found |= {name: {part: mean.value for part, mean in parts.items()} for name, parts in self._parts.items()}
        found |= {name: number_of(told, self.fields[name]) for name, told in self._numbers.items()}
        return SimpleNamespace(**found)


def number_of(told: Sequence[tuple[float, float]], share: CountsAs) -> float:
    """The mean of the numbers that were told."""
    if share is by_count:
        return sum(number for number, _ in told) / len(told)
    return sum(number * weight for number, weight in told) / sum(weight for _, weight in told)


class Together:
    """The replies of a whole cohort in CPU memory, reduced tensor by tensor when all are there."""

    def __init__(self, by: "Holding", fields: Fields) -> None:
        self.by, self.fields, self.weight, self.nbytes = by, fields, 0.0, 0
        self.replies: dict[int, dict[str, Any]] = {}

    def add(self, client: int, values: Mapping[str, Any], weight: float) -> None:
        self.weight += weight
        for first, reply in list(self.replies.items())[:1]:
            if _layout(reply) != _layout(values):
                apart = f"clients {first} and {client} report different parts"
                raise FederationError(f"{apart}, and {self.by} needs equal ones; use mean() or clipped(...)")
        self.device = next((tensor.device for tensor in tensors_of(values).values()), torch.device("cpu"))
        self.nbytes += sum(item.nbytes for item in each_params(values))
        self.replies[client] = {name: _in_cpu_memory(value) for name, value in values.items()}

    def value(self) -> SimpleNamespace:
        if not self.replies:
            return SimpleNamespace(**dict.fromkeys(self.fields))
        rule = self.by.rule(self.replies)
        columns = {name: [reply[name] for reply in self.replies.values()] for name in self.fields}
        return SimpleNamespace(**{name: _stacked(column, rule, self.device) for name, column in columns.items()})


def _layout(value: Any) -> Any:
    """Names and shapes of a reply; a number may be missing."""
    if isinstance(value, Model):
        return value.arch, _layout(value.params), _layout(value.buffers)
    if isinstance(value, Params):
        return {name: tuple(tensor.shape) for name, tensor in value.items()}
    return {key: _layout(item) for key, item in value.items()} if isinstance(value, Mapping) else None


def tensors_of(value: Any, place: str = "") -> dict[str, Tensor]:
    """Every tensor of a reply by its place."""
    if isinstance(value, Tensor):
        return {place: value}
    if isinstance(value, Model):
        value = {"params": value.params, "buffers": value.buffers}
    items = value.items() if isinstance(value, Mapping) else ()
    return {k: t for key, item in items for k, t in tensors_of(item, f"{place}/{key}").items()}


def _in_cpu_memory(value: Any) -> Any:
    if isinstance(value, Params):
        return value if value.hollow else value.to("cpu")
    if isinstance(value, Model):
        return Model(value.arch, _in_cpu_memory(value.params), _in_cpu_memory(value.buffers))
    return {key: _in_cpu_memory(item) for key, item in value.items()} if isinstance(value, dict) else value


def _stacked(values: list[Any], rule: Rule, device: torch.device) -> Any:
    """One value of many alike: floats by the rule, integers (counters) by their maximum, single numbers by their mean."""
    first = values[0]
    if isinstance(first, Model):
        params, buffers = (_stacked([getattr(v, part) for v in values], rule, device) for part in ("params", "buffers"))
        return Model(first.arch, params, buffers)
    if isinstance(first, Params):
        if first.hollow:
            return first
        columns = {name: torch.stack([v[name] for v in values]) for name in first}
        return type(first)({k: rule(c) if c.is_floating_point() else c.amax(0) for k, c in columns.items()}).to(device)
    if isinstance(first, dict):
        return {key: _stacked([v[key] for v in values], rule, device) for key in first}
    told = [(v, 1.0) for v in values if v is not None]
    return number_of(told, by_count) if told else None


@spec
class Reducer(Spec, ABC):
    """How the replies of a cohort become one."""

    holds: ClassVar[bool] = False  # whether the whole cohort's replies lie in CPU memory, and must have equal parts

    def lacks(self, replies: int) -> str | None:
        """Why so few replies are not enough, in a sentence."""
        return None

    @abstractmethod
    def begin(self, fields: Fields, start: Reduced | None) -> Means | Together:
        """A reduction to which replies are added one by one."""

    def prepared(self, values: dict[str, Any], message: Any, wire: str) -> dict[str, Any]:
        """What is added for a reply, given the message that it answers and how that travelled."""
        return values


@spec
class Average(Reducer, name="mean"):
    """The weighted mean."""

    def begin(self, fields: Fields, start: Reduced | None) -> Means | Together:
        return Means(fields, start)


@spec
class Clipped(Average):
    """The weighted mean of replies whose difference to what was sent has been scaled down to `norm` at most.

    The length is that of all reduced fields together. Models, and parts of one, differ from the model that the client was sent;
    other Params are differences already. Buffers and single numbers stay as they are.
    """

    norm: PositiveFloat

    def prepared(self, values: dict[str, Any], message: Any, wire: str) -> dict[str, Any]:
        arguments = (getattr(message, f.name) for f in dataclasses.fields(message))
        sent = [through_wire(value, wire) for value in arguments if isinstance(value, Model)]
        if len(sent) != 1 and any(isinstance(value, (Model, dict)) for value in values.values()):
            raise FederationError(f"{self} measures from the one model that a client was sent, and it was sent {len(sent)}")
        lengths: list[float] = []

        def measured(begun: Params, reply: Params) -> Params:
            lengths.append(0.0 if reply.hollow else float((reply - begun).norm()))
            return reply

        _changed(values, sent, measured)
        length = math.hypot(*lengths)
        if length <= self.norm:
            return values
        return _changed(values, sent, lambda begun, reply: begun.lerp(reply, self.norm / length))


def _changed(values: dict[str, Any], sent: list[Model], change: Callable[[Params, Params], Params]) -> dict[str, Any]:
    """A reply with all of its Params changed, each given what it differs from."""
    changed = dict(values)
    for name, value in values.items():
        if isinstance(value, Model):
            changed[name] = value.holding(change(sent[0].params, value.params))
        elif isinstance(value, dict):
            changed[name] = {k: change(sent[0].params.select(part.__contains__), part) for k, part in value.items()}
        elif isinstance(value, Params):
            changed[name] = change(value.zeros(), value)
    return changed


@spec
class Holding(Reducer, ABC):
    """A rule that looks at the replies of the whole cohort at once, and at no weights."""

    holds: ClassVar[bool] = True

    def begin(self, fields: Fields, start: Reduced | None) -> Means | Together:
        if start is not None:
            raise FederationError(
                f"{self} sees all replies at once and cannot go on from a mean; use mean() or clipped(...)"
            )
        return Together(self, fields)

    @abstractmethod
    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        """What becomes of one tensor of every reply."""


@spec
class Median(Holding):
    """The median of every coordinate (Yin et al., 2018); of an even number, the mean of the two in the middle."""

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        n = len(replies)
        return lambda column: column.sort(0).values[(n - 1) // 2 : n // 2 + 1].mean(0)


@spec
class Trimmed(Holding):
    """The mean of every coordinate without its smallest and its largest values, a share of each (Yin et al., 2018)."""

    share: Annotated[float, Field(gt=0, lt=0.5)]  # beta; of n replies, the whole part of beta n is dropped at either end

    def lacks(self, replies: int) -> str | None:
        return None if self.drops(replies) else f"{self} drops none of {replies} replies; raise share, or ask more clients"

    def drops(self, n: int) -> int:
        return int(self.share * n + 1e-9)  # 0.29 x 100 is 28.999... in floating point

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        n, k = len(replies), self.drops(len(replies))
        return lambda column: column.sort(0).values[k : n - k].mean(0)


@spec
class Krum(Holding):
    """The one reply that is closest to its n - f - 2 nearest others (Blanchard et al., 2017); of equals, the lowest client's."""

    f: NonNegativeInt  # clients that may send anything

    def lacks(self, replies: int) -> str | None:
        least = 2 * self.f + 3
        enough = replies >= least
        return None if enough else f"{self} needs 2 f + 3 = {least} replies, not {replies}; lower f, or ask more clients"

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        if (why := self.lacks(len(replies))) is not None:
            raise FederationError(why)
        numbers = list(replies)
        each = [{k: t for k, t in tensors_of(reply).items() if t.is_floating_point()} for reply in replies.values()]
        if any(t.is_meta for t in each[0].values()):  # a rehearsal, in which all replies are alike
            return lambda column: column[0]
        far = torch.zeros(len(each), len(each), dtype=torch.float64)
        for i, one in enumerate(each):
            for j, other in enumerate(each[:i]):
                far[i, j] = far[j, i] = sum(((one[k].double() - other[k].double()) ** 2).sum() for k in one)
        nearest = far.sort(1).values[:, 1 : len(each) - self.f - 1].sum(1).tolist()  # the very nearest is the reply itself
        chosen = min(range(len(each)), key=lambda i: (nearest[i], numbers[i]))
        return lambda column: column[chosen]
