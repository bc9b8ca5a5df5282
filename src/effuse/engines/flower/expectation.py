"""What a reply must look like, found by doing the job on shapes: a wrong one is refused before anyone averages it."""

import dataclasses
from typing import Any, NamedTuple

import torch

from effuse.core.algorithm import Job, fields_of
from effuse.core.data import Dataset, Shard
from effuse.core.errors import WireError
from effuse.core.ledger import size_of
from effuse.core.model import Arch, Model
from effuse.core.params import Params
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.wire import each_params, is_message, placed
from effuse.core.workbench import Client
from effuse.engines.hollow import Hollow

SLACK = 1 << 20  # bytes for names, numbers and text
MOST = 64 << 20  # bytes, beside four times what was sent, where nothing better is known

Names = dict[str, tuple[int, ...]]


class Expected(NamedTuple):
    """The tensors of a reply by name and shape, and the bytes that it may have."""

    params: list[Names] | None  # None: the job cannot be done on shapes alone
    loose: list[tuple[int, ...]]  # shapes of the tensors that stand by themselves
    archs: list[Arch]
    limit: int

    def check(self, reply: Any) -> None:
        """Refuse a reply whose parameters or networks are not the expected ones."""
        if self.params is None:
            return
        found = _params(reply)
        if len(found) != len(self.params):
            raise WireError(f"it brings {len(found)} sets of parameters, not {len(self.params)}")
        if (archs := _archs(reply)) != self.archs:
            raise WireError(f"it brings the networks {_listed(archs)}, not {_listed(self.archs)}")
        odd = [shape for shape in _loose(reply) if shape not in self.loose]  # one that may be None may be missing
        if odd:
            raise WireError(f"a tensor has the shape {odd[0]}; expected: {', '.join(map(str, self.loose)) or 'none'}")
        for names, wanted in zip(found, self.params):
            if names.keys() != wanted.keys():
                odd = sorted(names.keys() ^ wanted.keys())[0]
                raise WireError(f"'{odd}' is {'missing' if odd in wanted else 'not asked for'}")
            wrong = next((k for k in names if names[k] != wanted[k]), None)
            if wrong is not None:
                raise WireError(f"'{wrong}' has the shape {names[wrong]}, not {wanted[wrong]}")


class Expectation:
    """Does every job once more, on shapes."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe = recipe
        self.classes = classes  # of the data: the network may have more
        self._machine = Hollow()
        self._last: tuple[Any, Expected] | None = None
        self._kept: dict[str, Any] = {}  # what a client would have kept of all jobs so far

    def of(self, job: Job, message: Any) -> Expected:
        """What a client that is sent this message answers; a broadcast is worked out once."""
        if self._last is None or self._last[0] is not message:
            self._last = message, self._worked_out(job, message)
        return self._last[1]

    def _worked_out(self, job: Job, message: Any) -> Expected:
        arguments = fields_of(placed(message, self._machine.device))
        # what a client may have kept changes what a reply holds and not what it looks like; but some jobs begin with it
        for kept in ({}, self._kept):
            client = self._client()
            client.state = dict(kept)
            try:
                reply = getattr(self.recipe.algorithm, job.name)(client, **arguments)
            except Exception:
                continue
            self._kept |= client.state
            size = sum(item.nbytes for item in each_params(reply))
            return Expected(_params(reply), _loose(reply), _archs(reply), size + SLACK)
        return Expected(None, [], [], 4 * size_of(message, "fp32")[1] + MOST)

    def _client(self) -> Client:
        side, channels, _ = self.recipe.model.shape
        classes = self.classes
        images = torch.empty((classes, channels, side, side), dtype=torch.uint8, device="meta")
        data = Dataset(images, torch.arange(classes), tuple(map(str, range(classes))))
        client = Client(self._machine, self.recipe.task, self.recipe.rounds, 0, Shard.whole(data))
        client.begin(Stream(("expectation",)), 0)
        return client


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


def _loose(message: Any) -> list[tuple[int, ...]]:
    return [tuple(item.shape) for item in each_params(message) if isinstance(item, torch.Tensor)]


def _params(message: Any) -> list[Names]:
    return [{k: tuple(t.shape) for k, t in item.items()} for item in each_params(message) if isinstance(item, Params)]
