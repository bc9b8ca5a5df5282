"""Options that several commands share, and what they make of a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from effuse.core.recipe import Recipe
from effuse.recipes import find_recipe

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's name or call, or the path of a manifest.json.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Worker processes; by default one for each GPU where there are several.")
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds; short for --set rounds=N.")]
Clients = Annotated[int | None, typer.Option(min=1, help="Number of clients; short for --set clients=N.")]
Seed = Annotated[int | None, typer.Option(help="The run's seed; short for --set seed=N.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Profiled = Annotated[bool, typer.Option("--profile", help="Show where the time went; leave a trace.json in the run folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


def chosen(
    source: str, settings: list[str] | None, rounds: int | None = None, seed: int | None = None, clients: int | None = None
) -> tuple[str, Recipe, list[str]]:
    """The recipe that the command line asks for, after its name and before what its settings forgot."""
    name, recipe = find_recipe(source)
    shorthands = [f"{k}={v}" for k, v in (("rounds", rounds), ("seed", seed), ("clients", clients)) if v is not None]
    settings = [*(settings or []), *shorthands]
    return name, recipe.changed(settings), recipe.forgotten(settings)
