"""What can be run and was not, with the GPU hours that it would take."""

from functools import cache
from typing import Any

from text import rows

from effuse.core.recipe import Recipe
from effuse.recipes import find_recipe, find_table

# of one H200, by network: images/s in training, network evaluations/s in drawing (docs/performance.md)
SPEED = {"feddiffuse": (31_475, 119_571), "fedddpm": (8_591, 30_062), "fedphd": (8_591, 30_062)}
IMAGES = {"fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
LEDGER = 1_500  # seconds of one FedDiff cell at the paper's scale, as docs/notes/gpu.md predicts
RUN = ("full-5-iid", "full-5-l-skew", "full-5-q-skew", "full-10-iid", "usplit-5-iid", "ulatdec-5-iid", "udec-5-iid")
WHAT = (
    ("FedDDPM, Table 2 (CIFAR-10)", "fedddpm.table2", None),
    ("FedDDPM, Table 3 (CIFAR-100)", "fedddpm.table3", None),
    ("FedPhD, Table V (50 and 100 clients)", "fedphd.table5", None),
    ("FedDiff at Dirichlet 0.001", "feddiff.table1", "method=feddiff,alpha=0.001"),
    ("FedDiff with 5 and 20 clients", "feddiff.table2", "method=feddiff,clients=5,clients=20"),
    ("FedDiffuse, the rest of Table 1", "feddiffuse.table1", None),
)


def trained(recipe: Recipe) -> float:
    """Images that pass through training, by preparation, clients and server."""
    algorithm: Any = recipe.algorithm
    images = IMAGES[recipe.data.name]
    cohort = getattr(algorithm, "cohort", None) or 1
    gradients = 2 if algorithm.name == "mofedsam" else 1  # a step
    total = recipe.rounds * cohort * images * algorithm.local.epochs * gradients
    if warmup := getattr(algorithm, "warmup", None):
        total += images * warmup.epochs
    if central := getattr(algorithm, "central", None):
        times = 1 if algorithm.name == "fedddpm_plus" else recipe.rounds
        total += times * central.epochs * images * algorithm.share
    return float(total)


def drawn(recipe: Recipe) -> float:
    """Network evaluations of all evaluations, and of an auxiliary set."""
    algorithm: Any = recipe.algorithm
    steps = getattr(recipe.sampler, "steps", None) or 1_000
    images = max(getattr(metric, "n", 0) for metric in recipe.evaluate.metrics)
    times = recipe.rounds // recipe.evaluate.every if recipe.evaluate.every else 1
    owners = recipe.clients if algorithm.name in ("feddiffuse_ulatdec", "feddiffuse_udec") else 1
    shared = getattr(algorithm, "share", 0) * IMAGES[recipe.data.name] * 1_000
    return float(images * owners * times * steps + shared)


@cache
def hours(table: str, only: str | None) -> tuple[int, str, str]:
    """Cells that were not run, and their GPU hours in training and in drawing."""
    paper = table.partition(".")[0]
    chosen = [one for one in find_table(table)[1].chosen(only) if paper != "feddiffuse" or one.name not in RUN]
    if paper == "feddiff":
        return len(chosen), f"{len(chosen) * LEDGER / 3600:.0f}", "among them"
    cells = [find_recipe(one.recipe.replace("{scale}", "paper"))[1].changed(list(one.settings)) for one in chosen]
    train, draw = SPEED[paper]
    return len(cells), f"{sum(map(trained, cells)) / train / 3600:.0f}", f"{sum(map(drawn, cells)) / draw / 3600:.0f}"


def not_run() -> str:
    body = []
    for what, table, only in WHAT:
        cells, training, drawing = hours(table, only)
        command = f"`effuse reproduce {table}{f' --only {only}' if only else ''}`"
        body.append([what, command, str(cells), training, drawing])
    return rows(["what", "command", "runs", "GPU hours of training", "of drawing"], body)
