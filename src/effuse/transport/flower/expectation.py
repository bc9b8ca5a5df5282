"""What a reply must look like, found by doing the job on shapes: a wrong one is refused before anyone averages it."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from effuse.core.algorithm import Job, fields_of
from effuse.core.data import Dataset, Shard
from effuse.core.errors import EffuseError, WireError
from effuse.core.ledger import size_of
from effuse.core.message import is_message
from effuse.core.model import Arch, Model
from effuse.core.params import Params
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.visit import each_params, map_params, placed
from effuse.core.workbench import Client
from effuse.machines.hollow import Hollow

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


class KeptState(dict[str, Any]):
    """What a client would have kept, as far as it is known; `missed` is what a job looked for in vain."""

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
        return self[key] if key in self else default

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(key, *default) if key in self or default else self.__missing__(key)


class Expectation:
    """Does every job once more, on shapes.

    Some jobs cannot be done so: a shape has no numbers to decide by, what clients kept before a resumption is unknown, and the shard that
    stands in for theirs may be refused. That is said once per job, and its replies are checked by type and size alone. Any other error is
    the algorithm's own and is raised.
    """

    def __init__(self, recipe: Recipe, classes: int, say: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.classes = classes  # of the data: the network may have more
        self.say = say
        self._machine = Hollow()
        self._last: tuple[Any, Expected] | None = None
        self._kept: dict[str, Any] = {}  # what a client would have kept of all jobs so far
        self._partial = False  # clients may have kept more than that
        self._said: set[str] = set()  # names of jobs

    def of(self, job: Job, message: Any, resumed: bool = False) -> Expected:
        """What a client that is sent this message answers; a broadcast is worked out once. `resumed`: clients have state already."""
        self._partial |= resumed and not self._kept
        if self._last is None or self._last[0] is not message:
            self._last = message, self._worked_out(job, message)
        return self._last[1]

    def _worked_out(self, job: Job, message: Any) -> Expected:
        meta = self._machine.device
        messages = [placed(message, meta)]
        if _loose(
            message
        ):  # they keep their numbers where a job needs them, as in a rehearsal; a copy, for a job might write on it
            messages.append(copy.deepcopy(map_params(message, lambda tensor: tensor.to(meta))))
        reason: Exception
        for sent in messages:
            # what a client may have kept changes what a reply holds and not what it looks like; but some jobs begin with it
            for known in [{}, self._kept] if self._kept else [{}]:
                client = self._client()
                client.state = state = KeptState(known)
                try:
                    reply = getattr(self.recipe.algorithm, job.name)(client, **fields_of(sent))
                except Exception as error:  # with all that is known of the state, it must be excused
                    if known is not self._kept and self._kept:
                        continue
                    if not (_about_shapes(error) or self._about_state(error, state) or isinstance(error, EffuseError)):
                        error.add_note(
                            f"in job '{job.name}' of {self.recipe.algorithm.name}, done on shapes before its orders go out"
                        )
                        raise
                    reason = error
                    continue
                self._kept |= state
                size = sum(item.nbytes for item in each_params(reply))
                return Expected(_params(reply), _loose(reply), _archs(reply), size + SLACK)
        self._partial = True  # what it keeps is unknown from here on
        if job.name not in self._said:
            self._said.add(job.name)
            why = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
            self.say(f"job '{job.name}' cannot be done on shapes, so its replies are checked by type and size alone ({why})")
        return Expected(None, [], [], 4 * size_of(message, "fp32")[1] + MOST)

    def _about_state(self, error: Exception, state: KeptState) -> bool:
        """Whether a job failed for want of what its client keeps: it says so itself, or it may be so where not all is known."""
        unkept = isinstance(error, KeyError) and error.args[:1] and error.args[0] in state.missed
        return bool(unkept or (self._partial and state.missed))

    def _client(self) -> Client:
        side, channels, _ = self.recipe.model.shape
        classes = self.classes
        images = torch.empty((classes, channels, side, side), dtype=torch.uint8, device="meta")
        data = Dataset(images, torch.arange(classes), tuple(map(str, range(classes))))
        client = Client(self._machine, self.recipe.task, self.recipe.rounds, 0, Shard.whole(data))
        client.begin(Stream(("expectation",)), 0)
        return client


def _about_shapes(error: Exception) -> bool:
    """Whether torch says that a tensor without numbers cannot do this."""
    kinds = (
        RuntimeError,
        NotImplementedError,
        TypeError,
    )  # a NotImplementedError that a job raises itself speaks of no tensor
    return (
        isinstance(error, kinds)
        and re.search(r"(?<![a-z])meta(?![a-z])|Tensor\.__format__", str(error), re.IGNORECASE) is not None
    )


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
