"""What `feddiffuse.tuning` has found: the changes that its rule takes, with the arithmetic.

    python tools/choose.py runs/feddiffuse.tuning-reduced/table.json [--base plain|tuned]

The rule is that of docs/feddiffuse.md. Noise is the difference between two seeds of plain FULL, of FID and of KID. A change is
taken if it lowers FID by more than the noise; if FID moves by less, KID decides in the same way; if neither does, the simpler setting
stays. Of several values of one thing the lowest FID wins; a candidate that diverged is not taken. `--base tuned` judges the second
half: what goes and what comes in. A table with missing cells is refused: half of the candidates would be a choice by accident.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# of one thing at most one value is taken; in the order in which settings are written down, how a model samples last
THINGS: dict[str, tuple[str, ...]] = {
    "rate": ("rate-3e-4", "rate-1e-3", "rate-1e-3-decay"),
    "moments": ("kept",),
    "average": ("ema", "server-ema"),
    "batch": ("batch-64",),
    "target": ("v-cosine",),
    "weights": ("min-snr",),
    "sampler": ("clip", "steps-1000", "ddim-250", "dpm-50"),
}
TOGETHER = {"clip", "steps-1000"}  # settings of one sampler: neither excludes the other
NAMES = {"rate-1e-3-decay": ("rate-1e-3", "decay"), "v-cosine": ("v", "cosine")}


class Score(NamedTuple):
    fid: float
    kid: float


def scores(table: Mapping[str, Any], base: str) -> dict[tuple[str, int], Score]:
    """By change and seed, as far as cells are done; what a cell is judged by may be its averaged model."""
    found = {}
    for row in table["cells"]:
        labels = row["labels"]
        if labels["base"] == base and row["ours"] is not None:
            kid = row["metric"].replace("fid", "kid")
            found[labels["change"], labels["seed"]] = Score(row["ours"], row["also"][kid])
    return found


def missing(table: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    """Cells that these halves of the table need and that have neither a number nor failed."""
    rows = [row for row in table["cells"] if row["labels"]["base"] in bases]
    return [row["name"] for row in rows if row["ours"] is None and row["state"] != "failed"]


def better(one: Score, other: Score, noise: Score) -> int:
    """1 if `one` is lower by more than the noise, -1 if higher, 0 if neither FID nor KID tells."""
    for a, b, n in zip(one, other, noise):
        if abs(a - b) > n:
            return 1 if a < b else -1
    return 0


def noise_of(plain: Mapping[tuple[str, int], Score]) -> Score:
    first, second = (plain["none", seed] for seed in (1, 2))
    return Score(abs(first.fid - second.fid), abs(first.kid - second.kid))


def from_plain(found: Mapping[tuple[str, int], Score]) -> list[str]:
    """The changes of plain FULL that are taken."""
    noise, by = noise_of(found), {change: score for (change, seed), score in found.items() if seed == 1}
    taken: list[str] = []
    for values in THINGS.values():
        good = [v for v in values if v in by and better(by[v], by["none"], noise) > 0]
        if "rate-1e-3-decay" in good and "rate-1e-3" in by and better(by["rate-1e-3-decay"], by["rate-1e-3"], noise) <= 0:
            good.remove("rate-1e-3-decay")  # a decay is judged against the same rate without it
        best = min(good, key=by.__getitem__, default=None)
        if best is not None:
            taken += [v for v in good if v == best or {v, best} <= TOGETHER]
    return [name for value in taken for name in NAMES.get(value, (value,))]


def from_tuned(found: Mapping[tuple[str, int], Score], noise: Score) -> tuple[list[str], list[str]]:
    """What goes, because it is better without, and what comes in, because it is better with it."""
    base = found["none", 1]
    goes = [
        c.removeprefix("without-") for (c, _), s in found.items() if c.startswith("without-") and better(s, base, noise) > 0
    ]
    comes = [c.removeprefix("with-") for (c, _), s in found.items() if c.startswith("with-") and better(s, base, noise) > 0]
    return goes, comes


def told(found: Mapping[tuple[str, int], Score]) -> Sequence[str]:
    return [f"{change:>24}, seed {seed}: FID {s.fid:8.3f}, KID {s.kid:.5f}" for (change, seed), s in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="the table.json that `effuse reproduce feddiffuse.tuning` wrote")
    parser.add_argument("--base", choices=("plain", "tuned"), default="plain")
    parser.add_argument("--json", action="store_true", help="print the choice only, as JSON")
    asked = parser.parse_args()
    try:
        table = json.loads(asked.table.read_text())
        absent = missing(table, ["plain", asked.base])
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"{asked.table} is not a table.json of feddiffuse.tuning ({error!r}); run `effuse reproduce feddiffuse.tuning` first"
        )
    if not table["cells"]:
        sys.exit(f"{asked.table} has no cells; run `effuse reproduce feddiffuse.tuning` first")
    if absent:
        some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        sys.exit(f"{asked.table}: {len(absent)} missing ({some}); let `effuse reproduce` finish the table first")
    plain = scores(table, "plain")
    noise = noise_of(plain)
    if asked.base == "plain":
        choice: Any = from_plain(plain)
        lines = [*told(plain), f"taken: {', '.join(choice) or 'nothing'}"]
    else:
        tuned = scores(table, "tuned")
        goes, comes = from_tuned(tuned, noise)
        choice = {"goes": goes, "comes": comes}
        lines = [*told(tuned), f"goes: {', '.join(goes) or 'nothing'}", f"comes in: {', '.join(comes) or 'nothing'}"]
    print(json.dumps(choice) if asked.json else "\n".join([f"noise: FID {noise.fid:.3f}, KID {noise.kid:.5f}", *lines]))


if __name__ == "__main__":
    main()
