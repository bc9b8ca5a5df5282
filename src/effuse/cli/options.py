"""Options that several commands share, and the recipe that they select."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.core.errors import MissingError, RecipeError, misspelt
from effuse.core.recipe import Recipe
from effuse.recipes import find_recipe

NAMED = "A name that `effuse list` prints, such as demo, or a file: one of `effuse new`, or a run's manifest.json."
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help=NAMED),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe; may be repeated.")
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of worker processes; by default one per GPU if there are several GPUs.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="PATH", help="Your own images: a folder or an .npz file; same as --set data=SOURCE."),
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds; same as --set rounds=N.")]
Clients = Annotated[int | None, typer.Option(min=1, help="Number of clients; same as --set clients=N.")]
Seed = Annotated[int | None, typer.Option(help="The run's seed; same as --set seed=N.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Send numbers to wandb, trackio, tensorboard or mlflow; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")]
Profiled = Annotated[
    bool, typer.Option("--profile", help="Show where the time went, and write trace.json to the run folder.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]


def chosen(
    source: str,
    settings: list[str] | None,
    rounds: int | None = None,
    seed: int | None = None,
    clients: int | None = None,
    data: str | None = None,
) -> tuple[str, Recipe, list[str]]:
    """The name of the selected recipe, the recipe with its settings, and warnings about them."""
    name, recipe = find_recipe(source)
    for setting in settings or []:
        key, _, value = setting.partition("=")
        if key.strip() == "data" and Path(value).expanduser().exists():
            raise RecipeError(
                f"--set {setting}: say how it is to be read, by `--data {value}` or --set 'data={_read(value)}'"
            )
    if data is not None:
        settings = [f"data={_read(data) if '(' not in data else data}", *(settings or [])]
    shorthands = [f"{k}={v}" for k, v in (("rounds", rounds), ("seed", seed), ("clients", clients)) if v is not None]
    settings = [*(settings or []), *shorthands]
    return name, recipe.changed(settings), recipe.forgotten(settings)


def _read(path: str) -> str:
    """The source that reads a path: an archive, or a folder of images."""
    if not Path(path).expanduser().exists():
        remedy = misspelt(Path(path)) or "give a folder of images, an .npz file, or a source such as 'folder(\"scans\")'"
        raise MissingError(f"--data {path}: not found; {remedy}")
    # in double quotes, since a shell's are single ones
    return f"{'npz' if path.endswith('.npz') else 'folder'}({json.dumps(path, ensure_ascii=False)})"
