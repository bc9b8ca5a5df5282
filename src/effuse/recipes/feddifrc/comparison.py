"""The scaled comparison: can a guide be seen at all, is it the image, and what do the rivals do on the same seeds?"""

from effuse.core.errors import RecipeError, nearest
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddifrc.methods import BESIDE, STEP
from effuse.recipes.feddifrc.tables import ALSO
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

RIVALS = ("fedprox", "moon", "fedproto", "fednh", "feddisco", "fedcda", "fedrcl")
SCALES = {
    "scaled": Scale(comparable=False, label="scaled"),
    "smoke": Scale(comparable=False, label="run on digits"),
}
LONGER = 1.5  # FedAvg's rounds against the others', for the guide's GPU time; set it to what the guide took
# method -> the settings that the trials have chosen, such as "algorithm.tdcl=0.3"; none yet. The oracle has those of "both"
CHOSEN: dict[str, tuple[str, ...]] = {}
# five trials for each key: a rival's one parameter, or weights and temperature of what is held to a guide
TRIALS: dict[str, tuple[str, tuple[float, ...]]] = {
    "both-tdcl": ("tdcl", (0.1, 0.3, 1.0, 3.0, 10.0)),
    "both-ndcr": ("ndcr", (0.1, 0.3, 1.0, 3.0, 10.0)),
    "both-tau": ("tau", (0.03, 0.06, 0.1, 0.3, 1.0)),
    "vectors-tdcl": ("tdcl", (0.1, 0.3, 1.0, 3.0, 10.0)),
    "vectors-ndcr": ("ndcr", (0.1, 0.3, 1.0, 3.0, 10.0)),
    "vectors-tau": ("tau", (0.03, 0.06, 0.1, 0.3, 1.0)),
    "fedprox": ("mu", (1e-4, 1e-3, 1e-2, 1e-1, 1.0)),
    "moon": ("mu", (0.1, 1.0, 3.0, 5.0, 6.0)),
    "fedproto": ("pull", (0.3, 1.0, 2.0, 3.0, 4.0)),
    "fednh": ("rho", (0.1, 0.2, 0.5, 0.7, 0.9)),
    "feddisco": ("a", (0.1, 0.3, 0.5, 0.7, 0.9)),
    "fedcda": ("L", (0.1, 0.3, 1.0, 3.0, 10.0)),
    "fedrcl": ("beta", (0.5, 1.0, 2.0, 3.0, 4.0)),
}


def comparison(
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5), scenarios: tuple[str, ...] = ("nid1-0.05",), data: str = "cifar10"
) -> Table:
    """Guides, FedAvg and its control on IID data, FedDifRC and its controls on every seed; the rest on the first.

    One oracle guide serves all seeds, since data in one place know no partition.
    All networks have the same projection, since class vectors and means have negative entries and a mean of ReLUs has none.
    If IID is not clearly ahead of FedAvg, the setting judges nothing. If the oracle guide does not help, the verdict is on
    the pipeline. Only if the oracle helps does a "no" speak of the own guide.
    """
    refuse_results("feddifrc.comparison", seeds)
    cells = []
    for scenario in scenarios:
        for seed in seeds:
            cells += _guides(data, scenario, seed)[: 2 if seed == seeds[0] else 1]
            cells += [_cell(name, data, scenario, seed) for name in ("fedavg", "fedavg-iid", "both", "vectors")]
            cells.append(_cell("oracle", data, scenario, seed, guide=seeds[0]))
        cells += _once(data, scenario, seeds[0])
    return Table(
        title="FedDifRC beside rivals and controls: the mean accuracy of the last five rounds",
        cells=tuple(cells),
        repeats="seed",
        against=("method", "fedavg"),
        also=("accuracy", *ALSO[1:]),
        scales=SCALES,
    )


def normalised(
    seeds: tuple[int, ...] = (0,), data: str = "cifar10", scenario: str = "nid1-0.05", longer: float = 1.0
) -> Table:
    """BatchNorm against GroupNorm: the paper's networks have the first. The smoke scale's network takes both too.

    `longer` multiplies the rounds. BatchNorm's steps are not recorded, so a GPU takes about twice as long for them.
    """
    refuse_results("feddifrc.normalised", seeds)
    cells = []
    for seed in seeds:
        cells += _guides(data, scenario, seed)[:1]
        for norm in ("group", "batch"):
            cells += [
                _cell(name, data, scenario, seed, f"model.norm={norm}", name=f"{name}-{norm}", longer=longer)
                for name in ("fedavg", "both")
            ]
    return Table(title="FedDifRC and FedAvg by normalisation", cells=tuple(cells), repeats="seed", also=ALSO, scales=SCALES)


def tuned(
    seed: int = FIRST_TUNING_SEED,
    data: str = "cifar10",
    scenario: str = "nid1-0.05",
    methods: tuple[str, ...] = (),
    longer: float = 1.0,
) -> Table:
    """Five trials for each key, on a tuning seed, judged on 20 % of the training images.

    Rivals have one key. FedDifRC and its class vectors have the same three, so fifteen trials each. `methods` names some
    of them, and `longer` multiplies the rounds.
    """
    known = dict.fromkeys(name.partition("-")[0] for name in TRIALS)
    for method in methods:
        if method not in known:
            raise RecipeError(f"feddifrc.tuned: no trials of '{method}'; {nearest(method, known)}")
    refuse_tuning("feddifrc.tuned", seed)
    cells = _guides(data, scenario, seed, validation=True)[:1]
    for name, (key, values) in TRIALS.items():
        method = name.partition("-")[0]
        if methods and method not in methods:
            continue
        for value in values:
            setting = f"algorithm.{key}={value}"
            cells.append(
                _cell(method, data, scenario, seed, setting, name=f"{name}-{value:g}", validation=True, longer=longer)
            )
    return Table(title="FedDifRC: trials on held-out training images", cells=tuple(cells), also=ALSO, scales=SCALES)


def _guides(data: str, scenario: str, seed: int, validation: bool = False) -> list[Cell]:
    """The guide of this federation, and the oracle that has seen all data in one place."""
    return [
        Cell(
            labels={"scenario": scenario, "method": name, "seed": seed},
            recipe=f'feddifrc.own_guide("{data}", "{scenario}", "{{scale}}", {name == "oracle-guide"}, {validation})',
            settings=(f"seed={seed}",),
            metric="accuracy_last5",  # it has none, being no classifier
        )
        for name in ("guide", "oracle-guide")
    ]


def _once(data: str, scenario: str, seed: int) -> list[Cell]:
    """Rivals and controls of one seed."""
    cells = [_cell(name, data, scenario, seed) for name in (*RIVALS, "feddda", *BESIDE, "ridge")]
    for name, settings in {
        "tdcl": ("algorithm.ndcr=0.0",),
        "ndcr": ("algorithm.tdcl=0.0",),
        "other-image": ("algorithm.guide.image=other",),
        "null-label": ("algorithm.guide.label=null", "algorithm.tdcl=0.0"),
        "without-U": ("algorithm.U=none",),
        "tau-0.2": ("algorithm.tau=0.2",),
        f"t-{4 * STEP}": (f"algorithm.t={4 * STEP}",),
    }.items():
        cells.append(_cell("both", data, scenario, seed, *settings, name=name))
    cells.append(_cell("fedavg", data, scenario, seed, name="fedavg-longer", longer=LONGER))
    return cells


def _cell(
    method: str,
    data: str,
    scenario: str,
    seed: int,
    *settings: str,
    name: str = "",
    validation: bool = False,
    longer: float = 1.0,
    guide: int | None = None,
) -> Cell:
    """One classifier. Both guides are runs of this table, which must be finished first; `guide` is the seed of another."""
    place = "iid" if method == "fedavg-iid" else scenario
    guided = {"both": ("feddifrc", "own", "guide"), "oracle": ("feddifrc", "own", "oracle-guide")}
    own = {name: (name, "own", "guide") for name in ("ridge", "feddda", *BESIDE)} | {"vectors": ("feddifrc", "vectors", "")}
    called, source, folder = {**guided, **own}.get(method, (method.partition("-")[0], "vectors", ""))
    place_of_guide = f', "{{out}}/{scenario}-{folder}-{seed if guide is None else guide}/model"' if folder else ""
    chosen = () if validation else CHOSEN.get("both" if method == "oracle" else method, ())
    more = ", projected=True" + (", validation=True" if validation else "") + (f", longer={longer}" if longer != 1 else "")
    return Cell(
        labels={"scenario": scenario, "method": name or method, "seed": seed},
        recipe=f'feddifrc.classifier("{called}", "{data}", "{place}", "{{scale}}", "{source}"{place_of_guide}{more})',
        settings=(f"seed={seed}", *chosen, *settings),
        metric="accuracy" if method == "ridge" else "accuracy_last5",
    )
