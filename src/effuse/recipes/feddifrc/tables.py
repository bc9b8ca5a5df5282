"""FedDifRC's Tables 1 to 16. The guide is Stable Diffusion from a local folder; the smoke scale has untrained ones.

The paper prints no deviations. It does not say whether its accuracies are of the last round; ours are, and the mean of the
last five and the best round stand beside them. Of Table 6, FedDISC has no recipe; its numbers are in `printed.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddifrc import printed as p
from effuse.recipes.feddifrc.methods import GUIDED
from effuse.recipes.seeds import refuse_results

FOLDER = "stable-diffusion-v1-5"
SD = f'"sd", "{FOLDER}"'
ALSO = (
    "accuracy_last5",
    "accuracy_best",
    "class_accuracy_lowest",
    "rounds_to_0.2",
    "rounds_to_0.4",
    "rounds_to_0.6",
    "rounds_to_0.8",
)
DRAWN = ("feddda", "fedrcl_drawn", "fedrcl_both")  # the methods that are given drawn images
SCALES = {
    "paper": Scale(),
    "scaled": Scale(comparable=False, label="scaled"),
    "smoke": Scale(metrics={"domain_accuracy": "accuracy"}, comparable=False, label="run on digits"),
}
Seeds = tuple[int, ...]


def table1(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 1: CIFAR-10 with neither, one or both of the terms."""
    cells = []
    off = {"none": ("tdcl", "ndcr"), "tdcl": ("ndcr",), "ndcr": ("tdcl",), "both": ()}
    for (terms, numbers), seed in itertools.product(p.TABLE_1.items(), seeds):
        settings = tuple(f"algorithm.{name}=0.0" for name in off[terms])
        for scenario, number in zip((*p.LABEL_SHIFT, *p.TAILS), numbers):
            cells.append(_cell({"terms": terms, "scenario": scenario}, seed, number, *settings))
    return _table("table1", "Table 1: accuracy by term", cells, seeds)


def table2(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 2: CIFAR-10 by stage of the decoder; `fused` are the last three."""
    stages = {"1": "[1]", "2": "[2]", "3": "[3]", "4": "[4]", "fused": "[2, 3, 4]"}
    cells = [
        _cell({"stage": stage, "scenario": scenario}, seed, number, f"algorithm.guide.stages={chosen}")
        for scenario, numbers in p.TABLE_2.items()
        for seed in seeds
        for (stage, chosen), number in zip(stages.items(), numbers)
    ]
    table = _table("table2", "Table 2: accuracy by stage", cells, seeds)
    smoke = dataclasses.replace(SCALES["smoke"], settings=("algorithm.guide.stages=[0, 1, 2]",))  # its guide has no others
    return dataclasses.replace(table, scales=SCALES | {"smoke": smoke})


def table3(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 3: CIFAR-10 by method and label shift."""
    cells = _methods(("cifar10",), p.LABELS, p.LABEL_SHIFT, seeds)
    return _table("table3", "Table 3: CIFAR-10 by label shift", cells, seeds)


def table4(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 4: domains, the mean of all; our reading, since the fact sheet has its methods and not its layout."""
    some = {data: {m: rows[m] for m in p.SOME[1:]} for data, rows in p.TABLE_11.items()}
    return _table("table4", "Table 4: domains, the best methods", _domains(some, seeds, root), seeds, _domain_names())


def table5(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 5: CIFAR-100 without labels, by linear probe; how the paper measures is our reading."""
    cells = [
        Cell(
            labels={"method": method, "scenario": scenario, "seed": seed},
            recipe=f'feddifrc.unlabelled("{method}", "cifar100", "{scenario}", "{{scale}}", {SD})',
            settings=(f"seed={seed}",),
            metric="linear_probe",
            printed=_share(number),
        )
        for method, numbers in p.TABLE_5.items()
        for seed in seeds
        for scenario, number in zip(p.LABEL_SHIFT, numbers)
    ]
    return _table("table5", "Table 5: linear probes without labels", cells, seeds)


def table6(seeds: Seeds = (0, 1, 2), drawn: str = "runs/guide/model") -> Table:
    """Table 6: CIFAR-10 with drawn images. `drawn` is the class-conditional network that FedDDA and FedRCL draw from.

    The paper's FedRCL has images of Stable Diffusion. Features are those of Stable Diffusion here too.
    """
    cells = [
        _cell({"method": m, "scenario": scenario}, seed, number, method=m, drawn=drawn if m in DRAWN else "")
        for m in ("feddda", "fedrcl_drawn", "fedrcl_l2", "fedrcl_both", "feddifrc")
        for seed in seeds
        for scenario, number in zip(p.TABLE_6_COLUMNS, p.TABLE_6[m])
    ]
    return _table("table6", "Table 6: generative rivals", cells, seeds)


def table7(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 7: HAM10000 and EuroSAT, from folders of images."""
    cells = _methods(tuple(p.TABLE_7), p.TABLE_7, p.TABLE_7_COLUMNS, seeds, root)
    return _table("table7", "Table 7: medical and satellite images", cells, seeds)


def table8(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 8: CIFAR-10, FedAvg held to the features of CLIP, MAE and DINO by plain distance.

    These have negative entries, which a mean of ReLUs cannot reach, so the networks have a projection.
    """
    folders = {"clip": "clip-vit-base-patch16", "mae": "vit-mae-base", "dino": "dino-vitb16"}
    guides = {name: f'"encoder", "{folder}", projected=True' for name, folder in folders.items()}
    cells = _guides("encoder", guides, p.TABLE_8, p.TABLE_6_COLUMNS, seeds)
    return _table("table8", "Table 8: published encoders", cells, seeds)


def table9(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 9: CIFAR-100 and Tiny-ImageNet by method and label shift."""
    cells = _methods(("cifar100", "tiny"), p.LABELS, p.LABEL_SHIFT, seeds, root)
    return _table("table9", "Table 9: CIFAR-100 and Tiny-ImageNet by label shift", cells, seeds)


def table10(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 10: all three sets by method and length of the tail."""
    return _table("table10", "Table 10: long tails", _methods(tuple(p.TABLE_10), p.TABLE_10, p.TAILS, seeds, root), seeds)


def table11(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 11: domains one by one, and their mean."""
    return _table("table11", "Table 11: domains", _domains(p.TABLE_11, seeds, root), seeds, _domain_names())


def table12(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 12: rounds to three levels of accuracy, at NID1 0.2."""
    cells = []
    for (data, rows), seed in itertools.product(p.TABLE_12.items(), seeds):
        for method, numbers in rows.items():
            levels = [f"rounds_to_{level}" for level in p.LEVELS[data]]
            beside = {level: n for level, n in zip(levels[1:], numbers[1:]) if n is not None}
            labels = {"method": method, "data": data}
            cell = _cell(labels, seed, None, method=method, data=data, scenario="nid1-0.2", root=root)
            cells.append(dataclasses.replace(cell, metric=levels[0], printed=numbers[0], beside=beside))
    return _table("table12", "Table 12: rounds to a level", cells, seeds, ("rounds_to_0.3",))


def table13(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 13, with CIFAR-10 of Figure 7: the time step, at NID1 0.2."""
    cells = [
        _cell({"data": data, "t": t}, seed, number, f"algorithm.t={t}", data=data, scenario="nid1-0.2", root=root)
        for data, numbers in p.TABLE_13.items()
        for seed in seeds
        for t, number in zip(p.STEPS, numbers)
    ]
    return _table("table13", "Table 13: the time step", cells, seeds)


def table14(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 14: Tiny-ImageNet by number of clients, all of which take part; the paper's participation is not said.

    FedCDA has a batch for every ten clients, but three at least: with three it would compare 3^17 choices of 50 clients.
    """
    return _table("table14", "Table 14: clients", _tiny("clients", "clients", p.CLIENTS, p.TABLE_14, seeds, root), seeds)


def table15(seeds: Seeds = (0, 1, 2), root: str = "") -> Table:
    """Table 15: Tiny-ImageNet by local epochs."""
    cells = _tiny("epochs", "algorithm.local.epochs", p.EPOCHS, p.TABLE_15, seeds, root)
    return _table("table15", "Table 15: local epochs", cells, seeds)


def table16(seeds: Seeds = (0, 1, 2)) -> Table:
    """Table 16: CIFAR-10 by version of Stable Diffusion."""
    folders = {"1-4": "stable-diffusion-v1-4", "1-5": FOLDER, "2-0": "stable-diffusion-2-base"}
    guides = {version: f'"sd", "{folder}"' for version, folder in folders.items()}
    cells = _guides("version", guides, p.TABLE_16, p.LABEL_SHIFT, seeds)
    return _table("table16", "Table 16: versions of Stable Diffusion", cells, seeds)


def _methods(
    sets: Iterable[str], numbers: Mapping[str, p.Printed], columns: tuple[str, ...], seeds: Seeds, root: str = ""
) -> list[Cell]:
    return [
        _cell({"method": method, "data": data, "scenario": scenario}, seed, number, method=method, data=data, root=root)
        for data in sets
        for seed in seeds
        for method, row in numbers[data].items()
        for scenario, number in zip(columns, row)
    ]


def _guides(label: str, guides: Mapping[str, str], numbers: p.Printed, columns: tuple[str, ...], seeds: Seeds) -> list[Cell]:
    return [
        _cell({label: name, "scenario": scenario}, seed, number, guide=guides[name])
        for name, row in numbers.items()
        for seed in seeds
        for scenario, number in zip(columns, row)
    ]


def _domains(numbers: Mapping[str, p.Printed], seeds: Seeds, root: str) -> list[Cell]:
    cells = []
    for (data, rows), seed in itertools.product(numbers.items(), seeds):
        for method, row in rows.items():
            labels = {"method": method, "data": data}
            cell = _cell(labels, seed, None, method=method, data=data, scenario="domains", root=root)
            beside = {f"accuracy_{name}": n / 100 for name, n in zip(p.DOMAINS[data], row) if n is not None}
            mean = _share(row[-1])
            cells.append(dataclasses.replace(cell, metric="domain_accuracy", printed=mean, beside=beside))
    return cells


def _domain_names() -> tuple[str, ...]:
    return tuple(f"accuracy_{name}" for names in p.DOMAINS.values() for name in names)


def _tiny(label: str, key: str, values: tuple[int, ...], numbers: p.Printed, seeds: Seeds, root: str) -> list[Cell]:
    return [
        _cell({"method": m, label: n}, seed, number, *settings, method=m, data="tiny", scenario="nid1-0.2", root=root)
        for m, row in numbers.items()
        for seed in seeds
        for n, number in zip(values, row)
        for settings in [(f"{key}={n}", *_batches(m, n if key == "clients" else 10))]
    ]


def _batches(method: str, clients: int) -> tuple[str, ...]:
    """Groups of at most ten clients, whose models FedCDA compares in every combination."""
    return (f"algorithm.batches={math.ceil(clients / 10)}",) if method == "fedcda" and clients > 30 else ()


def _cell(
    labels: Mapping[str, str | int],
    seed: int,
    number: float | None,
    *settings: str,
    method: str = "feddifrc",
    data: str = "cifar10",
    scenario: str = "",
    guide: str = SD,
    drawn: str = "",
    root: str = "",
) -> Cell:
    """One run."""
    scenario = scenario or str(labels["scenario"])
    more = [f'{name}="{value}"' for name, value in (("root", root), ("drawn", drawn)) if value]
    words = [f'"{method}"', f'"{data}"', f'"{scenario}"', '"{scale}"', guide if method in GUIDED else '"vectors"', *more]
    return Cell(
        labels={**labels, "seed": seed},
        recipe=f"feddifrc.classifier({', '.join(words)})",
        settings=(f"seed={seed}", *settings),
        metric="accuracy",
        printed=_share(number),
    )


def _share(number: float | None) -> float | None:
    return None if number is None else number / 100


def _table(name: str, title: str, cells: list[Cell], seeds: Seeds, also: tuple[str, ...] = ()) -> Table:
    refuse_results(f"feddifrc.{name}", seeds)
    return Table(title=f"FedDifRC, {title}", cells=tuple(cells), repeats="seed", also=(*ALSO, *also), scales=SCALES)
