"""FedDiff and its rivals in the paper's protocol: one round of 200 local epochs, 50 epochs at the server, one budget."""

import dataclasses
from typing import Any, Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.class_means import ClassMeans
from effuse.algorithms.dense import Dense
from effuse.algorithms.ensemble import OneShotEnsemble
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedcvae import FedCVAE
from effuse.algorithms.feddiff import FedDiff
from effuse.algorithms.nearest_mean import NearestMean
from effuse.algorithms.shared.central_images import CentralImages
from effuse.algorithms.shared.filters import Everything, Filter, Fmf
from effuse.core.algorithm import Algorithm
from effuse.core.data import Source
from effuse.core.model import Arch
from effuse.core.privacy import Budget, DpSgd
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.sampler import Sampler
from effuse.core.solvers import AdamW
from effuse.data.dirichlet import LabelSkew
from effuse.data.idx import FashionMNIST
from effuse.data.npz import CIFAR10, PathMNIST
from effuse.data.sources import Digits
from effuse.data.transforms import Resize
from effuse.diffusion.samplers import Ancestral, Ddim
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.cas import Cas
from effuse.models.cvae import Cvae
from effuse.models.resnet import Cnn, LinearClassifier, Norm, Resnet
from effuse.models.unet import Unet
from effuse.privacy.histogram import Exact, Gaussian
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise

Data = Literal["fashion", "path", "cifar10", "digits"]
Size = Literal["paper", "scaled", "smoke"]

NETWORK = Unet(widths=(24, 48, 96, 192), layers=1, attention=(16,), groups=8, conditional=True)  # 5.62 M parameters
SMALL = Unet(widths=(12, 24, 48, 96), layers=1, attention=(16,), groups=4, conditional=True)  # 1.41 M
TINY = Unet(widths=(8, 16), layers=1, attention=(), groups=4, conditional=True)  # for smoke tests
SOURCES: dict[Data, Source] = {
    "fashion": FashionMNIST(transforms=(Resize(side=32),)),
    "path": PathMNIST(transforms=(Resize(side=32),)),
    "cifar10": CIFAR10(),
    "digits": Digits(),
}
AUTOENCODERS: dict[Data, Cvae] = {
    "fashion": Cvae(z=10),  # FedCVAE's numbers: 10 for grey images, 25 for colour
    "path": Cvae(z=25),
    "cifar10": Cvae(z=25),
    "digits": Cvae(widths=(32, 64), z=10),
}
MAGNITUDES = 20.0  # z of the filter's release: epsilon 0.16 alone at delta 1e-5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods have in common at a scale."""

    local: int  # epochs at the clients
    central: int  # epochs at the server
    sampler: Sampler
    batch: int = 128
    lr: float = 1e-3  # of the paper's four rates; `feddiff.tuning` compares them

    def warmup(self, privacy: DpSgd | None = None, **more: Any) -> AdamW:
        return AdamW(lr=self.lr, batch=self.batch, epochs=self.local, privacy=privacy, **more)

    def classifier(self, privacy: DpSgd | None) -> AdamW:
        # batch statistics are recorded on a GPU where no batch is smaller than the others
        return dataclasses.replace(self.warmup(privacy), ragged="drop")

    def server(self) -> AdamW:
        return AdamW(lr=self.lr, batch=self.batch, epochs=1, state="kept", ragged="drop")


SETTINGS: dict[Size, Setting] = {
    "paper": Setting(local=200, central=50, sampler=Ancestral(batch=500)),
    "scaled": Setting(local=25, central=50, sampler=Ddim(steps=100, eta=1.0, batch=500)),
    "smoke": Setting(local=1, central=2, sampler=Ddim(steps=3, batch=100), batch=64),
}


def feddiff(
    data: Data = "fashion", scale: Size = "paper", small: bool = False, epsilon: float | None = None, fmf: float = 0.0
) -> Recipe:
    """FedDiff: clients send diffusion models, the server draws images. `fmf` is the share that its filter removes."""
    data, s = _at(data, scale)
    rule: Filter = Fmf(gamma=fmf, noise=0.0 if epsilon is None else MAGNITUDES) if fmf else Everything()
    algorithm = _feddiff(data, s, SMALL if small else NETWORK, rule, s.warmup(_private(epsilon)), epsilon)
    return _recipe(algorithm, data, s, epsilon)


def feddiff_additions(
    data: Data = "fashion", scale: Size = "paper", epsilon: float = 10.0, fmf: float = 0.0, repeats: int = 8
) -> Recipe:
    """FedDiff under a budget with what later work found: class means first, large batches, noise draws, averaged weights."""
    data, s = _at(data, scale)
    warmup = s.warmup(_private(epsilon, repeats=repeats), ema=0.99)
    warmup = dataclasses.replace(warmup, batch=8 * s.batch)
    rule: Filter = Fmf(gamma=fmf, noise=MAGNITUDES) if fmf else Everything()
    algorithm = _feddiff(data, s, SMALL, rule, warmup, epsilon)
    means = CentralImages(noise=5.0, solver=AdamW(lr=s.lr, batch=s.batch, steps=40 * s.local), copies=64)
    return _recipe(dataclasses.replace(algorithm, central_images=means), data, s, epsilon)


def fedcvae(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """FedCVAE-Ens: clients send the decoder of a conditional autoencoder, the server draws images from it."""
    data, s = _at(data, scale)
    warmup, generators = s.warmup(_private(epsilon)), (AUTOENCODERS[data],)
    algorithm = FedCVAE(warmup=warmup, central=s.server(), generators=generators, histogram=_histogram(epsilon))
    return _recipe(algorithm, data, s, epsilon)


def class_means(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """A classifier trained on copies of noisy class means, without any network at the clients."""
    data, s = _at(data, scale)
    return _recipe(ClassMeans(central=s.server()), data, s, epsilon)


def nearest_mean(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """The nearest noisy class mean: nothing is trained at all."""
    data, s = _at(data, scale)
    return dataclasses.replace(_recipe(NearestMean(), data, s, epsilon), model=LinearClassifier(), rounds=1)


def fedavg(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """One-shot FedAvg: clients train classifiers, which are averaged once."""
    data, s = _at(data, scale)
    return dataclasses.replace(_recipe(FedAvg(local=s.classifier(_private(epsilon))), data, s, epsilon), rounds=1)


def ensemble(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """The mean of the logits of the clients' classifiers."""
    data, s = _at(data, scale)
    algorithm = OneShotEnsemble(local=s.classifier(_private(epsilon)))
    return dataclasses.replace(_recipe(algorithm, data, s, epsilon), rounds=1)


def dense(data: Data = "fashion", scale: Size = "paper", epsilon: float | None = None) -> Recipe:
    """DENSE: the clients' classifiers are distilled into one on images that make them agree."""
    data, s = _at(data, scale)
    return _recipe(Dense(local=s.classifier(_private(epsilon)), central=s.server()), data, s, epsilon)


def real(data: Data = "fashion", scale: Size = "paper") -> Recipe:
    """The bound: the same classifier, trained on the real images in one place."""
    data, s = _at(data, scale)
    return _recipe(Centralised(local=s.server()), data, s, None)


def many_rounds(data: Data = "fashion", scale: Size = "paper", epsilon: float = 10.0, rounds: int = 25) -> Recipe:
    """What one-shot costs: FedAvg of the same generator over many rounds, and a classifier trained on its images."""
    data, s = _at(data, scale)
    local = dataclasses.replace(s.warmup(_private(epsilon)), epochs=max(1, s.local // rounds))
    trained = dataclasses.replace(s.server(), epochs=s.central, state="fresh")
    cas = Cas(n=1000 if data == "digits" else 50_000, arch=_classifier(data, epsilon), solver=trained)
    recipe = _recipe(FedAvg(local=local), data, s, epsilon)
    return dataclasses.replace(
        recipe,
        model=TINY if data == "digits" else NETWORK,
        task=Denoise(drop=0.1),
        rounds=min(rounds, s.local),
        sampler=s.sampler,
        evaluate=Evaluate(grid=100, metrics=(cas,)),
        ema=0.9,
    )


def _at(data: Data, scale: Size) -> tuple[Data, Setting]:
    """The data and the setting of a scale; a smoke test runs on digits."""
    return ("digits" if scale == "smoke" else data), SETTINGS[scale]


def _feddiff(data: Data, s: Setting, network: Arch, rule: Filter, warmup: AdamW, epsilon: float | None) -> FedDiff:
    return FedDiff(
        warmup=warmup,
        central=s.server(),
        generators=(TINY if data == "digits" else network,),
        task=Denoise(drop=0.1),  # the paper cites guidance without its settings: labels are dropped, and no guidance is used
        sampler=s.sampler,
        filter=rule,
        histogram=_histogram(epsilon),
    )


def _private(epsilon: float | None, repeats: int = 1) -> DpSgd | None:
    return None if epsilon is None else DpSgd(clip=1.0, repeats=repeats)


def _histogram(epsilon: float | None) -> Exact | Gaussian:
    return Exact() if epsilon is None else Gaussian(epsilon=min(0.2, epsilon / 10), delta=1e-6)


def _classifier(data: Data, epsilon: float | None) -> Arch:
    """With BatchNorm, whose statistics DENSE needs. Under a budget with GroupNorm: each image needs its own gradient."""
    norm: Norm = "batch" if epsilon is None else "group"
    return Cnn(norm=norm) if data == "digits" else Resnet(norm=norm)


def _recipe(algorithm: Algorithm, data: Data, s: Setting, epsilon: float | None) -> Recipe:
    return Recipe(
        data=SOURCES[data],
        clients=10,
        partition=LabelSkew(beta=0.01, mask=True),
        model=_classifier(data, epsilon),
        task=Classify(),
        algorithm=algorithm,
        rounds=s.central,
        evaluate=Evaluate(grid=0, metrics=(Accuracy(),)),
        budget=None if epsilon is None else Budget(epsilon=epsilon, delta=1e-5),
    )
