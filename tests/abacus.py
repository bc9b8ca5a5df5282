"""Specs for tests."""

from typing import Literal

from effuse.core.build import build_text
from effuse.core.solvers import CosineDecay, Schedule
from effuse.core.spec import Spec, spec


@spec
class Abacus(Spec):
    """A spec with one field of every simple kind."""

    beads: int = 3
    rate: float = 0.5
    shut: bool = False
    note: str = "plain"
    where: str | None = None
    mode: Literal["slow", "fast"] = "slow"
    sizes: tuple[int, ...] = ()
    schedule: Schedule = CosineDecay()
    inner: Spec | None = None


@spec
class AbacusOfClay(Abacus):
    """A spec with its own and inherited keys."""

    clay: int = 1
    glaze: int = 2


def abacus(source: str) -> Abacus:
    return build_text(source, Abacus, "here")
