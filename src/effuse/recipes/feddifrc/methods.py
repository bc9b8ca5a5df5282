"""FedDifRC, its rivals and its controls in the paper's protocol, and the guide that the same federation trains."""

import dataclasses
import math
from typing import Any, Literal

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fed3r import Fed3R
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedcda import FedCDA
from effuse.algorithms.feddda import FedDDA
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.feddisco import FedDisco
from effuse.algorithms.fedema import FedEMA
from effuse.algorithms.fedlid import FedLID
from effuse.algorithms.fednh import FedNH
from effuse.algorithms.fedproto import FedProto
from effuse.algorithms.fedprox import FedProx
from effuse.algorithms.fedrcl import FedRCL, FedRCLGuided
from effuse.algorithms.moon import Moon
from effuse.algorithms.shared.guides import Encoder, Guide, Own, Vectors
from effuse.algorithms.shared.stable_diffusion import StableDiffusion
from effuse.core.algorithm import Algorithm
from effuse.core.errors import RecipeError
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD, Adam, CosineDecay
from effuse.data.sources import Digits
from effuse.diffusion.samplers import DpmSolver
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.class_accuracy import ClassAccuracy, DomainAccuracy
from effuse.metrics.linear_probe import LinearProbe
from effuse.models.headed import Headed
from effuse.models.mobilenet import MobileNetV2
from effuse.models.pretrained import FromPretrained
from effuse.models.projected import Projected
from effuse.models.resnet import Cnn, Resnet
from effuse.models.stable_diffusion import Sd
from effuse.models.unet import DigitsUnet, Unet
from effuse.models.vision import Vision
from effuse.recipes.feddifrc.printed import DOMAINS as DOMAIN_NAMES
from effuse.recipes.feddifrc.scenarios import AUGMENTED, Data, Scenario, judged, partition_of, plain
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.views import Views

Size = Literal["paper", "scaled", "smoke"]
Rival = Literal["fedavg", "fedprox", "moon", "fedproto", "fednh", "feddisco", "fedcda", "feddda", "ridge"]
Regularised = Literal["fedrcl", "fedrcl_drawn", "fedrcl_l2", "fedrcl_both"]  # Table 6's forms of FedRCL
Method = Literal[Rival, Regularised, "feddifrc", "fedema", "fedlid"]  # the last two use no labels
Pool = Literal["mean", "l2"]
Seen = Literal["sd", "own", "vectors", "encoder"]  # where the guide's features come from

NETWORK = Unet(widths=(64, 128, 128, 128), conditional=True)  # 8,954,883 parameters
NOISE = Denoise(drop=0.1)
STAGES = (2, 3, 4)  # of an own guide: the paper's; choose them by `effuse probe`
STEP = 50  # of H with an own guide: the paper's 150 belongs to a latent model; choose it by `effuse probe`
PROJECTION = 256  # MOON's
COMMON = 512  # of the projection that makes features of both signs, where every method has one
BESIDE = ("fedrcl_drawn", "fedrcl_l2", "fedrcl_both")  # Table 6's: with drawn images, held to features, both
GUIDED = ("feddifrc", "fedrcl_l2", "fedrcl_both")  # those that look through the guide
# rounds and local epochs
LENGTHS: dict[Size, tuple[int, int]] = {"paper": (100, 10), "scaled": (40, 5), "smoke": (5, 1)}


def classifier(
    method: Method = "feddifrc",
    data: Data = "cifar10",
    scenario: Scenario = "nid1-0.05",
    scale: Size = "scaled",
    guide: Seen = "vectors",
    folder: str | None = None,
    root: str = "",
    validation: bool = False,
    projected: bool = False,
    longer: float = 1.0,
    drawn: str | None = None,
) -> Recipe:
    """A federation of classifiers by one method.

    `folder` is the guide's: the model of a run (own), or of a published network (sd, encoder). `drawn` is that of the
    denoiser which draws images for FedDDA and FedRCL; without it, it is `folder`. Sets without a source of
    their own are folders of images under `root`. With `validation` a fifth of the training images judges. With `projected`
    the network of every method has the same projection, and guides are pooled by means. `longer` multiplies the rounds.
    The smoke scale is on digits, and its guides are untrained.
    """
    smoke = scale == "smoke"
    length, epochs = LENGTHS[scale]
    rounds = math.ceil(longer * length)
    local = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, batch=64, epochs=epochs)
    clients, partition = partition_of(data, scenario, smoke)
    recipe = Recipe(
        data=judged(Digits() if smoke else plain(data, root, AUGMENTED), validation),
        clients=clients,
        partition=partition,
        model=_network(method, data, scale, projected),
        task=Classify(),
        algorithm=FedAvg(local=local),
        rounds=rounds,
        evaluate=Evaluate(every=1, grid=0, metrics=_metrics(data, smoke)),
    )
    if method == "ridge":
        network = DigitsUnet() if smoke else FromPretrained(folder=_needed(folder, method))
        model = Headed(network=network, stages=(0, 1, 2) if smoke else STAGES)
        return dataclasses.replace(recipe, model=model, algorithm=Fed3R(), rounds=1)
    found = _guide(guide, folder, smoke, "mean" if projected else "l2") if method in GUIDED else None
    return dataclasses.replace(recipe, algorithm=_algorithm(method, local, rounds, found, drawn or folder, smoke))


def unlabelled(
    method: Method = "feddifrc",
    data: Data = "cifar100",
    scenario: Scenario = "nid1-0.05",
    scale: Size = "scaled",
    guide: Seen = "sd",
    folder: str | None = None,
) -> Recipe:
    """A federation without labels: FedEMA, the stand-in for FedLID, or FedDifRC's label-free form, by linear probe."""
    recipe = classifier("fedavg", data, scenario, scale)
    smoke, epochs = scale == "smoke", LENGTHS[scale][1]
    local = SGD(lr=0.032, momentum=0.9, weight_decay=5e-4, batch=64, epochs=epochs, schedule=CosineDecay(), ragged="drop")
    algorithm: Algorithm
    guided = _guide(guide, folder, smoke) if method == "feddifrc" else None
    if guided is not None:
        algorithm = FedDifRC(local=local, guide=guided, t=150 if guide == "sd" else STEP)
    elif method == "fedema":
        algorithm = FedEMA(local=dataclasses.replace(local, ema=0.99))
    elif method == "fedlid":
        algorithm = FedLID(local=local)
    else:
        raise RecipeError(f'feddifrc.unlabelled: "{method}" needs labels; choose fedema, fedlid or feddifrc')
    widths = {"hidden": 32, "width": 16} if smoke else {}
    probe: tuple[Metric, ...] = (LinearProbe(),)
    return dataclasses.replace(
        recipe,
        model=Projected(encoder=recipe.model, predictor=method == "fedema", **widths) if guided is None else recipe.model,
        task=Views(),
        algorithm=algorithm,
        evaluate=Evaluate(grid=0, metrics=probe),
    )


def own_guide(
    data: Data = "cifar10",
    scenario: Scenario = "nid1-0.05",
    scale: Size = "scaled",
    central: bool = False,
    validation: bool = False,
) -> Recipe:
    """The guide: a class-conditional U-Net, trained by FedAvg on the partition of the classifiers of the same seed.

    `central` trains it with all data in one place: the oracle, the positive control of guides.
    """
    smoke = scale == "smoke"
    clients, partition = partition_of(data, scenario, smoke)
    rounds, epochs = {"paper": (200, 2), "scaled": (100, 1), "smoke": (2, 1)}[scale]
    local = Adam(lr=1e-3 if smoke else 2e-4, batch=64 if smoke else 128, epochs=epochs, clip=1.0)
    algorithm: Algorithm = Centralised(local=local) if central else FedAvg(local=local)
    source = judged(Digits() if smoke else plain(data), validation)
    return Recipe(
        data=source,
        clients=clients,
        partition=partition,
        model=DigitsUnet() if smoke else NETWORK,
        task=NOISE,
        algorithm=algorithm,
        rounds=rounds,
        evaluate=Evaluate(grid=0 if smoke else 100),
        sampler=DpmSolver(steps=20, guidance=1.0),
        ema=0.9,
    )


def _algorithm(method: Method, local: SGD, rounds: int, guide: Guide | None, drawn: str | None, smoke: bool) -> Algorithm:
    """A rival with the value that the paper tuned for it; the others are its authors'."""
    t = 150 if isinstance(guide, StableDiffusion) else STEP
    if method == "feddifrc":
        assert guide is not None
        labelled = guide.labelled  # an encoder is Table 8's plain distance
        return FedDifRC(local=local, guide=guide, t=t, tdcl=float(labelled), distance="unit" if labelled else "l2")
    if method in ("feddda", *BESIDE):
        sampler = DpmSolver(steps=2 if smoke else 20, guidance=1.0)
        n, share = (40, 10) if smoke else (100_000, 10_000)
        images: dict[str, Any] = {"task": NOISE, "sampler": sampler, "n": n, "share": share}
        network: Arch | None = None
        if method != "fedrcl_l2":
            network = DigitsUnet() if smoke else FromPretrained(folder=_needed(drawn, method))
        if network is not None and method == "feddda":
            return FedDDA(local=local, guide=network, **images)
        return FedRCLGuided(local=local, near=0.6, beta=1.0, draws=network, guide=guide, t=t, **images)
    known: dict[str, Algorithm] = {
        "fedavg": FedAvg(local=local),
        "fedprox": FedProx(local=local, mu=1e-3),
        "moon": Moon(local=local, mu=1.0),
        "fedproto": FedProto(local=local, pull=1.0),
        "fednh": FedNH(local=dataclasses.replace(local, clip=10.0), rho=0.7),
        "feddisco": FedDisco(local=local),
        "fedcda": FedCDA(local=local, warmup=math.ceil(rounds / 2)),  # half of the rounds, as in the paper
        "fedrcl": FedRCL(local=local, near=0.6, beta=1.0),
    }
    if method not in known:
        raise RecipeError(f'feddifrc.classifier: "{method}" uses no labels; run feddifrc.unlabelled("{method}")')
    return known[method]


def _guide(source: Seen, folder: str | None, smoke: bool, pool: Pool = "l2") -> Guide:
    """A trained guide by its folder. Root mean squares are never negative, as the features of a ResNet are not."""
    if source == "vectors":
        return Vectors()
    if smoke:
        if source == "encoder":
            return Encoder(network=Cnn(), reduce="random")
        return Own(network=DigitsUnet(), stages=(0, 1, 2), task=NOISE, pool=pool, reduce="random")
    if source == "sd":
        return StableDiffusion(network=Sd(folder=folder or "stable-diffusion-v1-5"), pool=pool)
    if source == "encoder":
        return Encoder(network=Vision(folder=_needed(folder, source)))
    return Own(network=FromPretrained(folder=_needed(folder, source)), stages=STAGES, task=NOISE, pool=pool, reduce="random")


def _needed(folder: str | None, what: str) -> str:
    if folder is None:
        raise RecipeError(
            f'feddifrc: "{what}" needs the folder of a network; run feddifrc.own_guide, then give folder="RUN/model", '
            "or name a published one"
        )
    return folder


def _metrics(data: Data, smoke: bool) -> tuple[Metric, ...]:
    more = (DomainAccuracy(names=DOMAIN_NAMES[data]),) if data in DOMAIN_NAMES and not smoke else ()
    return (Accuracy(), ClassAccuracy(), *more)


def _network(method: Method, data: Data, scale: Size, projected: bool) -> Arch:
    """ResNet-10, or MobileNetV2 for Tiny-ImageNet; the paper's have BatchNorm. MOON always has a projection."""
    projection = COMMON if projected else PROJECTION if method == "moon" else None
    head: Literal["linear", "cosine"] = "cosine" if method == "fednh" else "linear"
    if scale == "smoke":
        return Cnn(projection=32 if method == "moon" and not projected else 64, head=head)
    norm: Literal["batch", "group"] = "batch" if scale == "paper" else "group"
    if data == "tiny":
        return MobileNetV2(norm=norm, projection=projection, head=head)
    return Resnet(blocks=(1, 1, 1, 1), norm=norm, projection=projection, head=head)
