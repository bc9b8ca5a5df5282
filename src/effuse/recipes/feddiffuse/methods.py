"""FedDiffuse: de Goede et al., 2024, "Training Diffusion Models with Federated Learning", sections 4 and 5."""

from typing import Literal

from effuse.algorithms.feddiffuse import Full, UDec, ULatDec, USplit
from effuse.core.algorithm import Algorithm
from effuse.core.data import Source
from effuse.core.metric import Metric
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import Adam
from effuse.data.folders import CelebA
from effuse.data.idx import FashionMNIST
from effuse.data.partition import Iid
from effuse.data.transforms import Crop, Resize
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.fidelity import FID, KID
from effuse.metrics.mix import ClassMix
from effuse.models.convnext_unet import ConvnextUnet
from effuse.tasks.denoise import Denoise

Profile = Literal["text", "code"]  # the loss differs between the paper's text and its published code

# the authors' code writes unscaled images to disk, so its FID compares clipped images, generated and real
FIDELITY: tuple[Metric, ...] = (
    FID(n=5000, reference=5000),
    FID(n=5000, reference=5000, clipped=True),
    KID(n=5000, reference=5000),
    ClassMix(n=5000),  # the network is unconditional: it may forget classes if sites are skewed
)


def full(profile: Profile = "text") -> Recipe:
    """FULL on Fashion-MNIST: five clients exchange the whole U-Net."""
    return _recipe(Full(local=_adam()), profile)


def usplit(profile: Profile = "text") -> Recipe:
    """USPLIT on Fashion-MNIST: half of the clients report the encoder, the others the decoder."""
    return _recipe(USplit(local=_adam()), profile)


def ulatdec(profile: Profile = "text") -> Recipe:
    """ULATDEC on Fashion-MNIST: every client has its own encoder."""
    return _recipe(ULatDec(local=_adam()), profile)


def udec(profile: Profile = "text") -> Recipe:
    """UDEC on Fashion-MNIST: only the decoder is shared."""
    return _recipe(UDec(local=_adam()), profile)


def celeba(profile: Profile = "text") -> Recipe:
    """FULL on CelebA at 64x64, with 16 classes from Male, Young and hair colour; 30 rounds."""
    data = CelebA(transforms=(Crop(side=178), Resize(side=64)))
    # for CelebA the authors' images are in [0, 1] and not clipped, so the usual FID is comparable
    metrics = (FID(n=5000, reference=5000), KID(n=5000, reference=5000))
    return _recipe(Full(local=_adam(batch=64)), profile, data=data, rounds=30, metrics=metrics)


def _adam(batch: int = 128) -> Adam:
    return Adam(lr=1e-4, batch=batch, epochs=5)  # moments start at zero in every round, as in the authors' code


def _recipe(
    algorithm: Algorithm,
    profile: Profile,
    data: Source = FashionMNIST(),
    rounds: int = 15,
    metrics: tuple[Metric, ...] = FIDELITY,
) -> Recipe:
    return Recipe(
        data=data,
        clients=5,
        partition=Iid(),
        model=ConvnextUnet(),
        task=Denoise(distance="huber" if profile == "code" else "mse"),
        algorithm=algorithm,
        rounds=rounds,
        evaluate=Evaluate(metrics=metrics),
        sampler=Ancestral(batch=1000),
        seed=2023,
    )
