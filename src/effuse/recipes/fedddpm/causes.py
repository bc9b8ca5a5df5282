"""Why the auxiliary set helps or harms FedDDPM: variations of the comparison's run, and experiments on digits."""

import dataclasses
from typing import Literal

from effuse.core.spec import text
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.fedddpm.comparison import as_tuned, evaluation_settings, scales
from effuse.recipes.fedddpm.methods import AS_IT_IS, Resized, setting
from effuse.recipes.fedddpm.tables import PARTITIONS, cell_of

LONG = Resized(warmup=48)
STEP = "algorithm.warmup.lr=5e-4"  # as for the centralised model: a warm-up has no client drift
# (method, size, settings): variations of A's quality, the training time, and the correction
CHANGES: dict[str, tuple[str, Resized, tuple[str, ...]]] = {
    "real": ("fedddpm", AS_IT_IS, ("algorithm.real=True",)),
    "warm-up-48": ("fedddpm", LONG, (STEP,)),
    "warm-up-rate": ("fedddpm", AS_IT_IS, (STEP,)),
    "longer": ("fedddpm", Resized(rounds=78), ()),  # as many as the matched FedAvg has
    "fedavg-matched-48": ("fedavg_matched", LONG, ()),
    "warm-up-48-longer": ("fedddpm", Resized(warmup=48, rounds=78), (STEP,)),
    "none": ("fedddpm", AS_IT_IS, ()),
    "small-step": ("fedddpm", AS_IT_IS, ("algorithm.central.lr=1e-5",)),
    "plus-warm-up-48": ("plus", LONG, (STEP,)),
    "plus-real": ("plus", AS_IT_IS, ("algorithm.real=True",)),
    "averaged-correction": ("fedddpm", AS_IT_IS, ("algorithm.central.ema=0.9",)),
}
REPEATED = ("real", "warm-up-48")
ALSO = ("fid_ema", "fid_auxiliary", "class_mix", "class_mix_ema", "class_mix_auxiliary")


def causes(seeds: tuple[int, ...] = (0, 1, 2), samples: int = 10_000) -> Table:
    """Variations of FedDDPM under the comparison's shards, the most informative first."""
    cells = []
    for name, seed in [*((n, seeds[0]) for n in CHANGES), *((n, s) for s in seeds[1:] for n in REPEATED)]:
        method, size, settings = CHANGES[name]
        s = setting("mnist", "scaled", size)
        more = (*evaluation_settings(s, method, 0, samples), *as_tuned(s, method), "ema=0.5", *settings)
        cell = cell_of(method, "mnist", {"partition": "shard"}, None, f"seed={seed}", *more, size=size)
        cells.append(dataclasses.replace(cell, labels={"change": name, "seed": seed}))
    title = "FedDDPM under shards: variations"
    return Table(title=title, cells=tuple(cells), repeats="seed", also=ALSO, scales=scales("mnist", AS_IT_IS))


# On digits, as in the comparison, a client takes 48 steps in a round, and the server about as many at half the rate.
# A has the size of the training set, so that its FID is as exact as the model's and the model does not memorise it.
ROUNDS, K, E = 30, 12, 2
SAMPLER = 'ddim(steps=25, spacing="quadratic", eta=0.5, clip=True, batch=256)'
DIGITS = (
    "model=unet(widths=[16, 32], layers=1, attention=[], middle_attention=False, groups=8, side=8, channels=1)",
    "task.schedule.steps=200",
    f"sampler={SAMPLER}",
    "threads=1",
    'evaluate.metrics=[fid(n=1400, encoder=classifier(), split="train"), class_mix(n=1400)]',
    "evaluate.grid=100",
)
CORRECTION = (
    f"algorithm.sampler={SAMPLER}",
    "algorithm.share=1",
    f"algorithm.central.epochs={E}",
    "algorithm.central.lr=1e-3",
)


def warmups(
    seeds: tuple[int, ...] = (0, 1, 2),
    epochs: tuple[int, ...] = (20, 60, 200),
    partition: Literal["shard", "dir0.1"] = "shard",
) -> Table:
    """FedDDPM on digits by epochs of warm-up, with real images, and for more rounds, beside FedAvg."""
    # Six clients have four batches each (under Dirichlet on average); two take part in a round. An epoch of warm-up takes 24
    # steps. A round takes 96 steps at the clients and E x 23 at the server.
    matched = {w: -(-(24 * w + ROUNDS * (96 + E * 23)) // 96) for w in epochs}
    plan: list[tuple[str, str, int, int, tuple[str, ...]]] = [("fedavg", "fedavg", 0, ROUNDS, ())]
    plan += [("fedddpm", "fedddpm", w, ROUNDS, CORRECTION) for w in epochs]
    plan += [("fedddpm", "fedddpm-real", 0, ROUNDS, (*CORRECTION, "algorithm.real=True"))]
    plan += [("fedavg", "fedavg-matched", w, rounds, ()) for w, rounds in matched.items()]
    cells = [_digits(*row, seed, partition) for seed in seeds for row in plan]
    # the shortest warm-up with as many rounds as the longest of these
    cells += [
        _digits("fedddpm", "fedddpm-longer", min(epochs), max(matched.values()), CORRECTION, seed, partition)
        for seed in seeds
    ]
    return Table(
        title=f"FedDDPM on digits ({partition}) by epochs of warm-up, beside FedAvg with equal steps",
        cells=tuple(cells),
        repeats="seed",
        also=("fid_classifier_auxiliary", "class_mix"),
        scales={"digits": Scale(comparable=False)},
    )


def _digits(method: str, name: str, warmup: int, rounds: int, more: tuple[str, ...], seed: int, partition: str) -> Cell:
    size = Resized(rounds=rounds, K=K, warmup=warmup or None)
    recipe = "fedddpm" if method == "fedddpm" else f"fedddpm.{method}"
    return Cell(
        labels={"method": name, "warmup": warmup, "seed": seed},
        recipe=f'{recipe}(scale="smoke", size={text(size, full=False)})',
        settings=(*DIGITS, *more, f"partition={PARTITIONS[partition]}", f"seed={seed}"),
        metric="fid_classifier",
    )


def unequal(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """SCAFFOLD and MoFedSAM on digits by Dirichlet 0.1, with equal epochs or equal steps of every client."""
    # as in the comparison: ten clients, four a round; with equal epochs about 30 steps on average, and few at the smallest
    units = {"epochs": ("algorithm.local.epochs=3",), "steps": ("algorithm.local.epochs=None", "algorithm.local.steps=30")}
    rivals: dict[str, tuple[str, ...]] = {
        "fedavg": (),
        "scaffold": (),
        "mofedsam": ("algorithm.alpha=0.5", "algorithm.rho=0.01"),
    }
    size = text(Resized(rounds=ROUNDS, clients=10, p=0.4), full=False)
    cells = [
        Cell(
            labels={"method": method, "unit": unit, "seed": seed},
            recipe=f'fedddpm.{method}(scale="smoke", size={size})',
            settings=(
                *DIGITS,
                *more,
                "algorithm.local.batch=16",
                *work,
                f"partition={PARTITIONS['dir0.1']}",
                f"seed={seed}",
            ),
            metric="fid_classifier",
        )
        for seed in seeds
        for method, more in rivals.items()
        for unit, work in units.items()
    ]
    title = "On digits by Dirichlet 0.1: three epochs of every client, or 30 steps"
    scales = {"digits": Scale(comparable=False)}
    return Table(
        title=title, cells=tuple(cells), repeats="seed", against=("method", "fedavg"), also=("class_mix",), scales=scales
    )
