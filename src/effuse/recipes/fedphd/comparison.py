"""FedPhD, its rivals, and an ablation of its parts, at a size for one GPU."""

import dataclasses
import itertools

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.fedphd.tables import ALSO, METHODS, ONE_EPOCH, SCALED, SMOKE, UNPRUNED, cell_of
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

NEITHER = ("algorithm.selection=random", "algorithm.weights=size")
# the most informative first; methods with the same network are neighbours and share recordings
COMPARED: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedavg-e1": ("fedavg-e1", ()),
    "fedavg": ("fedavg", ()),
    "fedphd-0": ("fedphd", UNPRUNED),
    "fedphd-44": ("fedphd", ()),
    "fedphd-os": ("fedphd-os", ()),
    "fedphd-44-random-edges": ("fedphd", NEITHER[:1]),
    "fedphd-44-weights-by-size": ("fedphd", NEITHER[1:]),
    "moon": ("moon", ()),
    "fedprox": ("fedprox", ()),
    "fedprox-0.001": ("fedprox", ("algorithm.mu=0.001",)),  # under Adam, the paper's mu = 1 slows a short run too much
    "scaffold": ("scaffold", ()),
    "feddiffuse-usplit": ("feddiffuse-usplit", ()),
    "feddiffuse-udec": ("feddiffuse-udec", ()),
    "fedavg-iid": ("fedavg-iid", ()),
    "centralised": ("centralised", ()),
    "fedphd-25": ("fedphd", ("algorithm.ratio=0.1",)),
    "fedphd-61": ("fedphd", ("algorithm.ratio=0.3",)),
    "fedphd-74": ("fedphd", ("algorithm.ratio=0.4",)),
    "fedphd-44-unregularised": ("fedphd", ("algorithm.lambda_0=0",)),
    "fedphd-0-neither": ("fedphd", (*UNPRUNED, *NEITHER)),
    "scaffold-ii": ("scaffold-ii", ()),
    "scaffold-e1": ("scaffold-e1", ()),  # with five epochs it diverged
}
# these run after the other seeds of MAIN
LAST = (
    "fedphd-44-unregularised",
    "fedphd-0-neither",
    "scaffold-ii",
    "scaffold-e1",
)
# learning rates to tune with one and with five local epochs a round, and the best ones; 1e-4 extends the grid
RATES: dict[int, tuple[float, ...]] = {1: (1e-4, 2e-4, 5e-4, 1e-3), 5: (2e-4, 5e-4, 1e-3)}
TUNED = {1: 2e-4, 5: 5e-4}
MAIN = ("fedavg-e1", "fedavg", "fedphd-0", "fedphd-44", "fedphd-os", "fedphd-44-random-edges")


def comparison(seeds: tuple[int, ...] = (0, 1, 2), epochs: int = 100) -> Table:
    """All methods, pruning ratios and ablations, scaled to `epochs` local epochs; the most informative on all seeds."""
    refuse_results("fedphd.comparison", seeds)
    cells = []
    others = [name for name in COMPARED if name not in (*MAIN, *LAST)]
    first, more_seeds = itertools.product(seeds[:1], (*MAIN, *others)), itertools.product(seeds[1:], MAIN)
    for seed, name in [*first, *more_seeds, *itertools.product(seeds[:1], LAST)]:
        method, more = COMPARED[name]
        # centralised training has no client drift
        rate = TUNED[1 if method == "centralised" else _epochs_per_round(method)]
        cells.append(_cell(method, {"method": name, "seed": seed}, seed, epochs, rate, more))
    title = "FedPhD and its rivals, 20 clients of two classes, a fifth at a time"
    against = ("method", "fedavg-e1")
    return Table(title=title, cells=tuple(cells), repeats="seed", against=against, also=ALSO, scales=_scales(epochs))


def tuning(seed: int = FIRST_TUNING_SEED, epochs: int = 50, rates: tuple[float, ...] = ()) -> Table:
    """FedAvg's learning rate with one and with five local epochs a round, on a tuning seed, in half of the epochs.

    `rates` replaces the default grid.
    """
    refuse_tuning("fedphd.tuning", seed)
    cells = [
        _cell(method, {"method": method, "rate": f"{rate:g}"}, seed, epochs, rate)
        for method in ("fedavg-e1", "fedavg")
        for rate in rates or RATES[_epochs_per_round(method)]
    ]
    scale = _scales(epochs)["scaled"]  # the smoke scale sets its own learning rate
    scale = dataclasses.replace(scale, settings=(*scale.settings, "evaluate.metrics=[fid(n=5000, split='train')]"))
    return Table(title=f"FedAvg on FedPhD's clients: rates, on seed {seed}", cells=tuple(cells), scales={"scaled": scale})


def _epochs_per_round(method: str) -> int:
    recipe, settings, _ = METHODS[method]
    return 1 if recipe in ("fedphd", "fedavg1") or ONE_EPOCH in settings else 5


def _cell(
    method: str, labels: dict[str, str | int], seed: int, epochs: int, rate: float, more: tuple[str, ...] = ()
) -> Cell:
    settings = (f"algorithm.local.lr={rate:g}", *more, f"rounds={max(1, epochs // _epochs_per_round(method))}")
    return cell_of(method, labels, "cifar10", seed, settings, None, None, {})


def _scales(epochs: int) -> dict[str, Scale]:
    small = {"rounds": 0.1, "algorithm.R_s": 0.25}
    return {
        "scaled": dataclasses.replace(SCALED, factors={}, label=f"on CIFAR-10: {epochs} local epochs in total"),
        "smoke": dataclasses.replace(SMOKE, factors=small, label="on digits: a tenth of the rounds"),
    }
