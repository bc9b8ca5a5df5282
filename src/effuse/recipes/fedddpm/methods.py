"""FedDDPM: Peng et al., 2025, "Federated Learning for Diffusion Models", section V, with control experiments."""

import dataclasses
import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedddpm import AuxOnly, FedDDPM, FedDDPMPlus, QuickTest
from effuse.algorithms.fedprox import FedProx
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.localonly import LocalOnly
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.algorithms.scaffold import Scaffold
from effuse.core.algorithm import Algorithm
from effuse.core.data import Source
from effuse.core.model import Arch
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.sampler import Sampler
from effuse.core.solvers import Adam
from effuse.core.spec import Spec, spec
from effuse.data.idx import MNIST
from effuse.data.npz import CIFAR10, CIFAR100
from effuse.data.partition import Shards
from effuse.data.sources import Digits
from effuse.diffusion.samplers import Ancestral, Ddim
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.unet import CifarUnet, MnistUnet, Unet
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear

Data = Literal["mnist", "cifar10", "cifar100"]
Size = Literal["paper", "scaled", "smoke"]
AVERAGE = 0.9  # decay of the moving average of the model over rounds, in `fedavg_ema`


@spec
class Resized(Spec):
    """Changes of a setting for all methods; derived values, such as matched rounds, are computed from them."""

    rounds: PositiveInt | None = None
    clients: PositiveInt | None = None
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    K: PositiveInt | None = None
    warmup: PositiveInt | None = None


AS_IT_IS = Resized()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that the methods have in common for a data set at a scale."""

    data: Source
    images: int  # training images
    model: Arch
    steps: int  # diffusion steps
    rounds: int  # T
    batch: int
    K: int  # local epochs
    E: int  # the server's epochs in a round of FedDDPM
    E_plus: int  # the server's epochs in the single correction of FedDDPM+
    warmup: int  # epochs of warm-up
    clients: int = 100  # N
    p: float = 0.15
    zeta: float = 2e-4
    eta: float = 5e-5
    rho: float = 0.1  # MoFedSAM's ascent step, as published for classifiers
    sampler: Sampler = Ancestral(batch=500)
    synthesis: Sampler = Ancestral(batch=50)
    test: QuickTest = QuickTest()
    fid: FID = FID(n=10_000, split="train")
    every: int = 10  # Fig. 7

    @property
    def cohort(self) -> int:
        """n = max(pN, 1)."""
        return max(1, round(self.p * self.clients))

    @property
    def batches(self) -> int:
        """Batches of a client of average size."""
        return math.ceil(self.images / self.clients / self.batch)

    def local(self, epochs: int | None = None) -> Adam:
        """Adam with new moments in every round; the SGD of the theory would hardly move at the printed rates."""
        return Adam(lr=self.zeta, batch=self.batch, epochs=epochs or self.K)

    def central(self, lr: float, epochs: int) -> Adam:
        return Adam(lr=lr, batch=self.batch, epochs=epochs)


CIFAR: dict[str, Any] = {"images": 50_000, "steps": 1000, "rounds": 600, "batch": 64, "K": 5, "E": 5, "E_plus": 30}
PAPER = {
    "mnist": Setting(
        data=MNIST(),
        images=60_000,
        model=MnistUnet(),
        steps=500,
        rounds=400,
        batch=128,
        K=3,
        E=1,
        E_plus=20,
        warmup=200,
        synthesis=Ancestral(batch=60),
    ),
    "cifar10": Setting(data=CIFAR10(), model=CifarUnet(), warmup=400, **CIFAR),
    "cifar100": Setting(data=CIFAR100(), model=CifarUnet(), warmup=600, **CIFAR),
}


# A sampler of few steps for models with little training. Noise (eta) and clipped predictions limit their errors. Quadratic
# spacing takes short steps at low noise, where fine contrast forms; otherwise A and models trained on A would lose it.
SHORT = Ddim(steps=50, spacing="quadratic", eta=0.5, clip=True, batch=500)


def setting(data: Data, scale: Size, size: Resized) -> Setting:
    """The setting of a data set at a scale, with the given changes of size."""
    given = {f.name: value for f in dataclasses.fields(size) if (value := getattr(size, f.name)) is not None}
    return dataclasses.replace(_at(data, scale), **given)


def _at(data: Data, scale: Size) -> Setting:
    printed = PAPER[data]
    if scale == "scaled":
        # Two shards per client, as in the paper. Ten clients give each model enough steps: 752 of warm-up, 1,410 in rounds.
        # Four clients a round cover most classes, as the paper's fifteen do. There are 16 epochs of warm-up, and T p K = 12.
        return dataclasses.replace(
            printed,
            clients=10,
            p=0.4,
            rounds=30,
            batch=128,
            K=1,
            E=1,
            E_plus=20,
            warmup=16,
            zeta=5e-4,
            eta=1e-4,
            rho=0.01,  # 0.1 is far worse than FedAvg on MNIST
            # groups of four channels, as in the paper's network
            model=Unet(widths=(64, 64, 128), layers=1, groups=16)
            if data == "mnist"
            else Unet(widths=(64, 128, 128, 128), layers=1, groups=16),
            # one sampler and batch size, so that evaluation, synthesis and quick test share one recording
            sampler=SHORT,
            synthesis=SHORT,
            # the paper's rule does not stop within 30 rounds; this one stops most runs between rounds 10 and 20
            test=QuickTest(every=2, threshold=15.0),
        )
    if scale == "smoke":
        return Setting(
            data=Digits(),
            images=1442,
            model=Unet(widths=(8, 16), layers=1, attention=(), middle_attention=False, groups=8),
            steps=50,
            rounds=3,
            batch=64,
            K=1,
            E=1,
            E_plus=2,
            warmup=2,
            clients=6,
            p=0.34,
            zeta=2e-3,
            eta=5e-4,
            every=0,
            sampler=Ddim(steps=5),
            synthesis=Ddim(steps=5, batch=24),
            fid=FID(n=200, encoder=Classifier(), split="train"),
            test=QuickTest(every=1, size=50, encoder=Pixels(), threshold=0.05),
        )
    return printed


def _recipe(s: Setting, algorithm: Algorithm, rounds: int | None = None, **rest: Any) -> Recipe:
    values = {"evaluate": Evaluate(every=s.every, grid=100, metrics=(s.fid,))} | rest
    return Recipe(
        data=s.data,
        clients=s.clients,
        partition=Shards(),
        model=s.model,
        task=Denoise(schedule=Linear(steps=s.steps)),
        algorithm=algorithm,
        rounds=rounds or s.rounds,
        sampler=s.sampler,
        **values,
    )


def _synthesis(s: Setting) -> dict[str, Any]:
    return {"warmup": s.local(s.warmup), "sampler": s.synthesis}


# all methods average uniformly, as in Eq. 9, so that they differ in the method only


def fedavg(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedAvg in FedDDPM's setting."""
    s = setting(data, scale, size)
    return _recipe(s, FedAvg(local=s.local(), cohort=s.p, weights="uniform"))


def fedprox(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedProx in FedDDPM's setting; the paper does not print its mu."""
    s = setting(data, scale, size)
    return _recipe(s, FedProx(local=s.local(), cohort=s.p, weights="uniform", mu=0.01))


def scaffold(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """SCAFFOLD in FedDDPM's setting, under Adam with mean gradients as control variates."""
    s = setting(data, scale, size)
    return _recipe(s, Scaffold(local=s.local(), cohort=s.p))


def mofedsam(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """MoFedSAM in FedDDPM's setting, under Adam with the mean perturbed gradient as momentum."""
    s = setting(data, scale, size)
    return _recipe(s, MoFedSAM(local=s.local(), cohort=s.p, weights="uniform", rho=s.rho))


def localaug(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """LocalAug: the clients train on FedDDPM's auxiliary images too."""
    s = setting(data, scale, size)
    return _recipe(s, LocalAug(**_synthesis(s), local=s.local(), cohort=s.p, weights="uniform"))


def fedddpm(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedDDPM: warm-up, synthesis, then rounds with a correction at the server."""
    s = setting(data, scale, size)
    return _recipe(s, FedDDPM(**_synthesis(s), local=s.local(), cohort=s.p, central=s.central(s.eta, s.E)))


def plus(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedDDPM+: FedAvg until its quick test stops it, then one long correction with the clients' learning rate."""
    s = setting(data, scale, size)
    central = s.central(s.zeta, s.E_plus)
    return _recipe(s, FedDDPMPlus(**_synthesis(s), local=s.local(), cohort=s.p, central=central, test=s.test))


def aux_only(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """Training on an auxiliary set as large as the real one, with as many gradient steps as FedAvg's clients take."""
    s = setting(data, scale, size)
    rounds, epochs = alone(s)
    central = dataclasses.replace(s.local(epochs), state="kept")
    return _recipe(s, AuxOnly(**_synthesis(s), central=central), rounds=rounds)


def centralised(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """All data in one place, with as many gradient steps as FedAvg's clients take."""
    s = setting(data, scale, size)
    return _recipe(s, Centralised(local=Adam(lr=s.zeta, batch=s.batch, steps=s.cohort * s.K * s.batches, state="kept")))


def local_only(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """Each site trains alone, for as many epochs as under FedAvg on average."""
    s = setting(data, scale, size)
    evaluate = Evaluate(grid=16, metrics=(s.fid,))  # only at the end: every client's own model is evaluated
    rounds, epochs = alone(s)
    return _recipe(s, LocalOnly(local=s.local(epochs)), rounds=rounds, evaluate=evaluate)


def fedavg_matched(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedAvg with more rounds, so that it takes as many gradient steps as FedDDPM including warm-up and corrections."""
    s = setting(data, scale, size)
    return dataclasses.replace(fedavg(data, scale, size), rounds=_matched(s))


def fedavg_size(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedAvg with clients weighted by their number of images; uniform weights harm methods without auxiliary images most."""
    s = setting(data, scale, size)
    return _recipe(s, FedAvg(local=s.local(), cohort=s.p, weights="size"))


def fedavg_ema(data: Data = "mnist", scale: Size = "paper", size: Resized = AS_IT_IS) -> Recipe:
    """FedAvg with a moving average of the model over rounds, measured by the metrics that end in _ema."""
    return dataclasses.replace(fedavg(data, scale, size), ema=AVERAGE)


def alone(s: Setting) -> tuple[int, int]:
    """Rounds, and epochs per round (K or a few more), that add up to a client's average epochs under FedAvg."""
    total = max(s.K, round(s.rounds * s.cohort * s.K / s.clients))
    epochs = next(e for e in range(s.K, total + 1) if total % e == 0)
    return total // epochs, epochs


def _matched(s: Setting) -> int:
    warmup = s.clients * s.warmup * s.batches
    federated = s.cohort * s.K * s.batches
    corrections = s.E * math.ceil(0.1 * s.images / s.batch)
    return math.ceil(warmup / federated + s.rounds * (1 + corrections / federated))
