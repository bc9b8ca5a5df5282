"""How work is divided among programs: arithmetic that needs no triton."""

import math
from typing import NamedTuple

from effuse.fast.ops.kernels import ALIGNED

WIDTH = 32  # channels of a program with smaller groups: 64 bytes a row are read at full speed
WIDE = 64  # the same for small planes
SMALL_PLANE = 64
HELD = 8192  # elements that a program keeps in registers; otherwise it reads half as many at a time
SUMMED = 4096  # elements that a program adds to its sums at a time
SUMMERS = 512  # programs for the rows of a sum: four for each multiprocessor of a large GPU


def tiling(C: int, P: int, groups: int, tensors: int) -> dict[str, int]:
    """How a plane of P positions and C channels is divided: a program has whole groups, of about WIDTH channels."""
    D = C // groups
    wanted = WIDE if P <= SMALL_PLANE else WIDTH
    step = _fitting(C, D, wanted)
    CHUNK = D * min(groups, step * max(1, wanted // (D * step)))
    BC, every = _power(CHUNK), _power(P)
    alone = CHUNK == C  # an image's only program has a multiprocessor to itself
    held = HELD if alone else HELD // tensors
    whole = every * BC <= held
    BP = every if whole else max(1, (held if alone else held // 2) // BC)
    return {"D": D, "CHUNK": CHUNK, "BC": BC, "BP": BP, "WHOLE": whole, "num_warps": warps(BP * BC)}


class Columns(NamedTuple):
    """How a sum over rows is divided: programs of `each` rows, read in tiles of BR rows and BC columns."""

    programs: int
    each: int
    BR: int
    BC: int


def columns(C: int, rows: int, last: bool = False) -> Columns:
    """Many programs for many rows. For few rows, and in the `last` step, one for each few columns."""
    widest = 16 if last else WIDE
    together = math.gcd(C, widest)
    BC = together if together >= widest // 2 else min(widest, _power(C))  # without columns out of bounds, if possible
    BR = SUMMED // BC
    turns = max(1, -(-rows // BR))
    each = BR * (turns if last else -(-turns // SUMMERS))
    return Columns(max(1, -(-rows // each)), each, BR, BC)


def warps(elements: int) -> int:
    """Sixteen elements a thread: two loads of sixteen bytes in flight."""
    return max(1, min(32, elements // 512))


def _fitting(C: int, D: int, wanted: int) -> int:
    """The number of groups that aligns all programs to sixteen bytes; to eight or four if that exceeds the wanted channels.

    Without alignment, numbers are read one by one: pruned networks have groups of three, five or nine channels.
    """
    together = math.gcd(C, ALIGNED)  # the best alignment of rows of C channels
    while together > 1 and D * (together // math.gcd(D, together)) > wanted:
        together //= 2
    return together // math.gcd(D, together)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
