"""Specs from text: parsed values are given their types, and keys are set by dotted paths."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pydantic

from effuse.core.errors import RecipeError, nearest
from effuse.core.grammar import Call, clip, parse
from effuse.core.registry import find, registry
from effuse.core.spec import Spec, accepts_text, describe, field_hints, item_hint, spec_type, text


def build(value: Any, hint: Any, where: str) -> Any:
    """Give a parsed value the type that `hint` asks for, resolving names among the known specs."""
    if isinstance(value, Call):
        base = spec_type(hint)
        if base is not None:
            return _build_spec(value, base, where)
        if accepts_text(hint) and not value.args and not value.kwargs:
            return value.name
        shown = f"{value.name}(...)" if value.args or value.kwargs else value.name
        listed = f"; write it in brackets: [{shown}]" if spec_type(item_hint(hint)) is not None else ""
        raise RecipeError(f"{where}: '{shown}' does not belong here; expected {describe(hint)}{listed}")
    if isinstance(value, str) and not accepts_text(hint) and spec_type(hint) is not None:
        return build(parse(value), hint, where)
    if isinstance(value, tuple):
        inner = item_hint(hint)
        return tuple(build(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
    return value


def build_text(source: str, hint: Any, where: str, before: Any = None) -> Any:
    """Parse text for a key of a known type. Where plain text is accepted, what cannot be parsed is taken as text.

    Specs that the new value must have and does not name are those of the value `before`, such as an algorithm's solver.
    """
    try:
        value = parse(source)
    except RecipeError as error:
        if accepts_text(hint):
            return source
        raise RecipeError(f"{where}: {error}") from None
    if accepts_text(hint) and spec_type(hint) is None and isinstance(value, Call):
        return source
    if isinstance(value, Call) and isinstance(before, Spec) and (base := spec_type(hint)) is not None:
        value = _completed(value, find(base, value.name, where), before)
    return build(value, hint, where)


def _completed(call: Call, cls: type[Spec], before: Spec) -> Call:
    """The call with the required specs that it leaves out and the value before it has."""
    hints, required = field_hints(cls), {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    named = {*list(hints)[: len(call.args)], *(key for key, _ in call.kwargs)}
    missing = [key for key in hints if key in required - named and spec_type(hints[key]) is not None]
    kept = [(key, parse(text(own))) for key in missing if isinstance(own := getattr(before, key, None), Spec)]
    return dataclasses.replace(call, kwargs=(*call.kwargs, *kept))


def _build_spec(call: Call, base: type[Spec], where: str) -> Spec:
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


def make(cls: type[Spec], values: dict[str, Any], where: str) -> Any:
    """Construct a spec. A wrong value is an error of one sentence."""
    try:
        return cls(**values)
    except ArithmeticError as error:  # a check divided by a value that is zero
        raise RecipeError(f"{where or cls.name}: these values do not go together: {error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in (where, *first["loc"]) if p != "")
        if first["type"] == "missing":
            raise RecipeError(f"{place}: {cls.name} needs a value for '{first['loc'][-1]}'") from None
        if first["type"] == "value_error":
            raise RecipeError(f"{where or cls.name}: {first['ctx']['error']}") from None
        key = first["loc"][0] if first["loc"] else ""
        messages = [e["msg"] for e in error.errors() if e["loc"][:1] == first["loc"][:1] and e["input"] is first["input"]]
        if len(messages) > 1:  # pydantic reports each member of a union, and adds the member's name to the place
            place = ".".join(str(p) for p in (where, key) if p != "")
        message = " or ".join(m[0].lower() + m[1:] for m in dict.fromkeys(messages))
        hint = field_hints(cls).get(str(key))
        base = spec_type(hint) or spec_type(item_hint(hint))
        if base is not None and first["type"] in ("is_instance_of", "dataclass_exact_type", "dataclass_type"):
            message = f"expected a {base.name.replace('_', ' ')}; {nearest('', (c.name for c in registry(base).values()))}"
        raise RecipeError(f"{place}: {clip(repr(first['input']))} is wrong, {message}") from None


def replace(value: Spec, path: list[str], sources: Mapping[str, str], where: str = "") -> Spec:
    """Set keys of the spec at a path from text of the grammar, all together: one may be valid only with another."""
    hints = field_hints(type(value))
    for key in path[:1] or sources:
        if key not in hints:
            raise RecipeError(f"{where or 'recipe'}: no key '{key}'; {nearest(key, hints)}")
    if not path:
        built = {
            key: build_text(source, hints[key], _below(where, key), getattr(value, key)) for key, source in sources.items()
        }
        return with_values(value, where, **built)
    key, place = path[0], _below(where, path[0])
    inner = getattr(value, key)
    if not isinstance(inner, Spec):
        wanted = ".".join([*path, next(iter(sources))])
        raise RecipeError(f"{place}: {inner!r} has no keys of its own, so '{wanted}' does not exist")
    return with_values(value, where, **{key: replace(inner, path[1:], sources, place)})


def reset_keys(before: Spec, after: Spec, where: str = "") -> list[str]:
    """The keys that `before` had set and that its replacement `after` leaves at their defaults."""
    reset: list[str] = []
    defaults = [{f.name: f.default for f in dataclasses.fields(s)} for s in (before, after)]
    for key in field_hints(type(after)):
        was, now = getattr(before, key, None), getattr(after, key)
        if was == now or key not in defaults[0]:
            continue
        if isinstance(was, Spec) and isinstance(now, Spec) and now != defaults[1][key]:
            reset += reset_keys(was, now, _below(where, key))
        elif now == defaults[1][key] and was != defaults[0][key]:
            reset.append(f"{_below(where, key)}={text(now, full=False)} (was {text(was, full=False)})")
    return reset


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def with_values(value: Spec, where: str, /, **changes: Any) -> Any:
    """A copy of a spec with some values changed, checked like a new one."""
    values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return make(type(value), values | changes, where)
