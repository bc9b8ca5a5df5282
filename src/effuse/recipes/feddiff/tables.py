"""FedDiff's tables and figures: accuracy of the server's classifier, with and without privacy."""

import itertools
from collections.abc import Iterator

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddiff.methods import SOURCES, Data
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

DATA: tuple[Data, ...] = ("fashion", "path", "cifar10")
METHODS = ("fedavg", "dense", "ensemble", "fedcvae", "feddiff")
Printed = tuple[tuple[float, float], ...]  # (mean, deviation), in the order of the columns
# accuracy in per cent at Dirichlet 0.1, 0.01 and 0.001, ten clients
TABLE_1: dict[str, dict[str, Printed]] = {
    "fashion": {
        "fedavg": ((57.11, 3.64), (29.50, 10.6), (25.89, 4.78)),
        "dense": ((65.20, 3.55), (28.92, 17.3), (27.68, 4.08)),
        "ensemble": ((67.35, 1.19), (33.79, 17.9), (32.01, 3.35)),
        "fedcvae": ((78.08, 2.69), (78.81, 3.25), (81.53, 0.23)),
        "feddiff": ((87.21, 0.74), (86.81, 0.54), (86.59, 0.69)),
    },
    "path": {
        "fedavg": ((28.10, 4.60), (22.05, 8.20), (21.92, 4.95)),
        "dense": ((50.97, 3.19), (29.26, 10.7), (27.69, 4.52)),
        "ensemble": ((34.62, 3.61), (34.94, 9.32), (34.49, 5.30)),
        "fedcvae": ((41.60, 0.82), (44.81, 1.41), (47.35, 3.21)),
        "feddiff": ((74.58, 1.02), (70.61, 1.37), (69.43, 1.30)),
    },
    "cifar10": {
        "fedavg": ((19.64, 2.39), (19.01, 3.76), (18.16, 5.49)),  # Tables 2 and 3 print 19.24±3.77 for the second
        "dense": ((36.04, 7.75), (21.40, 2.73), (17.91, 3.18)),
        "ensemble": ((39.38, 7.53), (23.38, 3.62), (20.15, 9.11)),
        "fedcvae": ((34.40, 1.04), (36.06, 3.27), (36.92, 1.38)),
        "feddiff": ((57.69, 2.07), (56.57, 2.42), (55.75, 1.55)),
    },
}
# at Dirichlet 0.01, by clients: 5, 10, 20
TABLE_2: dict[str, dict[str, Printed]] = {
    "fashion": {
        "fedavg": ((43.73, 2.37), (29.50, 10.6), (28.38, 3.17)),
        "dense": ((48.24, 6.25), (28.92, 17.3), (20.72, 9.82)),
        "ensemble": ((49.53, 6.08), (33.79, 17.9), (31.36, 8.01)),
        "fedcvae": ((78.45, 2.44), (78.81, 3.25), (78.33, 2.45)),
        "feddiff": ((86.89, 0.34), (86.81, 0.54), (87.24, 0.57)),
    },
    "path": {
        "fedavg": ((29.18, 3.54), (22.05, 8.20), (19.83, 3.16)),
        "dense": ((33.39, 6.14), (29.26, 10.7), (20.79, 5.77)),
        "ensemble": ((36.95, 5.30), (34.94, 9.32), (24.59, 6.19)),
        "fedcvae": ((46.16, 1.17), (44.81, 1.41), (41.25, 1.68)),
        "feddiff": ((72.74, 0.63), (70.61, 1.37), (69.11, 0.99)),
    },
    "cifar10": {
        "fedavg": ((29.14, 5.15), (19.24, 3.77), (15.79, 2.64)),
        "dense": ((30.48, 2.30), (21.40, 2.73), (12.60, 2.33)),
        "ensemble": ((36.17, 3.21), (23.38, 3.62), (13.23, 2.96)),
        "fedcvae": ((32.34, 2.59), (36.06, 3.27), (37.63, 1.87)),
        "feddiff": ((57.68, 1.86), (56.57, 2.42), (58.45, 0.73)),
    },
}
TABLE_3_SMALL = {"fashion": (85.90, 0.92), "path": (70.53, 5.61), "cifar10": (50.08, 1.87)}
# at Dirichlet 0.01 and ten clients, by epsilon: 50, 25, 10
TABLE_4: dict[str, dict[str, Printed]] = {
    "fashion": {
        "fedavg": ((21.04, 12.1), (20.82, 12.3), (20.39, 12.6)),
        "dense": ((26.34, 9.03), (26.29, 9.81), (24.29, 15.6)),
        "ensemble": ((31.27, 10.9), (31.32, 10.1), (29.99, 16.7)),
        "fedcvae": ((44.40, 1.70), (43.89, 2.53), (41.65, 3.19)),
        "feddiff": ((75.92, 1.86), (75.08, 2.13), (73.43, 1.50)),
    },
    "path": {
        "fedavg": ((16.98, 8.93), (15.30, 6.44), (14.85, 4.19)),
        "dense": ((20.56, 6.59), (19.19, 3.76), (18.41, 1.86)),
        "ensemble": ((24.59, 7.63), (23.38, 2.60), (22.23, 2.02)),
        "fedcvae": ((24.06, 1.57), (22.15, 2.68), (20.51, 1.29)),
        "feddiff": ((54.98, 2.04), (51.51, 1.85), (47.85, 3.68)),
    },
    "cifar10": {
        "fedavg": ((16.35, 1.52), (15.39, 1.87), (15.07, 2.12)),
        "dense": ((16.97, 2.35), (15.68, 2.27), (14.98, 1.25)),
        "ensemble": ((17.73, 2.71), (17.34, 2.35), (15.72, 1.34)),
        "fedcvae": ((16.29, 1.55), (16.08, 2.19), (15.86, 2.83)),
        "feddiff": ((32.93, 1.93), (31.76, 2.68), (27.78, 1.66)),
    },
}
TABLE_5 = {"fashion": (65.53, 0.70), "path": (44.38, 3.35), "cifar10": (21.48, 1.53)}
SMOKE = ("clients=3", "data=digits()", "partition=label_skew(beta=0.5)")
SCALES = {
    "paper": Scale(),
    "scaled": Scale(comparable=False, label="scaled"),
    "smoke": Scale(settings=SMOKE, comparable=False, label="run on digits"),
}
RATES = (3e-3, 1e-3, 3e-4, 1e-4)


def table1(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Table 1: accuracy by method and label skew, without privacy."""
    refuse_results("feddiff.table1", seeds)
    columns = [("0.1", 0), ("0.01", 1), ("0.001", 2)]
    cells = [
        _cell(method, data, {"alpha": alpha}, seed, TABLE_1[data][method][i], f"partition.beta={alpha}")
        for seed, data, (alpha, i), method in itertools.product(seeds, DATA, columns, METHODS)
    ]
    return _table("Table 1: accuracy by label skew", cells)


def table2(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Table 2: accuracy by method and number of clients, without privacy."""
    refuse_results("feddiff.table2", seeds)
    cells = [
        _cell(method, data, {"clients": clients}, seed, TABLE_2[data][method][i], f"clients={clients}")
        for seed, data, (i, clients), method in itertools.product(seeds, DATA, enumerate((5, 10, 20)), METHODS)
    ]
    return _table("Table 2: accuracy by clients", cells)


def table3(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Table 3: accuracy with the large and the small generator; `effuse check` counts their parameters and operations."""
    refuse_results("feddiff.table3", seeds)
    cells = []
    for seed, data in itertools.product(seeds, DATA):
        cells += [_cell(m, data, {}, seed, TABLE_1[data][m][1]) for m in ("fedavg", "fedcvae", "feddiff")]
        cells.append(_cell("feddiff", data, {}, seed, TABLE_3_SMALL[data], name="small", more="small=True"))
    return _table("Table 3: accuracy by network", cells)


def table4(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Table 4: accuracy by method and epsilon, delta 1e-5; with our controls, for which nothing was printed."""
    refuse_results("feddiff.table4", seeds)
    cells = []
    for seed, data, (i, epsilon) in itertools.product(seeds, DATA, enumerate((50, 25, 10))):
        for method in METHODS:
            fmf = ", fmf=0.05" if method == "feddiff" else ""  # FedDiff+FMF; its releases are in the budget
            cells.append(_private_cell(method, data, epsilon, seed, TABLE_4[data][method][i], more=fmf))
        cells += list(_controls(data, epsilon, seed))
    return _table("Table 4: accuracy by epsilon", cells)


def table5(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Table 5: FedDiff at epsilon 1, and our controls."""
    refuse_results("feddiff.table5", seeds)
    cells = []
    for seed, data in itertools.product(seeds, DATA):
        cells.append(_private_cell("feddiff", data, 1, seed, TABLE_5[data], more=", fmf=0.05"))
        cells += list(_controls(data, 1, seed))
    return _table("Table 5: accuracy at epsilon 1", cells)


def figure5(seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Figure 5: FedDiff with and without its filter at epsilon 50, 25 and 10; the paper prints no numbers."""
    refuse_results("feddiff.figure5", seeds)
    cells = [
        _private_cell("feddiff", data, epsilon, seed, None, name=name, more=more)
        for seed, data, epsilon in itertools.product(seeds, DATA, (50, 25, 10))
        for name, more in (("feddiff", ""), ("fmf", ", fmf=0.05"))
    ]
    return _table("Figure 5: with and without the filter", cells)


def figure7(seeds: tuple[int, ...] = (0, 1, 2), epsilon: float = 10.0) -> Table:
    """Figure 7: FedDiff by the share that its filter removes, against as many removed at random."""
    refuse_results("feddiff.figure7", seeds)
    cells = []
    for seed, data, gamma in itertools.product(seeds, DATA, (0.01, 0.05, 0.1)):
        rules = {
            "fmf": f"algorithm.filter=fmf(gamma={gamma}, noise=20.0)",
            "fmf-without-dc": f"algorithm.filter=fmf(gamma={gamma}, noise=20.0, dc=False)",
            "random": f"algorithm.filter=at_random(gamma={gamma})",
        }
        for name, rule in rules.items():
            labels: dict[str, str | int] = {"gamma": f"{gamma:g}"}
            cells.append(_private_cell("feddiff", data, epsilon, seed, None, rule, name=name, labels=labels))
    return _table("Figure 7: by share removed", cells)


def audited(epsilon: float = 50.0, data: Data = "fashion") -> Table:
    """Figures 3 and 4: runs for `effuse audit`, private and not; their histograms and nearest pairs are its pages."""
    # five times the training size, as in the paper; generators and canaries for `effuse audit --model generator`
    settings = ("algorithm.share=5.0", "algorithm.keep=True", "canaries=1000")
    cells = [
        _private_cell("feddiff", data, epsilon, 0, None, *settings),
        _cell("feddiff", data, {"epsilon": "none"}, 0, None, *settings),
    ]
    return _table("Figures 3 and 4: runs to audit", cells)


def tuning(seed: int = FIRST_TUNING_SEED, data: Data = "cifar10") -> Table:
    """The paper's four learning rates for every method, on a tuning seed and a tenth of the training images."""
    refuse_tuning("feddiff.tuning", seed)
    cells = []
    for method, rate in itertools.product(METHODS, RATES):
        client = "warmup" if method in ("fedcvae", "feddiff") else "local"
        rates = [f"algorithm.{client}.lr={rate}"]
        rates += [] if method in ("fedavg", "ensemble") else [f"algorithm.central.lr={rate}"]
        cell = _cell(method, data, {"rate": f"{rate:g}"}, seed, None, *rates, validation=True)
        cells.append(cell)
    return _table("learning rates, on held-out training images", cells)


def _controls(data: Data, epsilon: float, seed: int) -> Iterator[Cell]:
    """What a private generator must be ahead of, and what it may hope for."""
    yield _private_cell("nearest_mean", data, epsilon, seed, None)
    yield _private_cell("class_means", data, epsilon, seed, None)
    yield _private_cell("feddiff", data, epsilon, seed, None, name="unfiltered")
    yield _private_cell("feddiff_additions", data, epsilon, seed, None)
    yield _private_cell("feddiff_additions", data, epsilon, seed, None, name="additions-fmf", more=", fmf=0.05")
    yield _private_cell("many_rounds", data, epsilon, seed, None, metric="cas_ema")


def _private_cell(
    method: str,
    data: Data,
    epsilon: float,
    seed: int,
    printed: tuple[float, float] | None,
    *settings: str,
    name: str = "",
    more: str = "",
    metric: str = "accuracy",
    labels: dict[str, str | int] | None = None,
) -> Cell:
    places = {"epsilon": f"{epsilon:g}", **(labels or {})}
    more = f"epsilon={float(epsilon)}{more}"
    return _cell(method, data, places, seed, printed, *settings, name=name, more=more, metric=metric)


def _cell(
    method: str,
    data: Data,
    labels: dict[str, str | int],
    seed: int,
    printed: tuple[float, float] | None,
    *settings: str,
    name: str = "",
    more: str = "",
    metric: str = "accuracy",
    validation: bool = False,
) -> Cell:
    value, spread = (None, None) if printed is None else (printed[0] / 100, printed[1] / 100)
    source = SOURCES[data]
    called = "feddiff" if method == "feddiff" else f"feddiff.{method}"
    held_out = (f"data=validation(source={source})",) if validation else ()
    return Cell(
        labels={"method": name or method, "data": data, **labels, "seed": seed},
        recipe=f'{called}(data="{data}", scale="{{scale}}"{", " + more if more else ""})',
        settings=(f"seed={seed}", *held_out, *settings),
        metric=metric,
        printed=value,
        spread=spread,
    )


def _table(title: str, cells: list[Cell]) -> Table:
    also = ("accuracy", "cas", "cas_ema")
    return Table(title=f"FedDiff, {title}", cells=tuple(cells), repeats="seed", also=also, scales=SCALES)
