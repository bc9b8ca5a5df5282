"""Specs: frozen, validated values that print, parse and travel in one closed grammar.

A spec is a dataclass of plain choices: a data source, a partition, an architecture, a solver, an algorithm, a whole recipe.
The grammar has literals, lists and calls, `label_skew(beta=0.5, mask=True)`; it is parsed with `ast` and never evaluated.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import threading
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Union, dataclass_transform, get_args, get_origin

import pydantic

from effuse.core.errors import RecipeError, nearest

LONGEST_LIST = 1_000_000  # `[6000] * 10` is allowed, filling the memory of whoever parses a manifest is not
# CPython 3.11 counts the depth of a tree once for all threads: when the collector let another one in halfway, whose message named a
# network too, both counted on, and the first ended in "AST constructor recursion depth mismatch"
PARSING = threading.Lock()
SPEC_PACKAGES = ("core", "data", "tasks", "diffusion", "models", "privacy", "metrics", "algorithms")


class Spec:
    """Base of every spec; a subclass is known by its snake_case name, or by `class X(Base, name="x")`."""

    name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __str__(self) -> str:
        return text(self, full=False)

    __repr__ = __str__  # an error that shows a value shows what a reader could write


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type) -> type:
    """Declare a spec: a frozen keyword-only dataclass whose values are checked against their annotations."""
    config = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config, repr=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed `name(args, key=value)` whose target type is not known yet."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def parse(source: str) -> Any:
    """Turn text of the grammar into literals, tuples and `Call`s; `hf:NAME` is short for `hf("NAME")`."""
    prefixed = re.fullmatch(r"([a-z_]+):(\S+)", source.strip())
    if prefixed:
        return Call(prefixed[1], (prefixed[2],))
    try:
        with PARSING:
            node = ast.parse(source.strip(), mode="eval").body
        if (n := _written_out(node)) > LONGEST_LIST:
            raise RecipeError(f"'{_clip(source)}' stands for {n} values, its lists written out; at most {LONGEST_LIST}")
        return _value(node, source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise RecipeError(f"cannot read '{_clip(source)}': expected a literal, a list or name(key=value)") from None


def _written_out(node: ast.AST) -> int:
    """How many values a text stands for: repeated lists multiply when nested, and add up when side by side."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return max(1, sum(map(_written_out, items)))
        case ast.BinOp(left=left, right=ast.Constant(value=int(times))):
            return _written_out(left) * max(1, times)
        case ast.Call(args=args, keywords=keywords):
            return 1 + sum(map(_written_out, args)) + sum(_written_out(k.value) for k in keywords)
    return 1


def _value(node: ast.AST, source: str) -> Any:
    match node:
        case ast.Constant(value=int(value)) if value.bit_length() > 64:
            pass  # nothing here counts that far, and Python refuses to print much longer ones
        case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value) as operand) if type(value) in (int, float):
            return -_value(operand, source)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_value(item, source) for item in items)
        case ast.BinOp(op=ast.Mult(), left=ast.List() as left, right=ast.Constant(value=int(times))):
            items = _value(left, source)
            return items * times
        case ast.Name() | ast.Attribute():
            return Call(_dotted(node, source))
        case ast.Call(func=func, args=args, keywords=keywords) if all(k.arg for k in keywords):
            kwargs = tuple((str(k.arg), _value(k.value, source)) for k in keywords)
            return Call(_dotted(func, source), tuple(_value(a, source) for a in args), kwargs)
    raise RecipeError(f"'{_clip(source)}': '{_clip(ast.unparse(node))}' is neither a literal, a list nor name(key=value)")


def _dotted(node: ast.AST, source: str) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value, source)}.{attr}"
    raise RecipeError(f"'{_clip(source)}': '{_clip(ast.unparse(node))}' is not a name")


def build(value: Any, hint: Any, where: str) -> Any:
    """Give a parsed value the type that `hint` asks for, resolving names among the known specs."""
    if isinstance(value, Call):
        base = spec_type(hint)
        if base is not None:
            return _build_spec(value, base, where)
        if accepts_text(hint) and not value.args and not value.kwargs:
            return value.name
        shown = f"{value.name}(...)" if value.args or value.kwargs else value.name
        raise RecipeError(f"{where}: '{shown}' does not belong here; expected {describe(hint)}")
    if isinstance(value, str) and not accepts_text(hint) and spec_type(hint) is not None:
        return build(parse(value), hint, where)
    if isinstance(value, tuple):
        inner = _item_hint(hint)
        return tuple(build(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
    return value


def build_text(source: str, hint: Any, where: str) -> Any:
    """Parse text for a place of a known type; where plain text is welcome, anything unparsable is that text."""
    try:
        value = parse(source)
    except RecipeError as error:
        if accepts_text(hint):
            return source
        raise RecipeError(f"{where}: {error}") from None
    if accepts_text(hint) and spec_type(hint) is None and isinstance(value, Call):
        return source
    return build(value, hint, where)


def _build_spec(call: Call, base: type, where: str) -> Spec:
    cls = find(base, call.name, where)
    hints = field_hints(cls)
    if len(call.args) > len(hints):
        raise RecipeError(f"{where}: {cls.name} takes at most {len(hints)} values, got {len(call.args)}")
    given = list(zip(hints, call.args)) + list(call.kwargs)
    values: dict[str, Any] = {}
    for key, value in given:
        if key not in hints:
            raise RecipeError(f"{where}: {cls.name} has no key '{key}'; {nearest(key, hints)}")
        if key in values:
            raise RecipeError(f"{where}: {cls.name} is given '{key}' twice")
        values[key] = build(value, hints[key], f"{where}.{key}")
    return make(cls, values, where)


def make(cls: type, values: dict[str, Any], where: str) -> Any:
    """Construct a spec, telling a wrong value as one sentence."""
    try:
        return cls(**values)
    except ArithmeticError as error:  # a check that divides by a value which is zero
        raise RecipeError(f"{where or cls.name}: these values do not go together: {error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in (where, *first["loc"]) if p != "")
        if first["type"] == "missing":
            raise RecipeError(f"{place}: {cls.name} needs a value for '{first['loc'][-1]}'") from None
        if first["type"] == "value_error":
            raise RecipeError(f"{where or cls.name}: {first['ctx']['error']}") from None
        key = first["loc"][0] if first["loc"] else ""
        alike = [e["msg"] for e in error.errors() if e["loc"][:1] == first["loc"][:1] and e["input"] is first["input"]]
        if len(alike) > 1:  # pydantic tells each member of a union apart, in words of its own
            place = ".".join(str(p) for p in (where, key) if p != "")
        message = " or ".join(m[0].lower() + m[1:] for m in dict.fromkeys(alike))
        hint = field_hints(cls).get(key)
        base = spec_type(hint) or spec_type(_item_hint(hint))
        if base is not None and first["type"] in ("is_instance_of", "dataclass_exact_type", "dataclass_type"):
            message = f"expected a {base.name.replace('_', ' ')}; {nearest('', (c.name for c in registry(base).values()))}"
        raise RecipeError(f"{place}: {_clip(repr(first['input']))} is wrong, {message}") from None


def replace(value: Spec, path: list[str], sources: Mapping[str, str], where: str = "") -> Spec:
    """Set keys of the spec at a path from text of the grammar, all at once, for some are only right together."""
    hints = field_hints(type(value))
    for key in path[:1] or sources:
        if key not in hints:
            raise RecipeError(f"{where or 'recipe'}: no key '{key}'; {nearest(key, hints)}")
    if not path:
        built = {key: build_text(source, hints[key], _below(where, key)) for key, source in sources.items()}
        return with_values(value, where, **built)
    key, place = path[0], _below(where, path[0])
    inner = getattr(value, key)
    if not isinstance(inner, Spec):
        wanted = ".".join([*path, next(iter(sources))])
        raise RecipeError(f"{place}: {inner!r} has no keys of its own, so '{wanted}' leads nowhere")
    return with_values(value, where, **{key: replace(inner, path[1:], sources, place)})


def fallen_back(before: Spec, after: Spec, where: str = "") -> list[str]:
    """The keys of both that `before` had set and that `after`, which came in its place, has at their defaults."""
    found: list[str] = []
    defaults = [{f.name: f.default for f in dataclasses.fields(s)} for s in (before, after)]  # type: ignore[arg-type]
    for key in field_hints(type(after)):
        was, now = getattr(before, key, None), getattr(after, key)
        if was == now or key not in defaults[0]:
            continue
        if isinstance(was, Spec) and isinstance(now, Spec) and now != defaults[1][key]:
            found += fallen_back(was, now, _below(where, key))
        elif now == defaults[1][key] and was != defaults[0][key]:
            found.append(f"{_below(where, key)}={text(now, full=False)} (was {text(was, full=False)})")
    return found


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def with_values(value: Spec, where: str, /, **changes: Any) -> Any:
    """A copy of a spec with some values changed, checked like a new one."""
    values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
    return make(type(value), values | changes, where)


def text(value: Any, full: bool = True) -> str:
    """Print a value in the grammar; `full` names every key, otherwise only those that differ from their default."""
    if isinstance(value, Spec):
        shown = []
        for f in dataclasses.fields(value):  # type: ignore[arg-type]
            item = getattr(value, f.name)
            if full or item != f.default:
                shown.append(f"{f.name}={text(item, full)}")
        return f"{value.name}({', '.join(shown)})"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(text(item, full) for item in value) + "]"
    return repr(value)


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """The annotated keys of a spec class, its own before inherited ones, so that `shards(3)` means what it says."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = {f.name for f in dataclasses.fields(cls)}
    order = dict.fromkeys(key for c in cls.__mro__ for key in inspect.get_annotations(c))
    return {key: hints[key] for key in order if key in names}


def find(base: type, name: str, where: str) -> type:
    """The subclass of `base` with this name; case and underscores do not matter."""
    known = registry(base)
    found = known.get(plain(name))
    if found is None:
        kind = "name" if base is Spec else base.name.replace("_", " ")
        raise RecipeError(f"{where}: no {kind} '{name}'; {nearest(name, (c.name for c in known.values()))}")
    return found


def registry(base: type) -> dict[str, type]:
    """Every concrete spec below `base`, found by importing effuse's packages; two of one name are an error."""
    import_packages(SPEC_PACKAGES)
    known: dict[str, type] = {}
    queue = [base]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not dataclasses.is_dataclass(cls) or getattr(cls, "__abstractmethods__", None) or "__abstract__" in vars(cls):
            continue
        if "__dataclass_fields__" not in vars(cls) and (keys := _own_keys(cls)):
            place, ignored = f"{cls.__module__}: write @spec above class {cls.__qualname__}", ", ".join(keys)
            raise RecipeError(f"{place}; without it, what it says of {ignored} is ignored")
        other = known.setdefault(plain(cls.name), cls)
        if other is not cls and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RecipeError(f"two {base.__name__}s are called '{cls.name}': {other.__module__} and {cls.__module__}")
    return known


def _own_keys(cls: type) -> list[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [key for key in inspect.get_annotations(cls) if ClassVar not in (hints[key], get_origin(hints[key]))]


@functools.cache
def import_packages(packages: tuple[str, ...]) -> None:
    """Import every module of the named effuse packages, so that what they define can be found by name."""
    for package in packages:
        root = importlib.import_module(f"effuse.{package}")
        for module in pkgutil.iter_modules(root.__path__, f"{root.__name__}."):
            importlib.import_module(module.name)


def spec_type(hint: Any) -> type | None:
    """The spec class that an annotation asks for, if it does."""
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, Spec):
            return member
    return None


def accepts_text(hint: Any) -> bool:
    return any(m is str or isinstance(m, str) for m in _members(hint))


def describe(hint: Any) -> str:
    """An annotation in a reader's words."""
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


def _item_hint(hint: Any) -> Any:
    for member in _members(hint):
        if get_origin(member) is tuple:
            return get_args(member)[0]
    return object


def plain(name: str) -> str:
    """A name as it is looked up."""
    return name.lower().replace("_", "")


def _clip(source: str, limit: int = 120) -> str:
    return source if len(source) <= limit else source[: limit - 3] + "..."
