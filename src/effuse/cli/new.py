"""`effuse new`: write a recipe file for your own images, with comments."""

import json
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Json
from effuse.core.errors import shown


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file is called NAME.toml.")],
    data: Annotated[Path, typer.Option(help="A folder of images with a subfolder for each class.")],
    clients: Annotated[int, typer.Option(min=1, help="Number of sites that share the images.")] = 3,
    side: Annotated[
        int | None, typer.Option(min=28, max=128, help="Pixels of the generated images; by default by their size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at a folder of images and write a recipe for them, which `effuse check` and `effuse run` take."""
    from effuse.tools.new import new_recipe

    path, found = new_recipe(name, data, clients, side)
    if as_json:
        print(json.dumps(found))
        return
    size = f"{found['images']:,} images in {found['classes']} classes, drawn at {found['chosen']} pixels"
    print(shown(f"{path}: {size}; next: `effuse check {path}`, then `effuse run {path}`"))
