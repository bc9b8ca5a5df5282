"""Find recipes and tables by name: `demo`, `feddiffuse.full(profile="code")`, `feddiffuse.table1`. Each is a function."""

import functools
import importlib
import inspect
import os
import pkgutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

from effuse.core.build import build
from effuse.core.errors import RecipeError, alike, nearest
from effuse.core.grammar import Call, parse
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.recipe_file import SUFFIX, beside, read_recipe
from effuse.core.table import Table


@functools.cache
def catalogue() -> dict[str, Callable[..., Recipe]]:
    """Every public function of this package's modules that returns a Recipe; `demo.demo` is called `demo`."""
    return _functions(Recipe)


@functools.cache
def tables() -> dict[str, Callable[..., Table]]:
    """Every public function of this package's modules that returns a Table."""
    return _functions(Table)


def _functions(kind: type) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        loaded = importlib.import_module(module.name)
        short = module.name.removeprefix(f"{__name__}.").partition(".")[0]  # a paper's recipes may be in a folder
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            local = function.__module__ == loaded.__name__ and not name.startswith("_")
            if local and typing.get_type_hints(function).get("return") is kind:
                found[short if name == short else f"{short}.{name}"] = function
    return found


def find_recipe(source: str) -> tuple[str, Recipe]:
    """A name for the recipe, and the recipe behind a name, a call, or the path of a manifest."""
    if source.endswith(SUFFIX) and "(" not in source:
        return Path(source).stem, read_recipe(Path(source))
    # a recipe takes precedence over a folder of the same name
    path = source.endswith(".json") or ("/" in source and "(" not in source)
    if path or (source not in catalogue() and os.path.exists(source)):
        manifest = read_manifest(Path(source))
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        return str(manifest.get("name") or "run"), beside(Recipe.restore(manifest["recipe"]), folder)
    if "(" not in source and source not in {**catalogue(), **tables()}:
        remedy = alike(source, catalogue()) or "`effuse list` shows every name"
        raise RecipeError(f"there is neither a recipe '{source}' nor a run folder or file of that name; {remedy}")
    call = parse(source)
    if isinstance(call, Call) and call.name in tables():
        raise RecipeError(f"'{call.name}' is a table and not one recipe; run its cells with `effuse reproduce {call.name}`")
    return _called("recipe", source, call, catalogue())


def find_table(source: str) -> tuple[str, Table]:
    """The table behind a name or a call."""
    return _called("table", source, parse(source), tables())


def _called(kind: str, source: str, call: Any, known: dict[str, Callable[..., Any]]) -> tuple[str, Any]:
    """The name of a function of the catalogue, and its result for the arguments of a parsed call."""
    if not isinstance(call, Call):
        raise RecipeError(f"'{source}' is not a {kind}; {nearest(source, known)}")
    function = known.get(call.name)
    if function is None:
        raise RecipeError(f"no {kind} '{call.name}'; {nearest(call.name, known)}")
    hints = typing.get_type_hints(function)
    names = list(inspect.signature(function).parameters)
    if len(call.args) > len(names):
        raise RecipeError(f"{kind} {call.name} takes {len(names) or 'no'} arguments, got {len(call.args)}")
    given = dict(zip(names, call.args)) | dict(call.kwargs)
    for key in given:
        if key not in names:
            remedy = nearest(key, names) if names else "it takes none"
            raise RecipeError(f"{kind} {call.name} has no argument '{key}'; {remedy}")
    for key, value in given.items():
        given[key] = build(value, hints[key], f"{call.name}.{key}")
        choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is typing.Literal else ()
        if choices and given[key] not in choices:
            raise RecipeError(f"{kind} {call.name}: {key}={given[key]!r}; {nearest(str(given[key]), map(str, choices))}")
    strict = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True)
    try:
        return call.name, pydantic.validate_call(config=strict)(function)(**given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecipeError(f"{kind} {call.name}: {place}: {first['msg'][0].lower() + first['msg'][1:]}") from None
