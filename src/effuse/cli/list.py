"""`effuse list`: recipes, tables and all parts of a recipe."""

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from effuse.cli import app
from effuse.cli.options import Json
from effuse.cli.progress import console
from effuse.core.errors import RecipeError, alike
from effuse.core.recipe import Recipe
from effuse.core.registry import registry
from effuse.core.spec import Spec, field_hints
from effuse.recipes import catalogue, find_recipe, tables
from effuse.tools.names import KINDS, Entry, first_line, functions, named

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
    known = {kind: {n: first_line(f) for n, f in sorted(found.items())} for kind, found in functions().items()}
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
    found = list(named(name))
    values: dict[str, str] = {}
    if name in catalogue() or not found:
        recipe = _recipe(name)
        values = {key: str(getattr(recipe, key)) for key in field_hints(Recipe)}
    if as_json:
        print(json.dumps({"named": [_plain(one) for one in found], "values": values}))
        return
    for one in found:
        _page(f"{one.kind} {one.name}: {one.about}", {key.name: key.words for key in one.keys})
        if one.kind == "recipe":
            _page("its values", values)
    if not found:
        _page(name, values)


def _plain(entry: Entry) -> dict[str, Any]:
    keys = {key.name: key.words for key in entry.keys}
    return {"kind": entry.kind, "name": entry.name, "about": entry.about, "keys": keys}


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
    return {_call(cls): first_line(cls) for cls in sorted(registry(base).values(), key=lambda c: c.name)}


def _names(calls: dict[str, str]) -> dict[str, str]:
    return {call.partition("(")[0]: line for call, line in calls.items()}


def _call(cls: Any) -> str:
    own = [k for k in field_hints(cls) if k not in ("transforms",)]
    return f"{cls.name}({', '.join(own)})" if len(own) <= 4 else f"{cls.name}({', '.join(own[:4])}, ...)"
