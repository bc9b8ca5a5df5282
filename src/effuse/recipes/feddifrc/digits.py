"""FedDifRC: guides that a federation trains, classifiers of the same federation, and features without labels."""

import dataclasses
from typing import Literal

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.fedema import FedEMA
from effuse.algorithms.fedlid import FedLID
from effuse.algorithms.shared.guides import Guide, Own, Vectors
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition
from effuse.core.errors import RecipeError
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD, Adam, CosineDecay, Solver
from effuse.core.table import Cell, Table
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import NID2
from effuse.data.sources import Digits
from effuse.diffusion.samplers import DpmSolver
from effuse.metrics.accuracy import Accuracy, ConditionalAccuracy
from effuse.metrics.linear_probe import LinearProbe
from effuse.models.pretrained import FromPretrained
from effuse.models.projected import Projected
from effuse.models.resnet import Cnn
from effuse.models.unet import DigitsUnet
from effuse.recipes.seeds import refuse_results
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.views import Views

Scenario = Literal["dirichlet", "nid2"]
Method = Literal["fedavg", "own", "own_tdcl", "own_ndcr", "vectors"]
LabelFree = Literal["fedema", "fedlid", "feddifrc"]
# clients, rounds of the classifier, partition: NID1 at 0.05, and NID2 in equal sizes
SCENARIOS: dict[str, tuple[int, int, Partition]] = {
    "dirichlet": (10, 20, LabelSkew(beta=0.05)),
    "nid2": (7, 30, NID2(sizes="equal")),
}
LOCAL = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, batch=32, epochs=5)
NOISE = Denoise(drop=0.1)
STEP = 50  # of H: the paper's 150 belongs to a latent model, and small noise is best for pixels


def guide(scenario: Scenario = "dirichlet", labels: bool = True) -> Recipe:
    """A U-Net of digits, trained by FedAvg on the clients whose networks it guides; without labels, it knows no class."""
    clients, _, partition = SCENARIOS[scenario]
    return Recipe(
        data=Digits(),
        clients=clients,
        partition=partition,
        model=DigitsUnet(conditional=labels),
        task=NOISE if labels else Denoise(),
        algorithm=FedAvg(local=Adam(lr=2e-3, batch=64, epochs=2, clip=1.0, schedule=CosineDecay())),
        rounds=40,
        evaluate=Evaluate(metrics=(ConditionalAccuracy(n=500),) if labels else ()),
        sampler=DpmSolver(steps=20, guidance=1.0 if labels else 0.0),
    )


def guided(method: Method = "vectors", scenario: Scenario = "dirichlet", folder: str | None = None) -> Recipe:
    """A classifier of digits by FedDifRC: held to class `vectors`, or to the `own` guide whose model is in a folder.

    `own_tdcl` and `own_ndcr` have one of the two terms. `fedavg` has none.
    """
    clients, rounds, partition = SCENARIOS[scenario]
    return Recipe(
        data=Digits(),
        clients=clients,
        partition=partition,
        model=Cnn(projection=64),
        task=Classify(),
        algorithm=_algorithm(method, folder),
        rounds=rounds,
        evaluate=Evaluate(every=1, grid=0, metrics=(Accuracy(),)),
    )


def _algorithm(method: Method, folder: str | None) -> Algorithm:
    if method == "fedavg":
        return FedAvg(local=LOCAL)
    found: Guide = Vectors()
    if method != "vectors":
        if folder is None:
            raise RecipeError(
                f'feddifrc.guided: "{method}" needs the folder of a guide\'s model; run feddifrc.guide, then give '
                'folder="RUN/model"'
            )
        found = Own(network=FromPretrained(folder=folder), stages=(0, 1, 2), task=NOISE)
    tdcl, ndcr = float(method != "own_ndcr"), float(method != "own_tdcl")
    return FedDifRC(local=LOCAL, guide=found, t=STEP, tdcl=tdcl, ndcr=ndcr)


def labelfree(method: LabelFree = "fedlid", scenario: Scenario = "dirichlet", folder: str | None = None) -> Recipe:
    """Features without labels: FedEMA, a stand-in for FedLID, or FedDifRC held to the guide whose model is in a folder.

    `feddifrc.unlabelled` is the same for CIFAR.
    """
    clients, rounds, partition = SCENARIOS[scenario]
    encoder = Cnn(projection=64)
    # without a ragged last batch, as in FedEMA; every method has the same
    local = dataclasses.replace(LOCAL, ema=0.99 if method == "fedema" else None, ragged="drop")
    heads = Projected(encoder=encoder, hidden=256, width=64, predictor=method == "fedema")
    return Recipe(
        data=Digits(),
        clients=clients,
        partition=partition,
        model=encoder if method == "feddifrc" else heads,
        task=Views(flip=False),
        algorithm=_without_labels(method, local, folder),
        rounds=rounds,
        evaluate=Evaluate(grid=0, metrics=(LinearProbe(),)),
    )


def _without_labels(method: LabelFree, local: Solver, folder: str | None) -> Algorithm:
    match method:
        case "fedema":
            return FedEMA(local=local)
        case "fedlid":
            return FedLID(local=local)
        case "feddifrc":
            if folder is None:
                raise RecipeError(
                    'feddifrc.labelfree: "feddifrc" needs the folder of a guide\'s model; run feddifrc.guide(labels=False), '
                    'then give folder="RUN/model"'
                )
            return FedDifRC(local=local, guide=Own(network=FromPretrained(folder=folder), stages=(0, 1, 2)), t=STEP)


def digits(seeds: tuple[int, ...] = (0, 1, 2), scenarios: tuple[Scenario, ...] = ("dirichlet", "nid2")) -> Table:
    """From guide to table: on each federation a guide is trained, then classifiers with and without it."""
    refuse_results("feddifrc.digits", seeds)
    methods = ("guide", "fedavg", "own", "own_tdcl", "own_ndcr", "vectors")
    cells = [
        Cell(
            labels={"scenario": scenario, "method": method, "seed": seed},
            recipe=_source(scenario, method, seed),
            settings=(f"seed={seed}",),
            metric="accuracy_last5",
        )
        for scenario in scenarios
        for seed in seeds
        for method in methods
    ]
    return Table(
        title="FedDifRC on digits: accuracy of the global classifier, the mean of the last five rounds",
        cells=tuple(cells),
        repeats="seed",
        against=("method", "fedavg"),
        also=("accuracy", "conditional_accuracy"),
    )


def _source(scenario: str, method: str, seed: int) -> str:
    if method == "guide":
        return f'feddifrc.guide("{scenario}")'
    folder = f', folder="{{out}}/{scenario}-guide-{seed}/model"' if method.startswith("own") else ""
    return f'feddifrc.guided("{method}", "{scenario}"{folder})'
