"""How good the auxiliary set must be: FedDDPM by the length of its warm-up, on digits, at a size that two cores can do."""

from effuse.core.table import Cell, Scale, Table

ROUNDS, K, E = 30, 12, 16  # 48 steps of each client in a round and as many of the server, at half their rate, as in the comparison
SAMPLER = 'ddim(steps=25, spacing="quadratic", eta=0.5, clip=True, batch=240)'
SETTINGS = (
    'model=unet(widths=[16, 32], layers=1, attention=[], middle_attention=False, groups=8, side=8, channels=1)',
    "task.schedule.steps=200", f"sampler={SAMPLER}", "threads=1",
    'evaluate.metrics=[fid(n=1400, encoder=classifier(), split="train"), class_mix(n=1400)]', "evaluate.grid=100",
)  # fmt: skip
CORRECTION = (f"algorithm.sampler={SAMPLER}", f"algorithm.central.epochs={E}", "algorithm.central.lr=1e-3")
ALSO = ("fid_classifier_auxiliary", "class_mix", "class_mix_auxiliary")


def warmups(seeds: tuple[int, ...] = (0, 1, 2), epochs: tuple[int, ...] = (20, 60, 200)) -> Table:
    """FedDDPM on digits by the epochs of its warm-up, beside FedAvg, and FedAvg with as many gradient steps in all."""
    cells = [cell for seed in seeds for cell in (_fedavg("fedavg", 0, ROUNDS, seed), *_lengths(epochs, seed))]
    return Table(
        title="FedDDPM on digits by the epochs of its warm-up, and FedAvg with the same steps: is A better than what it corrects?",
        cells=tuple(cells), repeats="seed", against=("method", "fedavg_matched"), also=ALSO,
        scales={"digits": Scale(comparable=False)},
    )  # fmt: skip


def _lengths(epochs: tuple[int, ...], seed: int) -> list[Cell]:
    # six clients with four batches each, two of them a round: 24 steps of warm-up an epoch, 96 and 48 in a round
    matched = [_fedavg("fedavg_matched", w, -(-(24 * w + ROUNDS * (96 + 48)) // 96), seed) for w in epochs]
    return [*(_cell("fedddpm", "fedddpm", w, f"rounds={ROUNDS}, warmup={w}", seed, CORRECTION) for w in epochs), *matched]


def _fedavg(method: str, warmup: int, rounds: int, seed: int) -> Cell:
    return _cell(method, "fedddpm.fedavg", warmup, f"rounds={rounds}", seed)


def _cell(method: str, recipe: str, warmup: int, size: str, seed: int, more: tuple[str, ...] = ()) -> Cell:
    return Cell(
        labels={"method": method, "warmup": warmup, "seed": seed}, recipe=f'{recipe}(scale="smoke", size=resized({size}, K={K}))',
        settings=(*SETTINGS, *more, f"seed={seed}"), metric="fid_classifier",
    )  # fmt: skip
