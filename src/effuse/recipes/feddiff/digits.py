"""FedDiff on 8x8 digits, in minutes on two cores, with and without privacy."""

import dataclasses
from typing import Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.class_means import ClassMeans
from effuse.algorithms.feddiff import FedDiff
from effuse.algorithms.nearest_mean import NearestMean
from effuse.algorithms.shared.central_images import CentralImages
from effuse.core.algorithm import Algorithm
from effuse.core.data import Partition
from effuse.core.privacy import Budget, DpSgd
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import AdamW
from effuse.core.table import Cell, Table
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import Iid
from effuse.data.sources import Digits
from effuse.diffusion.samplers import DpmSolver
from effuse.metrics.accuracy import Accuracy
from effuse.models.resnet import Cnn, LinearClassifier
from effuse.models.unet import DigitsUnet, Unet
from effuse.privacy.histogram import Gaussian
from effuse.recipes.seeds import refuse_results
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise

SAMPLER = DpmSolver(steps=20, batch=300)
CENTRAL = AdamW(lr=2e-3, batch=64, epochs=1, state="kept")
EPOCHS = 50  # of the server's classifier
SMALL_UNET = Unet(widths=(16, 32), layers=1, attention=(), groups=8, conditional=True)
Method = Literal["paper", "additions", "batch", "ema", "repeats", "means", "class_means", "nearest_mean"]


def digits() -> Recipe:
    """One-shot FedDiff on digits: 5 sites with Dirichlet(0.1) labels; a classifier that has seen synthetic digits only."""
    warmup = AdamW(lr=2e-3, batch=64, epochs=100, ema=0.99)
    algorithm = FedDiff(warmup=warmup, central=CENTRAL, generators=(DigitsUnet(),), sampler=SAMPLER)
    return _recipe(algorithm, LabelSkew(beta=0.1))


def real_digits() -> Recipe:
    """The bound of `digits`: the same classifier, trained on the real digits in one place."""
    return _recipe(Centralised(local=CENTRAL), Iid())


def private_digits(method: Method = "paper", epsilon: float = 10.0) -> Recipe:
    """FedDiff with differential privacy: 5 sites of about 290 digits each, delta 1e-4.

    `paper` trains as the paper does. `additions` uses whole-site batches, an average over steps, four noise draws for each
    image and a warm start on noisy class means. `batch`, `ema`, `repeats` and `means` are `paper` with one of these.
    `class_means` and `nearest_mean` use no generator: the whole budget is spent on the class means.
    """
    if method == "nearest_mean":
        nearest = _recipe(NearestMean(), Iid(), Budget(epsilon=epsilon, delta=1e-4))
        return dataclasses.replace(nearest, model=LinearClassifier(), rounds=1)
    if method == "class_means":
        return _recipe(ClassMeans(central=CENTRAL), Iid(), Budget(epsilon=epsilon, delta=1e-4))
    all_of = method == "additions"
    large = all_of or method == "batch"
    warmup = AdamW(
        lr=2e-3,
        batch=1000 if large else 64,
        steps=60 if large else None,
        epochs=None if large else 90,
        ema=0.95 if large and all_of else 0.99 if all_of or method == "ema" else None,
        privacy=DpSgd(repeats=4 if all_of or method == "repeats" else 1),
    )
    means = CentralImages(noise=0.7, solver=AdamW(lr=2e-3, batch=64, steps=300)) if all_of or method == "means" else None
    algorithm = FedDiff(
        warmup=warmup,
        central=CENTRAL,
        generators=(SMALL_UNET,),
        task=Denoise(drop=0.1),
        sampler=SAMPLER,
        histogram=Gaussian(epsilon=1.0, delta=1e-5),
        central_images=means,
    )
    return _recipe(algorithm, Iid(), Budget(epsilon=epsilon, delta=1e-4))


def private_comparison(seeds: tuple[int, ...] = (0, 1, 2, 3, 4), epsilon: float = 10.0) -> Table:
    """What the budget is best spent on: FedDiff as printed, with additions, each addition alone, and class means alone."""
    refuse_results("feddiff.private_comparison", seeds)
    main, parts = ("class_means", "nearest_mean", "additions", "paper"), ("means", "batch", "ema", "repeats")
    cells = [
        Cell(
            labels={"method": method, "seed": seed},
            recipe=f'feddiff.private_digits("{method}", epsilon={epsilon})',
            settings=(f"seed={seed}",),
            metric="accuracy",
        )
        for methods in (main, parts)
        for seed in seeds
        for method in methods
    ]
    title = f"FedDiff on digits at epsilon {epsilon:g}: accuracy on real test digits"
    return Table(title=title, cells=tuple(cells), repeats="seed", against=("method", "class_means"))


def _recipe(algorithm: Algorithm, partition: Partition, budget: Budget | None = None) -> Recipe:
    return Recipe(
        data=Digits(),
        clients=5,
        partition=partition,
        model=Cnn(),
        task=Classify(),
        algorithm=algorithm,
        rounds=EPOCHS,
        evaluate=Evaluate(grid=0, metrics=(Accuracy(),)),
        budget=budget,
    )
