"""FedPhD, its rivals, and what each of its parts gives, at a size that one GPU can do."""

import dataclasses
import itertools

from effuse.core.table import Table
from effuse.recipes.fedphd.tables import ALSO, METHODS, SCALED, SMOKE, UNPRUNED, cell_of

NEITHER = ("algorithm.selection=random", "algorithm.weights=size")
# by how telling they are, and those of one network beside each other, for they share recordings
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
    "fedprox-0.001": ("fedprox", ("algorithm.mu=0.001",)),  # under Adam, the paper's mu of 1 hardly lets a short run move
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
}
LAST = ("fedphd-44-unregularised", "fedphd-0-neither", "scaffold-ii")  # after more seeds of the telling ones
TELLING = ("fedavg-e1", "fedavg", "fedphd-0", "fedphd-44", "fedphd-os", "fedphd-44-random-edges")


def comparison(seeds: tuple[int, ...] = (0, 1, 2), epochs: int = 100) -> Table:
    """All methods, all shares of pruning and what each part gives, scaled, for so many local epochs; the telling ones on all seeds."""
    cells = []
    others = [name for name in COMPARED if name not in (*TELLING, *LAST)]
    first, more_seeds = itertools.product(seeds[:1], (*TELLING, *others)), itertools.product(seeds[1:], TELLING)
    for seed, name in [*first, *more_seeds, *itertools.product(seeds[:1], LAST)]:
        method, more = COMPARED[name]
        in_a_round = 1 if METHODS[method][0] in ("fedphd", "fedavg1") else 5
        settings = (*more, f"rounds={max(1, epochs // in_a_round)}")
        cells.append(cell_of(method, {"method": name, "seed": seed}, "cifar10", seed, settings, None, None, {}))
    title = "FedPhD and its rivals, 20 clients of two classes, a fifth at a time"
    scales = {
        "scaled": dataclasses.replace(SCALED, factors={}, told=f"on CIFAR-10: {epochs} local epochs in all"),
        "smoke": dataclasses.replace(SMOKE, factors={"rounds": 0.1, "algorithm.R_s": 0.25}, told="on digits: a tenth of the rounds"),
    }
    return Table(
        title=title, cells=tuple(cells), repeats="seed", against=("method", "fedavg-e1"), also=ALSO, scales=scales
    )
