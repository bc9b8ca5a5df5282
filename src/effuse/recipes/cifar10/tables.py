"""How our CIFAR-10 recipe is chosen and judged: tuning, controls, three seeds, ablation, and FedPhD under it."""

import dataclasses

from effuse.core.spec import text
from effuse.core.table import Cell, Scale, Table
from effuse.recipes.cifar10.methods import CHOSEN, START, with_change
from effuse.recipes.fedphd.tables import ALSO
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

OURS = "two-classes"
SCALED = Scale(
    settings=("evaluate.metrics=[fid(n=10000, split='train'), kid(n=10000, split='train')]",),
    comparable=False,
    label="scaled: a tenth of the images",
)
SMOKE = Scale(
    settings=(
        "data=digits()",
        "model.widths=[16, 32]",
        "model.layers=1",
        "model.attention=[4]",
        "model.groups=4",
        "algorithm.local.batch=64",
        "rounds=5",
        "sampler.steps=10",  # with fewer, DDIM would begin where a cosine schedule has kept too much of the image
        "evaluate.grid=20",
        "evaluate.metrics=[fid(n=100, encoder=classifier())]",
    ),
    factors={"algorithm.R_s": 0.25},
    metrics={"fid": "fid_classifier", "fid_ema": "fid_classifier_ema"},
    comparable=False,
    label="run on digits",
)
SCALES = {"paper": Scale(), "scaled": SCALED, "smoke": SMOKE}
# single changes of the start, the most telling first; neighbours with the same network and task share recordings
TRIED = (
    "rate-1e-3",
    "rate-2e-4",
    "server-momentum",
    "server-momentum-slow",
    "server-adam",
    "server-yogi",
    "kept",
    "average-3rd",
    "average-30th",
    "sampler-dpm",
    "task-velocity",
    "augment",
    "short",
    "batch-64",
    "without-decay",
    "without-norm",
    "without-flip",
)
FIVE_EPOCHS = ("rate-2e-4", "rate-5e-4", "rate-1e-3")  # FedAvg with five epochs gets a rate of its own
# FedPhD and its rivals in our setting
METHODS = {"fedavg-e1": "without-server-momentum", "fedphd-0": "server-fedphd", "fedphd-44": "server-fedphd-44"}


def tuning(start: tuple[str, ...] = START, seed: int = FIRST_TUNING_SEED) -> Table:
    """Single changes of the start at a tenth of the images, on a tuning seed, judged on held-out training images."""
    refuse_tuning("cifar10.tuning", seed)
    cells = [_tried("start", start, seed), _tried("start", start, seed + 1)]
    cells += [_tried(change, with_change(start, change), seed) for change in TRIED]
    five = with_change(start, "epochs-5")
    cells += [_tried(f"epochs-5-{rate}", with_change(five, rate), seed) for rate in FIVE_EPOCHS]
    title = "CIFAR-10, two classes a client: changes of the start at a tenth of the images, FID against held-out ones"
    scaled = dataclasses.replace(SCALED, settings=())  # the cells have their own judgement
    also = ("fid", "kid_ema")
    return Table(title=title, cells=tuple(cells), also=also, scales={"scaled": scaled, "smoke": SMOKE})


def controls(chosen: tuple[str, ...] = CHOSEN, seeds: tuple[int, ...] = (0, 1)) -> Table:
    """The same recipe on two classes a client, on IID data, and with all data in one place."""
    settings = (OURS, "iid", "centralised")
    return _table("controls", [_judged(setting, chosen, seed) for seed in seeds for setting in settings], seeds)


def final(chosen: tuple[str, ...] = CHOSEN, seeds: tuple[int, ...] = (0, 1, 2)) -> Table:
    """The recipe on three seeds, and its class-conditional variant on the first."""
    cells = [_judged(OURS, chosen, seed) for seed in seeds]
    return _table("three seeds", [*cells, _judged("labelled", with_change(chosen, "labelled"), seeds[0])], seeds)


def ablation(chosen: tuple[str, ...] = CHOSEN, seed: int = 0) -> Table:
    """The recipe without each of its changes, and with another task in place of EDM's."""
    cells = [_judged(OURS, chosen, seed)]
    cells += [_judged(f"without-{name}", with_change(chosen, f"without-{name}"), seed) for name in chosen]
    other = with_change(chosen, "task-velocity")
    cells += [] if other == chosen else [_judged("task-velocity", other, seed)]
    return _table("ablation", cells, (seed,))


def methods(chosen: tuple[str, ...] = CHOSEN, five: str = "rate-5e-4", seeds: tuple[int, ...] = (0, 1)) -> Table:
    """FedAvg with one and with five epochs, and FedPhD unpruned and pruned by 44 %; `five` is the rate of five epochs."""
    of = {name: with_change(chosen, change) for name, change in METHODS.items()}
    of["fedavg-e5"] = with_change(with_change(of["fedavg-e1"], "epochs-5"), five)
    of = {OURS if changes == chosen else name: changes for name, changes in of.items()}  # it is trained once
    return _table("FedPhD and FedAvg", [_judged(name, of[name], seed) for seed in seeds for name in of], seeds)


def _table(what: str, cells: list[Cell], seeds: tuple[int, ...]) -> Table:
    refuse_results("cifar10", seeds)
    title = f"CIFAR-10, two classes a client, 10 million images: {what}"
    base = cells[0].labels["setting"]
    also = ("fid", "kid_ema", *ALSO)
    return Table(title=title, cells=tuple(cells), repeats="seed", against=("setting", str(base)), also=also, scales=SCALES)


def _judged(setting: str, changes: tuple[str, ...], seed: int) -> Cell:
    recipe = "cifar10.centralised" if setting == "centralised" else "cifar10"
    place = ("partition=iid()",) if setting == "iid" else ()
    return _cell({"setting": setting, "seed": seed}, recipe, changes, (*place, f"seed={seed}"))


def _tried(change: str, changes: tuple[str, ...], seed: int) -> Cell:
    flip = "transforms=[flip()]" if "flip" in changes else ""
    data = f"data=validation(source=cifar10({flip}))"
    settings = (data, "evaluate.metrics=[fid(n=5000), kid(n=5000)]", f"seed={seed}")
    return _cell({"change": change, "seed": seed}, "cifar10", changes, settings)


def _cell(labels: dict[str, str | int], recipe: str, changes: tuple[str, ...], settings: tuple[str, ...]) -> Cell:
    averaged = any(name.startswith("average-") for name in changes)
    call = f'{recipe}(changes={text(list(changes))}, scale="{{scale}}")'
    return Cell(labels=labels, recipe=call, settings=settings, metric="fid_ema" if averaged else "fid")
