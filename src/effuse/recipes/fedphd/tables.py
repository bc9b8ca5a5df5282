"""FedPhD's Tables I, III, IV and V, at three scales."""

import dataclasses

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.fedphd.methods import Data

SCALED = Scale(
    # half the width, a quarter of the arithmetic; 16 groups are as wide as the paper's 32, for equal pruning ratios
    settings=(
        "model=cifar_unet(widths=[64, 128, 128, 128], groups=16, dropout=0.0)",
        "evaluate.metrics=[fid(n=10000, split='train'), kid(n=10000, split='train'), tones(n=10000)]",
        "evaluate.personal=pooled",  # the metric for personal models, at a twentieth of the time
        # noise (eta) and clipped predictions: see SHORT in fedddpm/methods.py
        "sampler=ddim(steps=100, spacing=quadratic, eta=0.5, clip=True, batch=1000)",
        "speed=graph",  # compiling the network of every ratio takes longer than it saves
    ),
    factors={"rounds": 0.01},
    metrics={"fid_ema": "fid"},
    comparable=False,
    label="scaled",
)
SMOKE = Scale(
    settings=(
        "data=digits()",
        "model=unet(widths=[16, 32], layers=1, attention=[4], groups=4)",
        "algorithm.local.batch=64",
        "algorithm.local.lr=2e-3",
        "sampler=ddim(steps=5)",
        "evaluate.grid=20",
        "evaluate.metrics=[fid(n=100, encoder=classifier())]",
    ),
    factors={"rounds": 0.001, "algorithm.R_s": 0.25},
    metrics={"fid": "fid_classifier", "fid_pooled": "fid_classifier_pooled", "fid_ema": "fid_classifier"},
    comparable=False,
    label="run on digits",
)
SCALES = {"paper": Scale(), "scaled": SCALED, "smoke": SMOKE}
ALSO = (
    "kid",
    "kid_pooled",
    "tones",
    "tones_pooled",
    "parameters_m",
    "gmacs",
    "gmacs_frozen",
    "paper_cost",
    "symmetric_cost",
)

ONE_EPOCH = "algorithm.local.epochs=1"  # in a round; the rivals' recipes have five
# by method: its recipe, settings, and metric
METHODS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "centralised": ("centralised", (), "fid_ema"),
    "fedavg-iid": ("fedavg", ("partition=iid()",), "fid"),
    "fedavg": ("fedavg", (), "fid"),
    "fedprox": ("fedprox", (), "fid"),
    "feddiffuse-usplit": ("usplit", (), "fid"),
    "feddiffuse-udec": ("udec", (), "fid_pooled"),
    "moon": ("moon", (), "fid"),
    "scaffold": ("scaffold", (), "fid"),
    "scaffold-ii": ("scaffold", ("algorithm.option=II",), "fid"),
    "scaffold-e1": ("scaffold", (ONE_EPOCH,), "fid"),
    "fedavg-e1": ("fedavg1", (), "fid"),
    "fedphd": ("fedphd", (), "fid"),
    "fedphd-os": ("fedphd", ("algorithm.variant=os",), "fid"),
}
# (FID, its spread, IS) on CIFAR-10 and on CelebA; the paper prints one FedDiffuse method, without its name, and one SCAFFOLD
EQUAL_COMPUTATION = {
    "fedphd": ((16.74, 0.26, 4.24), (8.32, 0.44, 2.76)),
    "fedavg-e1": ((17.21, 0.28, 4.68), (9.55, 0.32, 2.78)),
    "fedavg": ((24.50, 0.38, 3.88), (14.89, 0.64, 2.47)),
    "fedphd-os": ((17.03, 0.22, 4.14), (7.48, 0.28, 2.88)),
    "moon": ((22.13, 0.66, 4.11), (12.56, 0.31, 2.44)),
    "fedprox": ((26.53, 0.82, 3.71), (16.33, 0.34, 2.45)),
    "scaffold": ((43.87, 2.76, 3.12), (32.32, 1.22, 2.12)),
    "scaffold-ii": ((43.87, 2.76, 3.12), (32.32, 1.22, 2.12)),
    "feddiffuse-usplit": ((29.38, 0.52, 3.56), (17.42, 0.58, 2.32)),
    "feddiffuse-udec": ((29.38, 0.52, 3.56), (17.42, 0.58, 2.32)),
    "fedavg-iid": ((11.98, 0.38, 5.18), (6.42, 0.34, 2.92)),
    "centralised": ((8.73, 0.30, 7.22), (5.86, 0.36, 3.22)),
}
EQUAL_ROUNDS = {
    "fedavg": ((21.63, None, 4.16), (11.29, None, 2.81)),
    "fedprox": ((22.42, None, 4.01), (13.39, None, 2.55)),
    "feddiffuse-usplit": ((25.38, None, 3.66), (15.42, None, 2.34)),
    "feddiffuse-udec": ((25.38, None, 3.66), (15.42, None, 2.34)),
    "moon": ((20.43, None, 4.17), (10.88, None, 2.78)),
    "scaffold": ((29.54, None, 3.54), (21.44, None, 2.38)),
    "scaffold-ii": ((29.54, None, 3.54), (21.44, None, 2.38)),
}
# channel ratio: (parameters in millions, GMAC, FID, IS) on CIFAR-10, (GMAC, FID, IS) on CelebA
TABLE_3 = {
    0.0: ((35.7, 6.1, 16.56, 4.42), (24.3, 7.31, 2.92)),
    0.1: ((26.9, 4.2, 16.78, 4.18), (16.8, 7.42, 2.84)),
    0.2: ((20.3, 3.4, 16.74, 4.24), (13.6, 7.48, 2.88)),
    0.3: ((13.9, 2.1, 19.36, 3.83), (8.3, 9.59, 2.73)),
    0.4: ((9.3, 1.5, 22.34, 3.78), (5.9, 13.44, 2.44)),
}
UNPRUNED = ("algorithm.variant=none",)
REDUCTIONS = {0.0: 0, 0.1: 25, 0.2: 44, 0.3: 61, 0.4: 74}  # of parameters, as the paper labels them
# parameters in millions, GMAC, traffic cost of one cloud aggregation, and the rounds of five local epochs
TABLE_4 = {
    "fedavg": (35.7, 6.06, 109.22, 1),
    "fedavg-e1": (35.7, 6.06, 546.10, 5),
    "fedprox": (35.7, 6.13, 109.22, 1),
    "feddiffuse-usplit": (35.7, 6.06, 72.82, 1),
    "feddiffuse-udec": (35.7, 6.06, 72.82, 1),
    "moon": (35.7, 6.26, 109.22, 1),
    "scaffold": (35.7, 6.13, 218.44, 1),
    "fedphd-os": (20.3, 3.42, 65.46, 5),
}
# (FID, IS) with 50 and with 100 clients
TABLE_5 = {
    "fedavg": ((25.48, 4.01), (23.11, 4.08)),
    "fedprox": ((26.22, 3.98), (22.88, 4.04)),
    "feddiffuse-usplit": ((28.84, 3.88), (25.22, 4.01)),
    "scaffold": ((49.23, 3.09), (45.44, 3.11)),
    "moon": ((22.67, 4.04), (23.24, 4.08)),
    "fedphd": ((17.14, 4.36), (17.77, 4.11)),
    "fedphd-os": ((17.62, 4.18), (18.03, 4.09)),
}


def table1(data: Data = "cifar10", seed: int = 0) -> Table:
    """Table I: FID of FedPhD and its rivals, at equal computation and at equal rounds; the most informative cells first."""
    column = 0 if data == "cifar10" else 1
    cells = []
    for budget, rows in (("computation", EQUAL_COMPUTATION), ("rounds", EQUAL_ROUNDS)):
        for method, row in rows.items():
            fid, spread, score = row[column]
            more = () if budget == "computation" else (f"rounds={10_000 if data == 'cifar10' else 5_000}",)
            cells.append(cell_of(method, {"method": method, "equal": budget}, data, seed, more, fid, spread, {"IS": score}))
    return Table(title=f"FedPhD, Table I: FID on {data}, seed {seed}", cells=tuple(cells), also=ALSO, scales=SCALES)


def table3(data: Data = "cifar10", seed: int = 0) -> Table:
    """Table III: FID of FedPhD by pruning ratio."""
    cells = []
    for ratio, (cifar, celeba) in TABLE_3.items():
        gmac, fid, score = cifar[1:] if data == "cifar10" else celeba
        beside = {"IS": score, "parameters_m": cifar[0], "GMAC": gmac}
        pruned = (f"algorithm.ratio={ratio}",) if ratio else UNPRUNED
        cells.append(cell_of("fedphd", {"pruned": f"{REDUCTIONS[ratio]}"}, data, seed, pruned, fid, None, beside))
    return Table(
        title=f"FedPhD, Table III: FID on {data} by pruning, seed {seed}", cells=tuple(cells), also=ALSO, scales=SCALES
    )


def table4() -> Table:
    """Table IV: parameters, GMAC and traffic cost of one cloud aggregation; rehearsed, because they need no training."""
    cells = []
    for method, (millions, gmac, cost, rounds) in TABLE_4.items():
        # labels with CIFAR-10's sizes need no file
        settings = (f"rounds={rounds}", "data=labels(sizes=[5000]*10, side=32, channels=3)", "evaluate.metrics=[]")
        beside = {"parameters_m": millions, "gmacs": gmac}
        cell = cell_of(method, {"method": method}, "cifar10", 0, settings, cost, None, beside)
        cells.append(dataclasses.replace(cell, metric="paper_cost"))
    title = "FedPhD, Table IV: size and traffic cost of the networks"
    return Table(
        title=title, cells=tuple(cells), also=("symmetric_cost", "parameters_m", "gmacs", "gmacs_frozen"), rehearsed=True
    )


def table5(seed: int = 0) -> Table:
    """Table V: FID on CIFAR-10 with 50 and with 100 clients."""
    cells = [
        cell_of(method, {"method": method, "clients": n}, "cifar10", seed, (f"clients={n}",), fid, None, {"IS": score})
        for method, row in TABLE_5.items()
        for n, (fid, score) in zip((50, 100), row)
    ]
    return Table(title=f"FedPhD, Table V: FID with more clients, seed {seed}", cells=tuple(cells), also=ALSO, scales=SCALES)


def cell_of(
    method: str,
    labels: dict[str, str | int],
    data: Data,
    seed: int,
    more: tuple[str, ...],
    printed: float | None,
    spread: float | None,
    beside: dict[str, float],
) -> Cell:
    """The cell of a method, at any scale."""
    recipe, settings, metric = METHODS[method]
    scale = ', scale="{scale}"' if recipe == "centralised" else ""  # its scale decides about the moving average
    name = f'fedphd.{recipe}(data="{data}"{scale})' if recipe != "fedphd" else f'fedphd(data="{data}")'
    return Cell(
        labels=labels,
        recipe=name,
        settings=(*settings, *more, f"seed={seed}"),
        metric=metric,
        printed=printed,
        spread=spread,
        beside=beside,
    )
