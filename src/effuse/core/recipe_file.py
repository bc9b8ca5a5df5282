"""Recipe files: TOML with a key a line, whose values are in the grammar of recipes. Nothing in them is executed."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from effuse.core.build import with_values
from effuse.core.data import Source
from effuse.core.errors import RecipeError, misspelt
from effuse.core.recipe import Recipe
from effuse.core.spec import text

SUFFIX = ".toml"


def read_recipe(path: Path) -> Recipe:
    """The recipe of a file; relative paths in it are looked for beside the file first."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = misspelt(path) or "`effuse new NAME --data FOLDER` writes one"
        raise RecipeError(f"{path}: there is no such recipe file; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not a recipe file: {error}") from None
    saved = {}
    for key, value in found.items():
        if not isinstance(value, (str, bool, int, float)):
            raise RecipeError(f"{path}: {key} must be text in the grammar, a number, true or false; put it in quotes")
        saved[key] = value if isinstance(value, str) else text(value)
    try:
        return beside(Recipe.restore(saved), path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def beside(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the relative paths of its data that exist in `folder` taken from there."""
    changed: Recipe = with_values(recipe, "recipe", data=_placed(recipe.data, folder))
    return changed


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(item, folder) for item in value)
    if not isinstance(value, Source):
        return value
    keys = {f.name: _placed(getattr(value, f.name), folder) for f in dataclasses.fields(value)}
    path = keys.get("path")
    if isinstance(path, str) and not Path(path).expanduser().is_absolute() and (folder / path).exists():
        keys["path"] = str(folder / path)
    return with_values(value, "data", **keys)


def written(recipe: Recipe, comments: dict[str, str], head: str) -> str:
    """A recipe as the text of a file; keys without a comment are left at their defaults."""
    lines = [f"# {line}" for line in head.splitlines()]
    for key, comment in comments.items():
        value = json.dumps(text(getattr(recipe, key), full=False), ensure_ascii=False)
        lines += ["", *(f"# {line}" for line in comment.splitlines()), f"{key} = {value}"]
    return "\n".join(lines) + "\n"
