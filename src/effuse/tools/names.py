"""Every name that a recipe may use, with its keys: what `effuse list` prints and the reference pages show."""

import contextlib
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from effuse.core.aggregate import Reducer
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition, Source
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.registry import plain, registry
from effuse.core.sampler import Sampler
from effuse.core.solvers import Schedule, Solver
from effuse.core.spec import Spec, describe, field_hints, text
from effuse.core.task import Task
from effuse.data.transforms import Transform
from effuse.metrics.encoders import Encoder
from effuse.privacy.histogram import Disclosure
from effuse.recipes import catalogue, tables
from effuse.tasks.schedules import NoiseSchedule

KINDS: dict[str, type[Spec]] = {
    "data": Source,
    "partition": Partition,
    "model": Arch,
    "task": Task,
    "algorithm": Algorithm,
    "solver": Solver,
    "sampler": Sampler,
    "metric": Metric,
    "histogram": Disclosure,
    "transform": Transform,
    "noise": NoiseSchedule,
    "rate": Schedule,
    "encoder": Encoder,
    "aggregate": Reducer,
}
OTHER = "part of a recipe"


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a recipe, table or spec."""

    name: str
    type: str
    default: str | None  # None: it must be given
    remark: str = ""

    @property
    def words(self) -> str:
        """The key in one line."""
        value = ", must be given" if self.default is None else f" = {self.default}"
        return f"{self.type}{value}" + (f"; {self.remark}" if self.remark else "")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name with its first line of documentation and its keys."""

    kind: str
    name: str
    about: str
    keys: tuple[Key, ...]


def functions() -> dict[str, dict[str, Any]]:
    """The recipes and the tables, by name."""
    return {"recipe": catalogue(), "table": tables()}


def named(name: str) -> Iterator[Entry]:
    """The recipe, the table and the spec of this name."""
    for kind, found in functions().items():
        if name in found:
            yield function_entry(kind, name, found[name])
    cls = registry(Spec).get(plain(name))
    if cls is not None:
        yield spec_entry(cls)


def function_entry(kind: str, name: str, function: Any) -> Entry:
    """What a recipe's or table's function takes."""
    hints, keys = typing.get_type_hints(function), inspect.signature(function).parameters
    return Entry(kind, name, first_line(function), tuple(_key(k, hints[k], p.default) for k, p in keys.items()))


def spec_entry(cls: type[Spec]) -> Entry:
    """The keys of a spec, with the comments beside them."""
    defaults, remarks = {f.name: f.default for f in dataclasses.fields(cls)}, _remarks(cls)
    keys = tuple(_key(k, hint, defaults[k], remarks.get(k, "")) for k, hint in field_hints(cls).items())
    return Entry(kind_of(cls), cls.name, first_line(cls), keys)


def kind_of(cls: type[Spec]) -> str:
    return next((kind for kind, base in KINDS.items() if issubclass(cls, base)), OTHER)


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _key(name: str, hint: Any, default: Any, remark: str = "") -> Key:
    needed = default in (dataclasses.MISSING, inspect.Parameter.empty)
    return Key(name, describe(hint), None if needed else text(default, full=False), remark)


def _remarks(cls: type) -> dict[str, str]:
    """The comments beside a spec's keys; a subclass replaces those that it inherits."""
    sources = []
    for owner in reversed([c for c in cls.__mro__ if issubclass(c, Spec)]):
        with contextlib.suppress(OSError):  # defined at a prompt, or installed without source
            sources.append(inspect.getsource(owner))
    return dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", "\n".join(sources), re.MULTILINE))
