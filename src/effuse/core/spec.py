"""Specs: frozen, validated values that print, parse and travel in one closed grammar.

A spec is a dataclass of plain choices: a data source, a partition, an architecture, a solver, an algorithm, a whole recipe.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from typing import Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import pydantic

T = TypeVar("T")


class Spec:
    """Base of every spec. A subclass is known by its snake_case name, or by the one in `class X(Base, name="x")`."""

    name: ClassVar[str]
    if typing.TYPE_CHECKING:  # every concrete spec is a dataclass
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, name: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __str__(self) -> str:
        return text(self, full=False)

    __repr__ = __str__  # errors show values as a recipe would spell them


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """Declare a spec: a frozen keyword-only dataclass whose values are checked against their annotations."""
    config = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config, repr=False)
    return made


def text(value: Any, full: bool = True) -> str:
    """Print a value in the grammar; `full` names every key, otherwise only those that differ from their default."""
    if isinstance(value, Spec):
        shown = []
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if full or item != f.default:
                shown.append(f"{f.name}={text(item, full)}")
        return f"{value.name}({', '.join(shown)})"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(text(item, full) for item in value) + "]"
    return repr(value)


def field_hints(cls: type) -> dict[str, Any]:
    """The annotated keys of a spec class: its own first, then inherited ones, so that `shards(3)` sets its own first key."""
    return _field_hints(cls)


@functools.cache
def _field_hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = {f.name for f in dataclasses.fields(cls)}
    order = dict.fromkeys(key for c in cls.__mro__ for key in inspect.get_annotations(c))
    return {key: hints[key] for key in order if key in names}


def spec_type(hint: Any) -> type[Spec] | None:
    """The spec class in an annotation, if there is one."""
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, Spec):
            return member
    return None


def accepts_text(hint: Any) -> bool:
    return any(m is str or isinstance(m, str) for m in _members(hint))


def describe(hint: Any) -> str:
    """An annotation in words, for error messages."""
    words = []
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, Spec):
            words.append(f"{'an' if member.name[0] in 'aeiou' else 'a'} {member.name.replace('_', ' ')}")
        elif member is types.NoneType:
            words.append("None")
        elif get_origin(member) is tuple:
            words.append(f"a list, each {describe(get_args(member)[0])}")
        else:
            words.append(getattr(member, "__name__", None) or repr(member))
    return " or ".join(words)


def _members(hint: Any) -> list[Any]:
    """The alternatives of an annotation: a union's members, a Literal's values, or itself."""
    origin = get_origin(hint)
    if origin is typing.Annotated:
        return _members(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return [m for arg in get_args(hint) for m in _members(arg)]
    if origin is Literal:
        return list(get_args(hint))
    return [hint]


def item_hint(hint: Any) -> Any:
    for member in _members(hint):
        if get_origin(member) is tuple:
            return get_args(member)[0]
    return object
