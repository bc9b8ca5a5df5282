"""A better FULL at the same communication: the changes, their selection, and their ablation."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.feddiffuse import Full
from effuse.core.errors import RecipeError, nearest
from effuse.core.recipe import Recipe
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddiffuse.methods import full
from effuse.recipes.feddiffuse.tables import SMALL, STAND_INS, TABLE_1

# changes of FULL as values of `--set`, in the order in which they are made; none adds traffic, images or parameters
CHANGES: dict[str, tuple[str, ...]] = {
    "decay": ("algorithm.local.schedule=cosine_decay()",),
    "rate-3e-4": ("algorithm.local.lr=3e-4",),
    "rate-1e-3": ("algorithm.local.lr=1e-3",),
    # without a warm-up and clipping, this rate diverges in the first steps
    "rate-2e-3": ("algorithm.local.lr=2e-3", "algorithm.local.schedule=cosine_decay(warmup=1)", "algorithm.local.clip=1.0"),
    "kept": ("algorithm.local.state=kept",),  # Adam's moments, from round to round
    "ema": ("algorithm.local.ema=0.999",),  # over a seventh of the 7,050 steps of a client
    "server-ema": ("ema=0.5",),
    "batch-64": ("algorithm.local.batch=64",),  # twice the steps on the same images
    "norm-1": ("algorithm.local.clip=1.0",),
    "v": ("task.target=v",),
    # with a cosine schedule, the first sampling step multiplies an error of epsilon by over 30, so v is the target
    "v-cosine": ("task.target=v", "task.schedule=cosine()"),
    "min-snr": ("task.min_snr=5.0",),
    "huber": ("task.distance=huber",),
    "clip": ("sampler.clip=True",),
    "large": ("sampler.clip=True", "sampler.variance=large"),
    "ddim-1000": ("sampler=ddim(steps=1000, clip=True, batch=1000)",),
    "ddim-250": ("sampler=ddim(steps=250, clip=True, batch=1000)",),
    "dpm-100": ("sampler=dpm_solver(steps=100, batch=1000)",),
}
SAMPLERS = ("clip", "large", "ddim-1000", "ddim-250", "dpm-100")
# the start, chosen from the literature
START = ("decay", "rate-1e-3", "kept", "clip")
# chosen by `finalists` and `samplers`; the sampler is that of plain FULL
CHOSEN = ("decay", "rate-2e-3", "kept", "batch-64", "v-cosine")
# the same changes, separated so that each can be left out alone
TUNED: dict[str, tuple[str, ...]] = {
    "rate": ("algorithm.local.lr=2e-3",),
    "decay": ("algorithm.local.schedule=cosine_decay(warmup=1)",),
    "norm": CHANGES["norm-1"],
    "kept": CHANGES["kept"],
    "batch": CHANGES["batch-64"],
    "velocity": CHANGES["v-cosine"],
}
# "rate with warm-up" and "v with cosine" are pairs; these leave out the second half of a pair
HALVES: dict[str, tuple[str, ...]] = {
    "start": ("algorithm.local.schedule=cosine_decay()",),
    "cosine": ("task.schedule=linear()",),
}


def with_change(names: Sequence[str], change: str) -> list[str]:
    """These changes and one more; `without-NAME` removes one, and a new rate replaces the old one."""
    if change.removeprefix("without-") not in CHANGES:
        raise RecipeError(f"feddiffuse: {change!r} is not a change; {nearest(change, CHANGES)}")
    if change.startswith("without-"):
        return [name for name in names if name != change.removeprefix("without-")]
    others = [name for name in names if not (change.startswith("rate-") and name.startswith("rate-"))]
    return sorted([*others, change], key=list(CHANGES).index)


def tuned(without: str = "") -> Recipe:
    """FULL with the chosen changes, or without one of them, or without half of a pair."""
    if without and without not in TUNED | HALVES:
        raise RecipeError(
            f"feddiffuse.tuned: without={without!r} is not one of its changes; {nearest(without, TUNED | HALVES)}"
        )
    parts = [settings for part, settings in TUNED.items() if part != without]
    return full().changed([*itertools.chain(*parts, HALVES.get(without, ()))])


def centralised(tuning: Literal["plain", "tuned"] = "plain") -> Recipe:
    """All of Fashion-MNIST in one place, for as many images as FULL, with the settings of FULL or of `tuned`."""
    plain = full()
    assert isinstance(plain.algorithm, Full)
    recipe = dataclasses.replace(plain, algorithm=Centralised(local=plain.algorithm.local))
    return recipe.changed([*itertools.chain(*TUNED.values())]) if tuning == "tuned" else recipe


def _settings(names: Sequence[str]) -> list[str]:
    return [setting for name in names for setting in CHANGES[name]]


# Selection uses seeds and real images that no reported number uses: the test images beyond the 5,000 of FIDELITY. Training
# images would favour a model that memorises them.
CHOOSING = (
    "evaluate.metrics=[fid(n=3000, reference=5000, skip=5000), kid(n=3000, reference=5000, skip=5000)]",
    "speed=compile",  # the cells share their recordings, so compiling pays
)
# a fifth of the training steps, a quarter of the sampling steps
REDUCED = ("rounds=5", "algorithm.local.epochs=3", "sampler.steps=250")
REDUCED_EMA = "algorithm.local.ema=0.995"  # over a seventh of the 1,410 steps of a client, as 0.999 is of 7,050
SEED, ANOTHER_SEED = 1, 2  # a change must gain more than the difference between two seeds
# changes of START; neighbours with the same task share recordings
TRIED = (
    "without-kept",
    "without-decay",
    "rate-3e-4",
    "norm-1",
    "rate-2e-3",
    "ema",
    "server-ema",
    "v",
    "v-cosine",
    "min-snr",
    "huber",
    "batch-64",
)


def tuning() -> Table:
    """Single changes of the start, at a fifth of the scale, measured on selection images."""
    cells = [_tried("start", START), _tried("start", START, ANOTHER_SEED), _tried("plain", ())]
    cells += [_tried(change, with_change(START, change)) for change in TRIED]
    title = "FedDiffuse FULL, K=5, IID: changes of the start at 5 rounds of 3 epochs, FID against selection images"
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("reduced"))


# the best values of what made the largest differences in `tuning`, and their combinations
FINALISTS = (("rate-2e-3",), ("rate-2e-3", "v-cosine"), ("rate-2e-3", "batch-64"), ("rate-2e-3", "v-cosine", "batch-64"))


def finalists(tried: tuple[tuple[str, ...], ...] = FINALISTS) -> Table:
    """The start against its best changes, at the paper's scale, measured on selection images."""
    cells = [_final("start", START)]
    cells += [_final("-and-".join(changes), functools.reduce(with_change, changes, list(START))) for changes in tried]
    title = "FedDiffuse FULL, K=5, IID: changes of the start at the paper's scale, FID against selection images"
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("paper"))


def samplers(chosen: tuple[str, ...] = CHOSEN) -> Table:
    """One setting, trained once at the paper's scale and sampled in several ways, measured on selection images."""
    none: list[str] = []
    trained = functools.reduce(with_change, (name for name in chosen if name not in SAMPLERS), none)
    ways = {"clip": ["clip"], "none": [], **{name: [name] for name in SAMPLERS if name != "clip"}}
    cells = [_final(way, [*trained, *sampler]) for way, sampler in ways.items()]
    title = f"FedDiffuse FULL, K=5, IID: {', '.join(trained)}, by its samplers, FID against selection images"
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("paper"))


def _choosing(scale: str) -> dict[str, Scale]:
    return {scale: Scale(), "smoke": _brief("reference=150, skip=150")}


def _tried(change: str, names: Sequence[str], seed: int = SEED) -> Cell:
    smaller = [REDUCED_EMA] if "ema" in names else []
    smaller += ["speed=graph"] if "batch-64" in names else []  # compiling another batch size does not pay for one cell
    return _choice({"change": change, "seed": seed}, names, (*CHOOSING, *REDUCED), smaller, seed)


def _final(setting: str, names: Sequence[str]) -> Cell:
    return _choice({"setting": setting}, names, CHOOSING, (), SEED)


def _choice(
    labels: dict[str, str | int], names: Sequence[str], first: Sequence[str], last: Sequence[str], seed: int
) -> Cell:
    return Cell(
        labels=labels,
        recipe="feddiffuse.full",
        settings=(*first, *_settings(names), *last, f"seed={seed}"),
        metric="fid_ema" if "server-ema" in names else "fid",
    )


def ablation() -> Table:
    """`feddiffuse.tuned`, each of its changes left out, plain FULL and the centralised baseline, at the paper's scale."""
    # the most informative first; neighbours with the same task share recordings
    places = [(setting, seed) for setting in ("tuned", "centralised-tuned", "plain") for seed in (2023, 2024, 2025)]
    places += [(f"without-{part}", 2023) for part in (*TUNED, *HALVES)] + [("centralised-plain", 2023)]
    title = "FedDiffuse FULL, K=5, IID: improvements at the same communication, and their ablation"
    scales = {"paper": Scale(), "smoke": _brief("reference=150")}
    cells = tuple(_ablated(*place) for place in places)
    also = ("fid_clipped", "kid", "class_mix")
    return Table(title=title, cells=cells, repeats="seed", against=("setting", "tuned"), also=also, scales=scales)


def _ablated(setting: str, seed: int) -> Cell:
    kind, _, which = setting.partition("-")
    recipe = {
        "tuned": "feddiffuse.tuned",
        "plain": "feddiffuse.full",
        "without": f'feddiffuse.tuned(without="{which}")',
        "centralised": f'feddiffuse.centralised(tuning="{which}")',
    }[kind]
    return Cell(
        labels={"setting": setting, "seed": seed},
        recipe=recipe,
        settings=(f"seed={seed}",),
        metric="fid",
        beside={"fid_clipped": TABLE_1["full", 5][0][0]} if setting == "plain" else {},
    )


def _brief(real: str) -> Scale:
    """The smoke scale for cells that set their own rates, batches or samplers."""
    few = f"n=200, encoder=classifier(), {real}"
    metrics = f"evaluate.metrics=[fid({few}), fid({few}, clipped=True), kid({few})]"
    settings = (*SMALL, metrics, "rounds=2", "algorithm.local.epochs=1", "sampler.steps=10", "speed=auto")
    averaged = {f"{name}_ema": f"{ours}_ema" for name, ours in STAND_INS.items()}
    return Scale(settings=settings, metrics=STAND_INS | averaged, comparable=False, label="run on digits")
