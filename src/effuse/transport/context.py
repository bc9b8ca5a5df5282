"""What an engine is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from effuse.core.data import Dataset
from effuse.core.federation import Federation
from effuse.core.recipe import Recipe
from effuse.machines.eager import Eager


class EngineContext(NamedTuple):
    """Everything that a run has before there is a federation."""

    recipe: Recipe  # resolved
    train: Dataset
    machines: list[Eager]
    workers: int | None  # processes for clients that live here; None: as the devices suggest
    folder: Path
    say: Callable[[str], None]  # tells whoever watches


Engine = Callable[[EngineContext], Federation]
