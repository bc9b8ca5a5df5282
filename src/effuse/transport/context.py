"""What an engine is given."""

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from effuse.core.data import Dataset
from effuse.core.federation import Federation
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.machines.eager import Eager


class EngineContext(NamedTuple):
    """Everything that a run has before its federation exists."""

    recipe: Recipe  # resolved
    train: Dataset
    machines: list[Eager]
    workers: int | None  # processes for clients of this machine; None: one for each GPU
    folder: Path
    say: Callable[[str], None]  # shows a sentence to the user
    protections: Mapping[int, Protection] = types.MappingProxyType({})  # of simulated clients' private data


Engine = Callable[[EngineContext], Federation]
