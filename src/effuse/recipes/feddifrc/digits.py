"""FedDifRC on 8x8 digits: the guide that a federation trains, and the classifiers of the same federation."""

from typing import Literal

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.shared.guides import Guide, Own, Vectors
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition
from effuse.core.errors import RecipeError
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD, Adam, CosineDecay
from effuse.core.table import Cell, Table
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import NID2
from effuse.data.sources import Digits
from effuse.diffusion.samplers import DpmSolver
from effuse.metrics.accuracy import Accuracy, ConditionalAccuracy
from effuse.models.pretrained import FromPretrained
from effuse.models.resnet import Cnn
from effuse.models.unet import DigitsUnet
from effuse.recipes.seeds import refuse_results
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise

Scenario = Literal["dirichlet", "nid2"]
Method = Literal["fedavg", "own", "own_tdcl", "own_ndcr", "vectors"]
# clients, rounds of the classifier, partition: NID1 at 0.05, and NID2 in equal sizes
SCENARIOS: dict[str, tuple[int, int, Partition]] = {
    "dirichlet": (10, 20, LabelSkew(beta=0.05)),
    "nid2": (7, 30, NID2(sizes="equal")),
}
LOCAL = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, batch=32, epochs=5)
NOISE = Denoise(drop=0.1)
STEP = 50  # of H: the paper's 150 belongs to a latent model, and small noise is best for pixels


def guide(scenario: Scenario = "dirichlet") -> Recipe:
    """A class-conditional U-Net of digits, trained by FedAvg on the clients whose classifiers it guides."""
    clients, _, partition = SCENARIOS[scenario]
    return Recipe(
        data=Digits(),
        clients=clients,
        partition=partition,
        model=DigitsUnet(),
        task=NOISE,
        algorithm=FedAvg(local=Adam(lr=2e-3, batch=64, epochs=2, clip=1.0, schedule=CosineDecay())),
        rounds=40,
        evaluate=Evaluate(metrics=(ConditionalAccuracy(n=500),)),
        sampler=DpmSolver(steps=20, guidance=1.0),
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
