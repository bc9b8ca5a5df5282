"""What the tuning of FedDiffuse has found: the changes that its rule takes, with the arithmetic.

    python tools/choose.py runs/feddiffuse.tuning-reduced/table.json       # of feddiffuse.tuning: which changes of the start
    python tools/choose.py runs/finalists/table.json                       # of feddiffuse.finalists: start or chosen, and which sampler

The rule is that of docs/feddiffuse.md. A change of the start is taken if it lowers FID by more than the noise, and KID too. Noise is
the difference between two seeds of the start, but at least a twenty-fifth of its FID. Of several values of one thing the lowest FID
wins; what diverged is not taken. Of the finalists the lowest FID wins. A table with missing cells is refused: half of the
candidates would be a choice by accident.
"""

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from effuse.recipes.feddiffuse import START, with_change

# of one thing at most one value is taken
THINGS: dict[str, tuple[str, ...]] = {
    "rate": ("rate-3e-4", "rate-2e-3", "without-decay"),  # 2e-3 has a decay of its own
    "moments": ("without-kept",),
    "norm": ("norm-1",),
    "average": ("ema", "server-ema"),
    "target": ("v", "v-cosine"),
    "loss": ("min-snr", "huber"),
    "batch": ("batch-64",),
}
LEAST = 0.04  # of the start's FID: two seeds may be alike by chance


class Score(NamedTuple):
    fid: float
    kid: float


def scores(table: Mapping[str, Any]) -> dict[str, Score]:
    """By the cell's name, as far as cells are done; what a cell is judged by may be its averaged model."""
    done = [row for row in table["cells"] if row["ours"] is not None]
    return {row["name"]: Score(row["ours"], row["also"][row["metric"].replace("fid", "kid")]) for row in done}


def missing(table: Mapping[str, Any]) -> list[str]:
    """Cells that have neither a number nor failed."""
    return [row["name"] for row in table["cells"] if row["ours"] is None and row["state"] != "failed"]


def noise_of(found: Mapping[str, Score]) -> float:
    first, second = (found[f"start-{seed}"].fid for seed in (1, 2))
    return max(abs(first - second), LEAST * first)


def changes(found: Mapping[str, Score]) -> list[str]:
    """The changes of the start that are taken."""
    start, noise = found["start-1"], noise_of(found)
    taken = []
    for values in THINGS.values():
        tried = {v: found[f"{v}-1"] for v in values if f"{v}-1" in found}
        good = {v: s for v, s in tried.items() if s.fid < start.fid - noise and s.kid < start.kid}
        taken += [min(good, key=good.__getitem__)] if good else []
    return taken


def winner(found: Mapping[str, Score]) -> str:
    return min(found, key=found.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="the table.json of feddiffuse.tuning or feddiffuse.finalists")
    parser.add_argument("--json", action="store_true", help="print the choice only, as JSON")
    asked = parser.parse_args()
    try:
        table = json.loads(asked.table.read_text())
        absent, found = missing(table), scores(table)
        tuning = "start-2" in [row["name"] for row in table["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{asked.table} is not a table.json of feddiffuse.tuning or feddiffuse.finalists ({error!r})")
    if absent:
        some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        sys.exit(f"{asked.table}: {len(absent)} missing ({some}); let `effuse reproduce` finish the table first")
    if not found or (tuning and not {"start-1", "start-2"} <= found.keys()):
        sys.exit(f"{asked.table}: there is nothing to judge by; the start itself has no number")
    if tuning:
        taken = changes(found)
        choice: Any = functools.reduce(with_change, taken, list(START))  # as `feddiffuse.finalists(chosen=...)` takes it
        last = [
            f"noise: FID {noise_of(found):.3f}",
            f"taken: {', '.join(taken) or 'nothing'}",
            f"chosen: {', '.join(choice)}",
        ]
    else:
        choice = winner(found)
        last = [f"winner: {choice}"]
    lines = [f"{name:>18}: FID {s.fid:8.3f}, KID {s.kid:.5f}" for name, s in found.items()]
    print(json.dumps(choice) if asked.json else "\n".join([*lines, *last]))


if __name__ == "__main__":
    main()
