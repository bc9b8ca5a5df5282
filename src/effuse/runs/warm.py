"""Whether a run may take over the preparation of another: `effuse run --warm`."""

from collections.abc import Mapping

from effuse.core.capabilities import Prepares
from effuse.core.errors import RecipeError, RunError
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.spec import field_hints, text
from effuse.runs.folder import RunFolder

LATER = {"algorithm", "rounds", "evaluate", "sampler", "ema"}  # keys of a recipe that a preparation does not depend on


def require_same_preparation(recipe: Recipe, data: Mapping[str, str], warm: RunFolder) -> None:
    """Refuse a run whose preparation would end in something else than that of the run `warm`."""
    if not isinstance(recipe.algorithm, Prepares):
        raise RecipeError(f"--warm {warm.path}: {recipe.algorithm.name} has no preparation; leave --warm out")
    if recipe.budget is not None:
        raise RecipeError(f"--warm {warm.path}: with a budget, a run is charged for its own preparation; leave --warm out")
    manifest = read_manifest(warm.path)
    if not warm.prepared.exists():
        raise RunError(f"--warm {warm.path}: this run has not finished a preparation, so there is nothing to take over")
    if (key := difference(recipe, warm)) is not None:
        raise RunError(f"--warm {warm.path} was prepared with {key}; set it so, or leave --warm out")
    if manifest.get("data_sha256") != data:
        raise RunError(f"--warm {warm.path} was prepared on other data; restore the data, or leave --warm out")


def difference(recipe: Recipe, warm: RunFolder) -> str | None:
    """The first key, with both values in which a run's preparation differs from this recipe's; None if they are the same."""
    other = Recipe.restore(read_manifest(warm.path)["recipe"])
    theirs, mine = _decisive(other), _decisive(recipe.shaped(other.model.shape))
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        was, now = (text(of[key], full=False) if key in of else "nothing" for of in (theirs, mine))
        if was != now:
            return f"{key}={was}, not {now}"
    return None


def _decisive(recipe: Recipe) -> dict[str, object]:
    """Everything that a preparation depends on."""
    algorithm = recipe.algorithm
    keys = algorithm.preparation() if isinstance(algorithm, Prepares) else {}
    found: dict[str, object] = {key: getattr(recipe, key) for key in field_hints(Recipe) if key not in LATER}
    return found | {f"algorithm.{key}": value for key, value in keys.items()}
