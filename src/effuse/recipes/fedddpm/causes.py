"""What FedDDPM gains and loses by its auxiliary set: the comparison's run with little changed, and on digits for two cores."""

import dataclasses
from typing import Literal

from effuse.core.spec import text
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.fedddpm.comparison import as_tuned, looks, scales
from effuse.recipes.fedddpm.methods import AS_IT_IS, Resized, setting
from effuse.recipes.fedddpm.tables import PARTITIONS, cell_of

LONG = Resized(warmup=48)
STEP = "algorithm.warmup.lr=5e-4"  # the centralised model's; FedAvg's is smaller since clients drift, and alone nobody does
# (method, size, settings): is it A's quality, time, the correction's dose or its last steps, and what do more steps give elsewhere?
CHANGES: dict[str, tuple[str, Resized, tuple[str, ...]]] = {
    "real": ("fedddpm", AS_IT_IS, ("algorithm.real=True",)),
    "warm-up-48": ("fedddpm", LONG, (STEP,)),
    "warm-up-rate": ("fedddpm", AS_IT_IS, (STEP,)),
    "longer": ("fedddpm", Resized(rounds=78), ()),  # those of the matched FedAvg
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
    """FedDDPM under the comparison's shards with little changed, most telling first; an average at the server beside all."""
    cells = []
    for name, seed in [*((n, seeds[0]) for n in CHANGES), *((n, s) for s in seeds[1:] for n in REPEATED)]:
        method, size, settings = CHANGES[name]
        s = setting("mnist", "scaled", size)
        more = (*looks(s, method, 0, samples), *as_tuned(s, method), "ema=0.5", *settings)
        cell = cell_of(method, "mnist", {"partition": "shard"}, None, f"seed={seed}", *more, size=size)
        cells.append(dataclasses.replace(cell, labels={"change": name, "seed": seed}))
    title = "FedDDPM under shards with little changed"
    return Table(title=title, cells=tuple(cells), repeats="seed", also=ALSO, scales=scales("mnist", AS_IT_IS))


# on digits: 48 steps of each client in a round and about as many of the server, at half their rate, as in the comparison; A is as
# large as the training set, so that it can be measured as well as the model, and is not learnt by heart
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
    """FedDDPM on digits by the epochs of its warm-up, with real images, and for more rounds, beside FedAvg with as many gradient steps."""
    # six clients with four batches each (under Dirichlet on average), two of them a round: 24 steps of warm-up an epoch, 96 and E x 23 in
    # a round
    matched = {w: -(-(24 * w + ROUNDS * (96 + E * 23)) // 96) for w in epochs}
    plan = [("fedavg", "fedavg", 0, ROUNDS, ())]
    plan += [("fedddpm", "fedddpm", w, ROUNDS, CORRECTION) for w in epochs]
    plan += [("fedddpm", "fedddpm-real", 0, ROUNDS, (*CORRECTION, "algorithm.real=True"))]
    plan += [("fedavg", "fedavg-matched", w, rounds, ()) for w, rounds in matched.items()]
    cells = [_digits(*row, seed, partition) for seed in seeds for row in plan]
    # the poorest A for as many rounds as the longest of those
    cells += [
        _digits("fedddpm", "fedddpm-longer", min(epochs), max(matched.values()), CORRECTION, seed, partition)
        for seed in seeds
    ]
    return Table(
        title=f"FedDDPM on digits ({partition}) by the epochs of its warm-up, beside FedAvg with the same steps",
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
    """SCAFFOLD and MoFedSAM on digits that are dealt out by Dirichlet 0.1: a client's epochs, some of few batches, or as many steps of each."""
    # as in the comparison: ten clients, four a round, some 30 steps of each on average, and of the smallest a few
    units = {"epochs": ("algorithm.local.epochs=3",), "steps": ("algorithm.local.epochs=None", "algorithm.local.steps=30")}
    rivals = {"fedavg": (), "scaffold": (), "mofedsam": ("algorithm.alpha=0.5", "algorithm.rho=0.01")}
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
