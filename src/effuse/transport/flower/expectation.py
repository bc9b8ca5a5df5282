"""What a reply must look like, found by doing the job on shapes; a wrong reply is refused before it is averaged."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch

from effuse.core.algorithm import Job, fields_of
from effuse.core.errors import EffuseError, WireError
from effuse.core.ledger import size_of
from effuse.core.message import is_message
from effuse.core.model import Arch, Model
from effuse.core.params import Params
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.visit import each_params, map_params, placed
from effuse.core.workbench import Client
from effuse.machines.hollow import Hollow
from effuse.transport.plan import MANY, stand_in

OVERHEAD = 1 << 20  # bytes for names, numbers and text
UNKNOWN_LIMIT = 64 << 20  # bytes of a reply beside four times what was sent, where its shapes are unknown

Shape = tuple[int, ...]
Layout = tuple[Shape, torch.dtype]
Names = dict[str, Layout]


class Form(NamedTuple):
    """What a reply is made of: its tensors by place, name, shape and type, its networks, and the lengths of its lists."""

    params: dict[str, Names]  # by the place of each set in the reply: its field, its key
    loose: dict[str, Layout]  # the tensors outside Params, by their place
    archs: list[Arch]
    lengths: dict[str, int]  # of lists and tuples, by their place
    idle: bool  # whether its weight is zero: the client had nothing to answer with

    @classmethod
    def of(cls, reply: Any) -> Self:
        placed_items = dict(_items(reply))
        params = {place: _names(item) for place, item in placed_items.items() if isinstance(item, Params)}
        loose = {place: _layout(item) for place, item in placed_items.items() if isinstance(item, torch.Tensor)}
        lengths = {place: len(item) for place, item in placed_items.items() if isinstance(item, (list, tuple))}
        return cls(params, loose, _archs(reply), lengths, getattr(reply, "weight", None) == 0)

    def check(self, reply: "Form", partly: bool = False) -> None:
        """Refuse a reply of another form. `partly`: clients' state is not known, and an optional tensor may be missing."""
        if len(reply.params) != len(self.params):
            raise WireError(f"it has {len(reply.params)} sets of parameters, expected {len(self.params)}")
        if reply.params.keys() != self.params.keys():
            place = sorted(reply.params.keys() - self.params.keys())[0]
            raise WireError(f"it has parameters at '{place[:40]}', expected: {', '.join(self.params)}")
        if reply.archs != self.archs:
            raise WireError(f"its networks are {_listed(reply.archs)}, expected {_listed(self.archs)}")
        for place, layout in reply.loose.items():
            if place not in self.loose:
                raise WireError(f"it has a tensor at '{place[:40]}', expected: {', '.join(self.loose) or 'none'}")
            _same(f"the tensor at '{place}'", layout, self.loose[place])
        if not partly and (missing := self.loose.keys() - reply.loose.keys()):
            raise WireError(f"it has no tensor at '{min(missing)}'")
        for place, expected in self.params.items():
            names = reply.params[place]
            if names.keys() != expected.keys():
                name = sorted(names.keys() ^ expected.keys())[0]
                raise WireError(f"'{name[:80]}' is {'missing' if name in expected else 'unexpected'}")
            for name, layout in names.items():
                _same(f"'{name}'", layout, expected[name])
        for place in sorted(self.lengths.keys() | reply.lengths.keys()):
            found, length = reply.lengths.get(place), self.lengths.get(place)
            if found != length and not (partly and None in (found, length)):
                raise WireError(f"'{place[:40]}' has {found or 0} items, expected {length or 0}")
        if reply.idle != self.idle:
            raise WireError("its weight is 0, and weights must be positive" if reply.idle else "its weight must be 0")


def _same(what: str, found: Layout, expected: Layout) -> None:
    if found[0] != expected[0]:
        raise WireError(f"{what} has the shape {found[0]}, not {expected[0]}")
    if found[1] != expected[1]:
        raise WireError(f"{what} is of {found[1]}, not {expected[1]}")


class Expected(NamedTuple):
    """The forms that a reply may have, and its most bytes."""

    forms: list[Form]  # none: the job cannot be done on shapes alone
    limit: int
    weight: float | None = None  # of every reply, where it does not depend on how many images a client has
    partly: bool = False  # clients may have state that is not known here

    def check(self, reply: Any) -> None:
        """Refuse a reply that has none of the forms, or another weight than every client has."""
        found = Form.of(reply)
        errors: list[WireError] = []
        for form in self.forms:
            try:
                form.check(found, self.partly)
                break
            except WireError as error:
                errors.append(error)
        else:
            if errors:
                raise errors[0]
        if self.weight is not None and (weight := getattr(reply, "weight", self.weight)) != self.weight:
            raise WireError(f"its weight is {weight}; weights must be {self.weight:g} here, whatever the number of images")


class TrackedState(dict[str, Any]):
    """A client's state, as far as it is known; `missed` has the keys that a job did not find."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self.missed: set[Any] = set()

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if not found:
            self.missed.add(key)
        return found

    def __missing__(self, key: str) -> Any:
        self.missed.add(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(key, *default) if key in self or default else self.__missing__(key)


class Expectation:
    """Does every job on shapes before its orders go out.

    Some jobs cannot be done so. A shape has no numbers to decide by, the clients' state from before a resumption is
    unknown, and the shard that stands in for theirs may be refused. That is reported once per job, and its replies are
    checked by type and size alone. Any other error is a fault of the algorithm and is raised.
    """

    def __init__(self, recipe: Recipe, classes: int, report: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.classes = classes  # of the data: the network may have more
        self.report = report
        self._machine = Hollow()
        self._last: tuple[Any, Expected] | None = None  # a message and what it is answered with
        self._states: list[dict[str, Any]] = []  # what a client's state may be; several where clients' networks differ
        self._partial = False  # clients may have more state than that
        self._reported: set[str] = set()  # names of jobs

    def of(self, job: Job, message: Any, resumed: bool = False) -> Expected:
        """The answer to a message, found once for a broadcast; `resumed`: clients have state from before."""
        self._partial |= resumed and not self._states
        if self._last is None or self._last[0] is not message:
            self._last = message, self._derived(job, message)
        return self._last[1]

    def _derived(self, job: Job, message: Any) -> Expected:
        meta = self._machine.device
        messages = [placed(message, meta)]
        if any(isinstance(item, torch.Tensor) for item in each_params(message)):
            # loose tensors keep their numbers where a job needs them, as in a rehearsal; a copy, since a job may write on it
            messages.append(copy.deepcopy(map_params(message, lambda tensor: tensor.to(meta))))
        reason: Exception | None = None
        for sent in messages:
            forms: list[Form] = []
            weights: dict[int, set[float | None]] = {1: set(), MANY: set()}
            most, states, tried = 0, self._states, [{}, *self._states]
            # what a reply holds may depend on the state of a client and on how many images it has
            for images in (1, MANY):
                for known in tried:
                    client = self._client(images)
                    client.state = state = TrackedState(known)
                    try:
                        reply = getattr(self.recipe.algorithm, job.name)(client, **fields_of(sent))
                    except Exception as error:  # it counts only if the job fails with every known state
                        if forms or known is not tried[-1]:
                            continue
                        if not (_about_shapes(error) or self._about_state(error, state) or isinstance(error, EffuseError)):
                            where = f"in job '{job.name}' of {self.recipe.algorithm.name}"
                            error.add_note(f"{where}, done on shapes before its orders go out")
                            raise
                        reason = error
                        continue
                    states = _with_state(states, {**known, **state})
                    form = Form.of(reply)
                    forms += [] if form in forms else [form]
                    weights[images].add(getattr(reply, "weight", None))
                    most = max(most, sum(item.nbytes for item in each_params(reply)))
            if forms:
                self._states = states
                return Expected(forms, most + OVERHEAD, _constant(*weights.values()), self._partial)
        self._partial = True  # the state after this job is unknown
        if job.name not in self._reported:
            self._reported.add(job.name)
            why = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
            self.report(
                f"job '{job.name}' cannot be done on shapes, so its replies are checked by type and size alone ({why})"
            )
        return Expected([], 4 * size_of(message, "fp32")[1] + UNKNOWN_LIMIT)

    def _about_state(self, error: Exception, state: TrackedState) -> bool:
        """Whether missing state made a job fail; where state is unknown, any error after a missed key may be that."""
        missing = isinstance(error, KeyError) and error.args[:1] and error.args[0] in state.missed
        return bool(missing or (self._partial and state.missed))

    def _client(self, images: int) -> Client:
        """A client with so many images of each class."""
        shard = stand_in(self.recipe, self.classes, images)
        client = Client(self._machine, self.recipe.task, self.recipe.rounds, 0, shard)
        if self.recipe.budget is not None:
            client.protection = Protection(self.recipe.budget, None)
        client.begin(Stream(("expectation",)), 0)
        return client


def _with_state(states: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The states that a client may have, with one more; a state that another one only adds to is left out."""
    if any(_adds_to(state, new) for state in states):
        return states
    return [*(state for state in states if not _adds_to(new, state)), new]


def _adds_to(more: dict[str, Any], less: dict[str, Any]) -> bool:
    """Whether a state has all values of another, with networks and tensors of the same shapes."""
    # a list in the state may grow from round to round
    return all(
        k in more and Form.of(more[k])._replace(lengths={}) == Form.of(v)._replace(lengths={}) for k, v in less.items()
    )


def _about_shapes(error: Exception) -> bool:
    """Whether torch says that a tensor without numbers cannot do this."""
    # by its words: a job may raise errors of these types itself
    kinds = (RuntimeError, NotImplementedError, TypeError)
    words = r"(?<![a-z])meta(?![a-z])|Tensor\.__format__"
    return isinstance(error, kinds) and re.search(words, str(error), re.IGNORECASE) is not None


def _archs(value: Any) -> list[Arch]:
    """The networks of every model within a message."""
    if isinstance(value, Model):
        return [value.arch]
    if is_message(type(value)):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [arch for item in value for arch in _archs(item)]


def _listed(archs: list[Arch]) -> str:
    return ", ".join(text(arch, full=False) for arch in archs)[:200] or "none"


def _constant(few: set[float | None], many: set[float | None]) -> float | None:
    """The weight of clients with few and with many images, if it is the same."""
    return next(iter(few)) if few == many and len(few) == 1 else None


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.dtype


def _names(params: Params) -> Names:
    return {name: _layout(tensor) for name, tensor in params.items()}


def _items(value: Any, place: str = "reply") -> Iterator[tuple[str, Any]]:
    """Everything within a message that has a form of its own, by its place."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (Params, torch.Tensor)):
        yield place, value
    elif is_message(type(value)):
        inner = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        yield place, value
        inner = enumerate(value)
    for key, item in inner:
        yield from _items(item, f"{place}.{key}")
