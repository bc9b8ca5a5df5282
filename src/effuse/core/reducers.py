"""Robust reducers: the median, the trimmed mean, Krum, and the mean of clipped updates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from effuse.core.aggregate import Average, Fields, Reduced, Reducer, Reduction, by_count, mean_number
from effuse.core.differences import changed, models_sent, needs_start
from effuse.core.errors import FederationError
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.spec import spec
from effuse.core.visit import each_params

Rule = Callable[[Tensor], Tensor]  # from one tensor of every reply, stacked, to one tensor


@spec
class Clipped(Average):
    """The weighted mean of replies whose difference to what was sent is scaled down to `norm` at most.

    The norm is taken over all reduced fields together. A Model, and a part of one, differs from the model that was sent.
    Other Params are differences already. Buffers and single numbers are not clipped.
    """

    norm: PositiveFloat

    def prepared(self, values: dict[str, Any], message: Any, wire: str) -> dict[str, Any]:
        sent = models_sent(values, message, wire)
        if len(sent) != 1 and needs_start(values):
            place = f"{self} measures from the one model that was sent"
            raise FederationError(f"{place} with the reply's architecture, and there are {len(sent)}")
        norms: list[float] = []

        def measured(before: Params, reply: Params) -> Params:
            norms.append(0.0 if reply.hollow else float((reply - before).norm()))
            return reply

        changed(values, sent, measured)
        norm = math.hypot(*norms)
        if norm <= self.norm:
            return values
        return changed(values, sent, lambda before, reply: before.lerp(reply, self.norm / norm))


@spec
class Holding(Reducer, ABC):
    """A reducer that compares all replies of the cohort with each other and ignores the weights."""

    holds: ClassVar[bool] = True

    def begin(self, fields: Fields, start: Reduced | None) -> Reduction:
        if start is not None:
            raise FederationError(
                f"{self} needs all replies at once and cannot go on from a mean; use mean() or clipped(...)"
            )
        return Together(self, fields)

    @abstractmethod
    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        """The function that reduces one tensor of every reply."""


class Together:
    """All replies of a cohort in CPU memory, reduced tensor by tensor once they have all arrived."""

    def __init__(self, by: Holding, fields: Fields) -> None:
        self.by, self.fields, self.weight, self.nbytes = by, fields, 0.0, 0
        self.replies: dict[int, dict[str, Any]] = {}

    def add(self, client: int, values: Mapping[str, Any], weight: float) -> None:
        self.weight += weight
        for first, reply in list(self.replies.items())[:1]:
            if _layout(reply) != _layout(values):
                unequal = f"clients {first} and {client} report different parts"
                raise FederationError(f"{unequal}, and {self.by} needs equal ones; use mean() or clipped(...)")
        self.device = next((tensor.device for tensor in tensors_of(values).values()), torch.device("cpu"))
        self.nbytes += sum(item.nbytes for item in each_params(values))
        self.replies[client] = {name: _in_cpu_memory(value) for name, value in values.items()}

    def value(self) -> SimpleNamespace:
        if not self.replies:
            return SimpleNamespace(**dict.fromkeys(self.fields))
        rule = self.by.rule(self.replies)
        columns = {name: [reply[name] for reply in self.replies.values()] for name in self.fields}
        return SimpleNamespace(**{name: _reduced(column, rule, self.device) for name, column in columns.items()})


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


def _reduced(values: list[Any], rule: Rule, device: torch.device) -> Any:
    """One value from one of every reply: floats by the rule, integers (counters) by their maximum, numbers by their mean."""
    first = values[0]
    if isinstance(first, Model):
        params, buffers = (_reduced([getattr(v, part) for v in values], rule, device) for part in ("params", "buffers"))
        return Model(first.arch, params, buffers)
    if isinstance(first, Params):
        if first.hollow:
            return first
        columns = {name: torch.stack([v[name] for v in values]) for name in first}
        return type(first)({k: rule(c) if c.is_floating_point() else c.amax(0) for k, c in columns.items()}).to(device)
    if isinstance(first, dict):
        return {key: _reduced([v[key] for v in values], rule, device) for key in first}
    pairs = [(v, 1.0) for v in values if v is not None]
    return mean_number(pairs, by_count) if pairs else None


@spec
class Median(Holding):
    """The median of every coordinate (Yin et al., 2018); of an even number, the mean of the two in the middle."""

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        n = len(replies)
        return lambda column: column.sort(0).values[(n - 1) // 2 : n // 2 + 1].mean(0)


@spec
class Trimmed(Holding):
    """The mean of every coordinate without its smallest and its largest values, a share of each (Yin et al., 2018)."""

    share: Annotated[float, Field(gt=0, lt=0.5)]  # beta; of n replies, at least beta n are dropped at either end

    def lacks(self, replies: int) -> str | None:
        k = self.drops(replies)
        if replies > 2 * k:
            return None
        return f"{self} drops {k} of {replies} replies at either end, which leaves none; lower share, or ask more clients"

    def drops(self, n: int) -> int:
        return math.ceil(self.share * n - 1e-9)  # 0.07 x 100 is 7.000000000000001 in floating point

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        n, k = len(replies), self.drops(len(replies))
        if (reason := self.lacks(n)) is not None:
            raise FederationError(reason)
        return lambda column: column.sort(0).values[k : n - k].mean(0)


@spec
class Krum(Holding):
    """The reply that is closest to its n - f - 2 nearest others (Blanchard et al., 2017); of equals, the lowest client's."""

    f: NonNegativeInt  # clients that may send anything

    def lacks(self, replies: int) -> str | None:
        least = 2 * self.f + 3
        enough = replies >= least
        return None if enough else f"{self} needs 2 f + 3 = {least} replies, not {replies}; lower f, or ask more clients"

    def rule(self, replies: Mapping[int, Mapping[str, Any]]) -> Rule:
        if (reason := self.lacks(len(replies))) is not None:
            raise FederationError(reason)
        clients = list(replies)
        each = [{k: t for k, t in tensors_of(reply).items() if t.is_floating_point()} for reply in replies.values()]
        if any(t.is_meta for t in each[0].values()):  # a rehearsal has no values to compare
            return lambda column: column[0]
        distances = torch.zeros(len(each), len(each), dtype=torch.float64)
        for i, one in enumerate(each):
            for j, other in enumerate(each[:i]):
                square = sum(((one[k].double() - other[k].double()) ** 2).sum() for k in one)
                distances[i, j] = distances[j, i] = square
        # the smallest distance is that of a reply to itself
        scores = distances.sort(1).values[:, 1 : len(each) - self.f - 1].sum(1).tolist()
        chosen = min(range(len(each)), key=lambda i: (scores[i], clients[i]))
        return lambda column: column[chosen]
