"""A better FULL at the same communication: what was tried, what was chosen, and what each change gives."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from effuse.algorithms.centralised import Centralised
from effuse.core.errors import RecipeError, nearest
from effuse.core.recipe import Recipe
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddiffuse.methods import full
from effuse.recipes.feddiffuse.tables import SMALL, STAND_INS, TABLE_1

# changes of FULL, as `--set` takes them, in the order in which they are made; none moves a byte more, shows an image more or
# changes the network
CHANGES: dict[str, tuple[str, ...]] = {
    "decay": ("algorithm.local.schedule=cosine_decay()",),
    "rate-3e-4": ("algorithm.local.lr=3e-4",),
    "rate-1e-3": ("algorithm.local.lr=1e-3",),
    # so high a rate wants a slower start: without, the first steps throw the network far off
    "rate-2e-3": ("algorithm.local.lr=2e-3", "algorithm.local.schedule=cosine_decay(warmup=1)", "algorithm.local.clip=1.0"),
    "kept": ("algorithm.local.state=kept",),  # Adam's moments, from round to round
    "ema": ("algorithm.local.ema=0.999",),  # over a seventh of the 7,050 steps of a client
    "server-ema": ("ema=0.5",),
    "batch-64": ("algorithm.local.batch=64",),  # twice the steps on the same images
    "norm-1": ("algorithm.local.clip=1.0",),
    "v": ("task.target=v",),
    # with a cosine, the first step back multiplies an error of epsilon by over 30: another target goes with it
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
# what the field's experience suggests, before anything is tried
START = ("decay", "rate-1e-3", "kept", "clip")
# what `finalists` and `samplers` then chose; the images are drawn as those of plain FULL
CHOSEN = ("decay", "rate-2e-3", "kept", "batch-64", "v-cosine")
# the same, taken apart so that each can be left out alone
TUNED: dict[str, tuple[str, ...]] = {
    "rate": ("algorithm.local.lr=2e-3",),
    "decay": ("algorithm.local.schedule=cosine_decay(warmup=1)",),
    "norm": CHANGES["norm-1"],
    "kept": CHANGES["kept"],
    "batch": CHANGES["batch-64"],
    "velocity": CHANGES["v-cosine"],
}
# what takes the place of a half of the two parts that are pairs; velocity alone stays, since noise as target needs the linear schedule
HALVES: dict[str, tuple[str, ...]] = {
    "start": ("algorithm.local.schedule=cosine_decay()",),
    "cosine": ("task.schedule=linear()",),
}


def with_change(names: Sequence[str], change: str) -> list[str]:
    """These changes and one more; `without-NAME` leaves one out, and a rate takes the place of a rate."""
    if change.removeprefix("without-") not in CHANGES:
        raise RecipeError(f"feddiffuse: {change!r} is no change; {nearest(change, CHANGES)}")
    if change.startswith("without-"):
        return [name for name in names if name != change.removeprefix("without-")]
    others = [name for name in names if not (change.startswith("rate-") and name.startswith("rate-"))]
    return sorted([*others, change], key=list(CHANGES).index)


def tuned(without: str = "") -> Recipe:
    """FULL with the changes that `finalists` and `samplers` chose, or with all but one of them, or but a half of a pair."""
    if without and without not in TUNED | HALVES:
        raise RecipeError(f"feddiffuse.tuned: without={without!r} is no part of it; {nearest(without, TUNED | HALVES)}")
    parts = [settings for part, settings in TUNED.items() if part != without]
    return full().changed([*itertools.chain(*parts, HALVES.get(without, ()))])


def centralised(tuning: Literal["plain", "tuned"] = "plain") -> Recipe:
    """All of Fashion-MNIST in one place, as many images as FULL is shown, with FULL's setting or with that of `tuned`."""
    plain = full()
    recipe = dataclasses.replace(plain, algorithm=Centralised(local=plain.algorithm.local))
    return recipe.changed([*itertools.chain(*TUNED.values())]) if tuning == "tuned" else recipe


def _settings(names: Sequence[str]) -> list[str]:
    return [setting for name in names for setting in CHANGES[name]]


# on seeds and real images that no figure of the paper's scale uses: the test images that are not among the 5,000 of FIDELITY;
# training images would flatter a model that learns them by heart
CHOOSING = (
    "evaluate.metrics=[fid(n=3000, reference=5000, skip=5000), kid(n=3000, reference=5000, skip=5000)]",
    "speed=compile",  # pays over all cells together, which share their recordings
)
# a fifth of the training, a quarter of the evaluations
REDUCED = ("rounds=5", "algorithm.local.epochs=3", "sampler.steps=250")
REDUCED_EMA = "algorithm.local.ema=0.995"  # over a seventh of the 1,410 steps of a client, as 0.999 is of 7,050
SEED, ANOTHER_SEED = 1, 2  # the difference of two runs is what a change must beat
# changes of START; neighbours of the same task share recordings
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
    """What may make a good start better: one change each, at a fifth of the scale and on images of its own."""
    cells = [_tried("start", START), _tried("start", START, ANOTHER_SEED), _tried("plain", ())]
    cells += [_tried(change, with_change(START, change)) for change in TRIED]
    title = "FedDiffuse FULL, K=5, IID: changes of a good start at 5 rounds of 3 epochs, FID against test images that are for choosing"
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("reduced"))


# the best values of what made the largest differences in `tuning`, and their combinations
FINALISTS = (("rate-2e-3",), ("rate-2e-3", "v-cosine"), ("rate-2e-3", "batch-64"), ("rate-2e-3", "v-cosine", "batch-64"))


def finalists(tried: tuple[tuple[str, ...], ...] = FINALISTS) -> Table:
    """The start against changes of it, at the paper's scale on the images that choose."""
    cells = [_final("start", START)]
    cells += [_final("-and-".join(changes), functools.reduce(with_change, changes, list(START))) for changes in tried]
    title = (
        "FedDiffuse FULL, K=5, IID: changes of the start at the paper's scale, FID against test images that are for choosing"
    )
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("paper"))


def samplers(chosen: tuple[str, ...] = CHOSEN) -> Table:
    """One setting, trained once at the paper's scale and sampled in several ways, on the images that choose."""
    trained = functools.reduce(with_change, (name for name in chosen if name not in SAMPLERS), [])
    ways = {"clip": ["clip"], "none": [], **{name: [name] for name in SAMPLERS if name != "clip"}}
    cells = [_final(way, [*trained, *sampler]) for way, sampler in ways.items()]
    title = (
        f"FedDiffuse FULL, K=5, IID: {', '.join(trained)}, by its samplers, FID against test images that are for choosing"
    )
    return Table(title=title, cells=tuple(cells), also=("kid", "kid_ema"), scales=_choosing("paper"))


def _choosing(scale: str) -> dict[str, Scale]:
    return {scale: Scale(), "smoke": _brief("reference=150, skip=150")}


def _tried(change: str, names: Sequence[str], seed: int = SEED) -> Cell:
    smaller = [REDUCED_EMA] if "ema" in names else []
    smaller += ["speed=graph"] if "batch-64" in names else []  # one cell does not pay for compiling another shape
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
    # the most telling first; neighbours of the same task share recordings
    places = [(setting, seed) for setting in ("tuned", "centralised-tuned", "plain") for seed in (2023, 2024, 2025)]
    places += [(f"without-{part}", 2023) for part in (*TUNED, *HALVES)] + [("centralised-plain", 2023)]
    title = "FedDiffuse FULL, K=5, IID: better at the same communication, and what each change gives"
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
    """The same for cells that differ in rates, batches or samplers, which are then left to them."""
    few = f"n=200, encoder=classifier(), {real}"
    metrics = f"evaluate.metrics=[fid({few}), fid({few}, clipped=True), kid({few})]"
    settings = (*SMALL, metrics, "rounds=2", "algorithm.local.epochs=1", "sampler.steps=10", "speed=auto")
    averaged = {f"{name}_ema": f"{ours}_ema" for name, ours in STAND_INS.items()}
    return Scale(settings=settings, metrics=STAND_INS | averaged, comparable=False, told="run on digits")
