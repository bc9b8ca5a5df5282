"""Messages: the dataclasses that may cross the wire or be saved, since all their annotations are closed types."""

import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from torch import Tensor

from effuse.core.errors import WireError
from effuse.core.params import Buffers, Params
from effuse.core.spec import Spec


class Claim(enum.Enum):
    """What a field claims of its sender's data, as `size: Annotated[int, of_images]` declares it."""

    IMAGES = "the number of its images, in all or of each class"


of_images = Claim.IMAGES
T = TypeVar("T")
SCALARS = (bool, int, float, str)
MESSAGES: dict[str, type] = {}


@typing.overload
def message(cls: type[T]) -> type[T]: ...
@typing.overload
def message(*, name: str) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def message(cls: type | None = None, *, name: str | None = None) -> Any:
    """Declare a type that may cross the wire or be saved: a frozen dataclass whose annotations are all closed.

    `name` is its name on the wire. By default it is made of module and class, so moving either would change it.
    """
    if cls is None:
        return functools.partial(message, name=name)
    made: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    made.__wire_name__ = name or f"{made.__module__.rpartition('.')[2]}.{made.__qualname__}"
    for field, hint in message_hints(made).items():
        check(hint, f"{made.__qualname__}.{field}")
    other = MESSAGES.setdefault(message_name(made), made)
    if (other.__module__, other.__qualname__) != (made.__module__, made.__qualname__):
        raise WireError(f"two messages are called '{message_name(made)}': in {other.__module__} and in {made.__module__}")
    MESSAGES[message_name(made)] = made
    return made


def message_name(cls: Any) -> str:
    """The name of a message type on the wire."""
    return str(cls.__wire_name__)


def is_message(cls: Any) -> bool:
    return isinstance(cls, type) and MESSAGES.get(getattr(cls, "__wire_name__", "")) is cls


def message_hints(cls: type) -> dict[str, Any]:
    return _message_hints(cls)


@functools.cache
def _message_hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def claims(cls: Any) -> dict[str, Claim]:
    """The fields of a message that claim something of its sender's data; a `weight` may be its number of images."""
    return _claims(cls)


@functools.cache
def _claims(cls: Any) -> dict[str, Claim]:
    hints = typing.get_type_hints(cls, include_extras=True) if is_message(cls) else {}
    return {
        name: mark for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Claim)
    }


def check(hint: Any, where: str) -> None:
    """Refuse an annotation that is not closed."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (None, type(None), Tensor, Params, Buffers, *SCALARS) or is_message(hint):
        return
    if isinstance(hint, type) and issubclass(hint, Spec):
        return
    if origin is Literal and all(isinstance(a, SCALARS) for a in args):
        return
    if origin in (Union, types.UnionType, list, tuple) and args:
        for arg in args:
            if arg is not Ellipsis:
                check(arg, where)
        if origin not in (list, tuple):
            _check_distinct(args, where)
        return
    if origin is dict and args and args[0] in (int, str):
        return check(args[1], where)
    raise WireError(
        f"{where} is annotated {hint!r}, which may not cross the wire; use numbers, text, Params, tensors, messages, "
        "or lists, tuples and dicts of them with their types spelt out"
    )


def _check_distinct(args: tuple[Any, ...], where: str) -> None:
    """Refuse a union whose members have the same JSON form, since decoding could not tell them apart."""
    for a, b in itertools.combinations(args, 2):
        equal = json_form(a) is not None and json_form(a) is json_form(b)
        if equal and not (is_plain(a) and is_plain(b)) and not (is_message(a) and is_message(b)):
            raise WireError(f"{where} may be {a!r} or {b!r}, which have the same form on the wire; use two fields")


def is_plain(hint: Any) -> bool:
    """Whether JSON has values of the annotated type."""
    return hint in (None, type(None), *SCALARS) or get_origin(hint) is Literal


def json_form(hint: Any) -> type | None:
    """The JSON type of a value of the annotated type."""
    if is_message(hint):
        return dict
    if isinstance(hint, type) and issubclass(hint, Spec):
        return str
    forms = {Tensor: int, float: int, Params: list, Buffers: list, tuple: list, int: int, str: str, list: list, dict: dict}
    return type(get_args(hint)[0]) if get_origin(hint) is Literal else forms.get(get_origin(hint) or hint)
