"""Our recipe for CIFAR-10, two classes a client: a tenth of the images and of the traffic of FedPhD's paper."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.core.errors import RecipeError, nearest
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import Solver
from effuse.metrics.fidelity import FID, KID
from effuse.models.unet import Unet
from effuse.recipes.fedphd.methods import fedavg1

Scale = Literal["paper", "scaled", "smoke"]
IMAGES = 50_000
PASSES: dict[Scale, int] = {"paper": 200, "scaled": 20, "smoke": 2}  # images trained on, as a multiple of all images
LOCAL = "local=adam(lr=2e-4, batch=128, epochs=1), cohort=0.2"

# changes of FedAvg with one epoch, as values of `--set`, in the order in which they are made; those whose names agree up to
# the first dash replace each other
CHANGES: dict[str, tuple[str, ...]] = {
    # with beta = 0.9 the direction comes from about ten rounds, and so from twice as many clients as there are
    "server-momentum": (f"algorithm=fedavgm({LOCAL}, eta=0.2, beta=0.9)",),
    "server-momentum-slow": (f"algorithm=fedavgm({LOCAL}, eta=0.1, beta=0.9)",),
    "server-adam": (f"algorithm=fedadam({LOCAL}, eta=2e-3)",),
    "server-yogi": (f"algorithm=fedyogi({LOCAL}, eta=2e-3)",),
    "server-fedphd": (f"algorithm=fedphd({LOCAL}, variant=none)",),
    # lambda_g = lambda_0 / Q(g) is then between 1e-5 and 1e-2, the paper's grid
    "server-fedphd-44": (f"algorithm=fedphd({LOCAL}, R_s=20, lambda_0=1e-3)",),
    "rate-2e-4": ("algorithm.local.lr=2e-4",),
    "rate-5e-4": ("algorithm.local.lr=5e-4",),
    "rate-1e-3": ("algorithm.local.lr=1e-3",),
    "decay": ("algorithm.local.schedule=cosine_decay(warmup=1)",),
    "norm": ("algorithm.local.clip=1.0",),
    "kept": ("algorithm.local.state=kept",),  # Adam's moments, from round to round
    "batch-64": ("algorithm.local.batch=64",),
    "epochs-5": ("algorithm.local.epochs=5",),
    # half an epoch a round needs twice the rounds; with this network their traffic is within the limit, too
    "short": ("algorithm.local.epochs=None", "algorithm.local.steps=10", "model.widths=[64, 128, 128, 128]"),
    "labelled": ("model.conditional=True",),
    "task-edm": ("task=edm()", "sampler=heun(batch=1000)"),
    "task-velocity": (
        "task=denoise(target=v, schedule=cosine(), min_snr=5.0)",
        "sampler=ddim(steps=100, clip=True, batch=1000)",
    ),
    "augment": ("task.augment=0.12",),
    "sampler-dpm": ("sampler=dpm_solver(steps=20, batch=1000)",),
    "flip": ("data=cifar10(transforms=[flip()])",),
}
# the horizon of the average over rounds, as a share of all rounds
AVERAGES = {"average-30th": 1 / 30, "average-10th": 0.1, "average-3rd": 1 / 3}
NAMES = (*CHANGES, *AVERAGES)
# from the literature and from FedDiffuse's tuning; `cifar10.tuning` changes one at a time
START = ("rate-5e-4", "decay", "norm", "task-edm", "flip", "average-10th")
CHOSEN = START  # until `cifar10.tuning` has been run


def with_change(names: Sequence[str], change: str) -> tuple[str, ...]:
    """These changes and one more, which replaces one of its family; `without-NAME` removes one."""
    name = change.removeprefix("without-")
    if name not in NAMES:
        raise RecipeError(f"cifar10: {name!r} is not a change; {nearest(name, NAMES)}")
    gone = {name.partition("-")[0]}
    if "task" in gone and change != "task-edm":
        gone.add("augment")  # a key of edm()
    others = [n for n in names if n.partition("-")[0] not in gone]
    return tuple(others if name != change else sorted([*others, name], key=NAMES.index))


def cifar10(changes: tuple[str, ...] = CHOSEN, scale: Scale = "paper") -> Recipe:
    """Two classes a client, 20 clients, four a round; 10 million images in 1,000 rounds of one epoch."""
    recipe = _plain().changed([setting for name in _known(changes) for setting in CHANGES.get(name, ())])
    images = recipe.clients // 5 * local_of(recipe).images_on(IMAGES // recipe.clients)  # of a round
    return _averaged(recipe, changes, round(PASSES[scale] * IMAGES / images), getattr(recipe.algorithm, "r_g", 1))


def centralised(changes: tuple[str, ...] = CHOSEN, scale: Scale = "paper") -> Recipe:
    """The same recipe with all data in one place, for as many images; Adam's moments are kept."""
    recipe = cifar10(changes, scale)
    local = dataclasses.replace(local_of(recipe), epochs=1, steps=None, state="kept")
    return _averaged(dataclasses.replace(recipe, algorithm=Centralised(local=local)), changes, PASSES[scale])


def local_of(recipe: Recipe) -> Solver:
    """The solver of the clients, which is the only one of these algorithms."""
    (local,) = recipe.algorithm.solvers()
    return local


def _plain() -> Recipe:
    """FedPhD's FedAvg with one epoch, on a network of as many parameters as FedPhD's pruned one."""
    recipe = fedavg1()
    assert isinstance(recipe.algorithm, FedAvg)
    metrics = (FID(n=30_000, split="train"), KID(n=30_000, split="train"))  # FID by the paper's protocol
    network = Unet(widths=(96, 192, 192, 192), groups=16)
    return dataclasses.replace(recipe, model=network, evaluate=Evaluate(metrics=metrics))


def _known(changes: Sequence[str]) -> list[str]:
    """The changes in the order in which they are made; unknown ones and two of a family are refused."""
    again: tuple[str, ...] = ()
    for name in changes:
        again = with_change(again, name)
    if len(again) < len(changes) or any(name.startswith("without-") for name in changes):
        raise RecipeError(f"cifar10: changes={list(changes)} has two of a family, or a `without-`; leave one out")
    return list(again)


def _averaged(recipe: Recipe, changes: Sequence[str], rounds: int, every: int = 1) -> Recipe:
    """With that many rounds, and the average over a share of them; `every` counts rounds from model to model."""
    share = next((AVERAGES[name] for name in changes if name in AVERAGES), None)
    ema = None if share is None else 1 - 1 / max(2.0, share * rounds / every)
    return dataclasses.replace(recipe, rounds=rounds, ema=ema)
