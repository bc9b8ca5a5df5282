"""`effuse list`: recipes, tables and all parts of a recipe."""

import contextlib
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from effuse.cli import app
from effuse.cli.options import Json
from effuse.cli.progress import console
from effuse.core.aggregate import Reducer
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition, Source
from effuse.core.errors import RecipeError, alike
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.recipe import Recipe
from effuse.core.registry import plain, registry
from effuse.core.sampler import Sampler
from effuse.core.solvers import Schedule, Solver
from effuse.core.spec import Spec, describe, field_hints, text
from effuse.core.task import Task
from effuse.data.transforms import Transform
from effuse.metrics.encoders import Encoder
from effuse.privacy.histogram import Disclosure
from effuse.recipes import catalogue, find_recipe, tables
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
WRAPPING: Any = {"break_long_words": False, "break_on_hyphens": False}  # values copied from the screen stay valid


@app.command("list")
def list_(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show the keys of this recipe, table or part, with their types and defaults."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List recipes, tables and all values that `--set` accepts; with NAME, show its keys."""
    if name is not None:
        _explain(name, as_json)
        return
    functions: dict[str, dict[str, Any]] = {"recipe": catalogue(), "table": tables()}
    known = {kind: {n: _first_line(f) for n, f in sorted(found.items())} for kind, found in functions.items()}
    known |= {kind: _calls(base) for kind, base in KINDS.items()}
    if as_json:
        print(json.dumps(known))
        return
    for kind, lines in known.items():
        _page(kind, _names(lines))
    print("`effuse list NAME` shows the keys of any of these")


def _explain(name: str, as_json: bool) -> None:
    """Explain a name. It may name both a recipe and an algorithm; of a recipe the values are shown too."""
    for kind, base in KINDS.items():
        if name in (kind, base.name):  # types in the output read "a solver", "a schedule"
            print(json.dumps(_calls(base))) if as_json else _page(kind, _names(_calls(base)))
            return
    found = list(_named(name))
    values: dict[str, str] = {}
    if name in catalogue() or not found:
        recipe = _recipe(name)
        values = {key: str(getattr(recipe, key)) for key in field_hints(Recipe)}
    if as_json:
        print(json.dumps({"named": found, "values": values}))
        return
    for one in found:
        _page(f"{one['kind']} {one['name']}: {one['about']}", one["keys"])
        if one["kind"] == "recipe":
            _page("its values", values)
    if not found:
        _page(name, values)


def _named(name: str) -> Iterator[dict[str, Any]]:
    """The recipe, the table and the spec of this name."""
    for kind, functions in (("recipe", catalogue()), ("table", tables())):
        if name in functions:
            keys = inspect.signature(functions[name]).parameters
            hints, defaults = typing.get_type_hints(functions[name]), {k: p.default for k, p in keys.items()}
            yield _entry(kind, name, functions[name], {k: hints[k] for k in keys}, defaults, {})
    cls = registry(Spec).get(plain(name))
    if cls is not None:
        kind = next((kind for kind, base in KINDS.items() if issubclass(cls, base)), "part of a recipe")
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        yield _entry(kind, cls.name, cls, field_hints(cls), defaults, _remarks(cls))


def _entry(
    kind: str, name: str, thing: Any, hints: dict[str, Any], defaults: dict[str, Any], remarks: dict[str, str]
) -> dict[str, Any]:
    keys = {}
    for key, hint in hints.items():
        needed = defaults[key] in (dataclasses.MISSING, inspect.Parameter.empty)
        value = ", must be given" if needed else f" = {text(defaults[key], full=False)}"
        keys[key] = f"{describe(hint)}{value}" + (f"; {remarks[key]}" if key in remarks else "")
    return {"kind": kind, "name": name, "about": _first_line(thing), "keys": keys}


def _remarks(cls: type) -> dict[str, str]:
    """The comments beside a spec's keys; a subclass replaces those that it inherits."""
    sources = []
    for owner in reversed([c for c in cls.__mro__ if issubclass(c, Spec)]):
        with contextlib.suppress(OSError):  # defined at a prompt, or installed without source
            sources.append(inspect.getsource(owner))
    return dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", "\n".join(sources), re.MULTILINE))


def _recipe(name: str) -> Recipe:
    known = {*catalogue(), *tables(), *KINDS, *(cls.name for cls in registry(Spec).values())}
    if re.fullmatch(r"[\w.]+", name) and name not in known and not Path(name).exists():  # neither a call nor a path
        raise RecipeError(f"nothing is called '{name}'; {alike(name, known) or '`effuse list` shows every name'}")
    return find_recipe(name)[1]


def _page(title: str, rows: dict[str, str]) -> None:
    """Print names and descriptions, wrapped to a terminal; in a file or a pipe each takes one line."""
    width, margin = console().width, max(map(len, rows), default=0) + 4
    print(textwrap.fill(title, width, **WRAPPING))
    for name, words in rows.items():
        first = f"  {name}".ljust(margin)
        lines = textwrap.wrap(words, width, initial_indent=first, subsequent_indent=" " * margin, **WRAPPING)
        print("\n".join(lines or [first.rstrip()]))


def _calls(base: type) -> dict[str, str]:
    return {_call(cls): _first_line(cls) for cls in sorted(registry(base).values(), key=lambda c: c.name)}


def _names(calls: dict[str, str]) -> dict[str, str]:
    return {call.partition("(")[0]: line for call, line in calls.items()}


def _call(cls: Any) -> str:
    own = [k for k in field_hints(cls) if k not in ("transforms",)]
    return f"{cls.name}({', '.join(own)})" if len(own) <= 4 else f"{cls.name}({', '.join(own[:4])}, ...)"


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
