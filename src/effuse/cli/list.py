"""`effuse list`: what can be named in a recipe."""

import inspect
import json
import textwrap
from typing import Annotated, Any

import typer

from effuse.cli import app
from effuse.cli.options import Json
from effuse.cli.progress import console
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition, Source
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.sampler import Sampler
from effuse.core.solvers import Schedule, Solver
from effuse.core.spec import field_hints, registry
from effuse.core.task import Task
from effuse.data.transforms import Transform
from effuse.diffusion.schedules import NoiseSchedule
from effuse.metrics.encoders import Encoder
from effuse.privacy.histogram import Disclosure
from effuse.recipes import catalogue, find_recipe, tables

KINDS: dict[str, type] = {
    "data": Source, "partition": Partition, "model": Arch, "task": Task, "algorithm": Algorithm, "solver": Solver,
    "sampler": Sampler, "metric": Metric, "histogram": Disclosure, "transform": Transform, "noise": NoiseSchedule,
    "rate": Schedule, "encoder": Encoder,
}  # fmt: skip
AS_WRITTEN: Any = {"break_long_words": False, "break_on_hyphens": False}  # what is copied from the screen must still be a value


@app.command("list")
def list_(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Show the keys of one recipe instead.")] = None,
    as_json: Json = False,
) -> None:
    """List recipes, tables and everything that `--set` can name; with a recipe, its keys and values."""
    if recipe is not None:
        _, found = find_recipe(recipe)
        keys = {key: str(getattr(found, key)) for key in field_hints(type(found))}
        print(json.dumps(keys)) if as_json else _page(recipe, keys)
        return
    functions: dict[str, dict[str, Any]] = {"recipe": catalogue(), "table": tables()}
    known = {kind: {n: _first_line(f) for n, f in sorted(found.items())} for kind, found in functions.items()}
    for kind, base in KINDS.items():
        known[kind] = {_call(cls): _first_line(cls) for cls in sorted(registry(base).values(), key=lambda c: c.name)}
    if as_json:
        print(json.dumps(known))
    else:
        for kind, lines in known.items():
            _page(kind, {call.partition("(")[0]: line for call, line in lines.items()})


def _page(title: str, rows: dict[str, str]) -> None:
    """Names and what is said of them, folded to a terminal; a file or a pipe has a line for each, as it can be searched by."""
    print(title)
    width, margin = console().width, max(map(len, rows)) + 4
    for name, words in rows.items():
        first = f"  {name}".ljust(margin)
        folded = textwrap.wrap(words, width, initial_indent=first, subsequent_indent=" " * margin, **AS_WRITTEN)
        print("\n".join(folded or [first.rstrip()]))


def _call(cls: Any) -> str:
    own = [k for k in field_hints(cls) if k not in ("transforms",)]
    return f"{cls.name}({', '.join(own)})" if len(own) <= 4 else f"{cls.name}({', '.join(own[:4])}, ...)"


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
