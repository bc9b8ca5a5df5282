"""FedPhD: Long et al., 2025, "Federated Pruning with Hierarchical Learning of Diffusion Models", section V."""

import dataclasses
from typing import Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddiffuse import UDec, USplit
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.fedprox import FedProx
from effuse.algorithms.moon import Moon
from effuse.algorithms.scaffold import Scaffold
from effuse.core.algorithm import Algorithm
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import Adam
from effuse.data.folders import CelebA
from effuse.data.npz import CIFAR10
from effuse.data.partition import Classes
from effuse.data.sources import Digits
from effuse.data.transforms import Crop, Resize
from effuse.diffusion.samplers import Ddim, DpmSolver
from effuse.metrics.fidelity import FID
from effuse.models.unet import CifarUnet, DigitsUnet
from effuse.tasks.denoise import Denoise

Data = Literal["cifar10", "celeba"]
FEW = 0.2  # the share of clients in every round


def fedphd(data: Data = "cifar10") -> Recipe:
    """FedPhD: 20 clients of two classes, two edges, pruned by norm after 20 sparse rounds; one local epoch a round."""
    # on CelebA Eq. 25 needs b: an edge aggregates ten clients of 8,139 images in a cycle
    algorithm = FedPhD(local=_adam(data, 1), cohort=FEW, R_s=20, b=0.0 if data == "cifar10" else 60_000.0)
    return _recipe(algorithm, data, 10_000 if data == "cifar10" else 5_000)


def fedavg(data: Data = "cifar10") -> Recipe:
    """FedAvg on FedPhD's data, five local epochs a round."""
    return _baseline(FedAvg(local=_adam(data), cohort=FEW), data)


def fedavg1(data: Data = "cifar10") -> Recipe:
    """FedAvg with one local epoch and five times the rounds, as FedPhD trains."""
    return _recipe(FedAvg(local=_adam(data, 1), cohort=FEW), data, 10_000 if data == "cifar10" else 5_000)


def fedprox(data: Data = "cifar10") -> Recipe:
    """FedProx with the paper's mu of 1."""
    return _baseline(FedProx(local=_adam(data), cohort=FEW, mu=1.0), data)


def moon(data: Data = "cifar10") -> Recipe:
    """MOON on pooled bottleneck features; the paper tuned mu from 0.01 to 10."""
    return _baseline(Moon(local=_adam(data), cohort=FEW, mu=1.0), data)


def scaffold(data: Data = "cifar10") -> Recipe:
    """SCAFFOLD under Adam, with mean gradients as control variates; option="II" is the rule derived for plain SGD."""
    return _baseline(Scaffold(local=_adam(data), cohort=FEW), data)


def usplit(data: Data = "cifar10") -> Recipe:
    """FedDiffuse's USPLIT; the paper does not state which FedDiffuse method it ran."""
    return _baseline(USplit(local=_adam(data), cohort=FEW), data)


def udec(data: Data = "cifar10") -> Recipe:
    """FedDiffuse's UDEC, with a model per client; compare its pooled FID."""
    return _baseline(UDec(local=_adam(data), cohort=FEW), data)


def centralised(data: Data = "cifar10", scale: Literal["paper", "scaled", "smoke"] = "paper") -> Recipe:
    """All data in one place: 500,000 steps and a moving average; at smaller scales as many images as the rivals."""
    local = dataclasses.replace(_adam(data, 1), state="kept")
    if scale != "paper":  # a run of few steps is too short for a moving average with decay 0.9999
        return _baseline(Centralised(local=local), data)
    size, batch = (50_000, 128) if data == "cifar10" else (162_770, 64)
    return _recipe(Centralised(local=dataclasses.replace(local, ema=0.9999)), data, round(500_000 * batch / size))


def demo() -> Recipe:
    """FedPhD on digits: ten sites of two classes, two edges with an outage each, pruned halfway; a minute on two cores."""
    local = Adam(lr=2e-3, batch=64, epochs=2, clip=1.0)
    return Recipe(
        data=Digits(),
        clients=10,
        partition=Classes(per_client=2),
        model=DigitsUnet(),
        task=Denoise(drop=0.1),
        algorithm=FedPhD(local=local, cohort=4, a=1_500.0, ratio=0.25, R_s=10, outages=((3, 1), (10, 0))),
        rounds=20,
        sampler=DpmSolver(steps=20, guidance=1.0),
    )


def _adam(data: Data, epochs: int = 5) -> Adam:
    return Adam(lr=2e-4, batch=128, epochs=epochs) if data == "cifar10" else Adam(lr=2e-5, batch=64, epochs=epochs)


def _baseline(algorithm: Algorithm, data: Data) -> Recipe:
    return _recipe(algorithm, data, 2_000 if data == "cifar10" else 1_000)


def _recipe(algorithm: Algorithm, data: Data, rounds: int) -> Recipe:
    celeba = CelebA(classes_from=("Male", "Young"), transforms=(Crop(side=178), Resize(side=64)))
    return Recipe(
        data=CIFAR10() if data == "cifar10" else celeba,
        clients=20,
        partition=Classes(per_client=2 if data == "cifar10" else 1),
        model=CifarUnet(),
        task=Denoise(),
        algorithm=algorithm,
        rounds=rounds,
        evaluate=Evaluate(metrics=(FID(n=30_000, split="train"),)),
        sampler=Ddim(steps=100, batch=256),
    )
