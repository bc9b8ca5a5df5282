"""Seeds for tuning and seeds for results, which never overlap."""

from collections.abc import Sequence

from effuse.core.errors import RecipeError

FIRST_TUNING_SEED = 100


def refuse_results(table: str, seeds: Sequence[int]) -> None:
    """Refuse a table of results on tuning seeds."""
    if any(seed >= FIRST_TUNING_SEED for seed in seeds):
        raise RecipeError(f"{table}: seeds from {FIRST_TUNING_SEED} on are for tuning; choose lower ones")


def refuse_tuning(table: str, seed: int) -> None:
    """Refuse tuning on a seed for results."""
    if seed < FIRST_TUNING_SEED:
        raise RecipeError(f"{table}: seed {seed} is for results; choose {FIRST_TUNING_SEED} or more")
