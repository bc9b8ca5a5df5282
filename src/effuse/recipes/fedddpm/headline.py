"""The paper's headline on MNIST at its own scale: shards, 15 % of the clients a round."""

import dataclasses
from collections.abc import Iterator

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.fedddpm.tables import SMOKE, STAND_INS, cell_of
from effuse.recipes.seeds import refuse_results

AUXILIARY = "auxiliary"  # the first cell of a seed: A, which the others of the seed take over, after one round
# what the paper prints: FID of A itself, of each method, and of a model that saw A alone
PRINTED = {AUXILIARY: 1.344, "fedavg": 5.822, "fedddpm": 1.910, "aux_only": 4.204, "plus": 2.188}
MORE = {"fedavg_matched": None, "mofedsam": 4.840, "scaffold": 4.889}
# one evaluation, in the end; the larger batch draws the same images in less time
PAPER = (
    "evaluate.every=0",
    "sampler=ancestral(batch=1000)",
    'evaluate.metrics=[fid(n=10000, split="train"), fid_real(n=10000, split="train"), unclear(n=10000), class_mix(n=10000)]',
    "speed=graph",
)
SMALL = (
    "evaluate.every=0",
    'evaluate.metrics=[fid(n=200, encoder=classifier(), split="train"), '
    'fid_real(n=200, encoder=classifier(), split="train"), unclear(n=200), class_mix(n=200)]',
)
ALSO = ("fid_auxiliary", "fid_real", "unclear", "unclear_auxiliary", "class_mix", "class_mix_auxiliary")


def headline(seeds: tuple[int, ...] = (0, 1)) -> Table:
    """FedAvg, FedDDPM, FedDDPM+ and training on A alone, at the paper's scale; the most informative cells first."""
    refuse_results("fedddpm.headline", seeds)
    smoke = dataclasses.replace(SMOKE, settings=SMALL, metrics={**STAND_INS, "fid_real": "fid_real_classifier"})
    scales = {"paper": Scale(settings=PAPER), "smoke": smoke}
    title = "FedDDPM on MNIST, shards, 15 % of the clients a round: FID"
    cells = tuple(_cell(method, seed) for method, seed in _by_importance(seeds))
    return Table(title=title, cells=cells, repeats="seed", against=("method", "fedavg"), also=ALSO, scales=scales)


def _by_importance(seeds: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    first, others = seeds[:1], seeds[1:]
    yield from ((method, seed) for seed in first for method in (AUXILIARY, "fedddpm", "fedavg", "plus"))
    yield from ((method, seed) for seed in others for method in (AUXILIARY, "fedddpm", "fedavg"))
    yield from (("aux_only", seed) for seed in first)
    yield from ((method, seed) for seed in first for method in MORE)
    yield from ((method, seed) for seed in others for method in ("plus", "aux_only", *MORE))


def _cell(method: str, seed: int) -> Cell:
    settings = [f"seed={seed}"]
    if method == AUXILIARY:
        settings.append("rounds=1")
    if method == "plus":  # the paper compares with the training set, as only a simulation can
        settings.append("algorithm.test.reference=oracle")
    printed = (PRINTED | MORE)[method]
    of = "fedddpm" if method == AUXILIARY else method
    cell = cell_of(of, "mnist", {"partition": "shard"}, printed, *settings)
    metric = "fid_auxiliary" if method == AUXILIARY else "fid"
    return dataclasses.replace(cell, labels={"method": method, "seed": seed}, metric=metric)
