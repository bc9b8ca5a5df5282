"""FedDiffuse: de Goede et al., 2024, "Training Diffusion Models with Federated Learning", sections 4 and 5."""

import itertools
from typing import Literal

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddiffuse import Full, UDec, ULatDec, USplit
from effuse.core.data import Source
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import Adam
from effuse.core.table import Cell, Scale, Table
from effuse.data.folders import CelebA
from effuse.data.idx import FashionMNIST
from effuse.data.partition import Iid
from effuse.data.transforms import Crop, Resize
from effuse.diffusion.objective import Denoise
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.fidelity import FID, KID, Fidelity
from effuse.models.convnext_unet import ConvnextUnet

Profile = Literal["text", "code"]  # where the paper's text and its published code differ: the loss

# the authors' code writes images to disk unscaled: its FID is that of clipped images, generated and real
FIDELITY: tuple[Fidelity, ...] = (
    FID(n=5000, reference=5000),
    FID(n=5000, reference=5000, clipped=True),
    KID(n=5000, reference=5000),
)


def full(profile: Profile = "text") -> Recipe:
    """FULL on Fashion-MNIST: five clients exchange the whole U-Net."""
    return _recipe(Full(local=_adam()), profile)


def usplit(profile: Profile = "text") -> Recipe:
    """USPLIT on Fashion-MNIST: of two clients one reports the encoder, the other the decoder."""
    return _recipe(USplit(local=_adam()), profile)


def ulatdec(profile: Profile = "text") -> Recipe:
    """ULATDEC on Fashion-MNIST: every client keeps an encoder of its own."""
    return _recipe(ULatDec(local=_adam()), profile)


def udec(profile: Profile = "text") -> Recipe:
    """UDEC on Fashion-MNIST: the decoder alone is shared."""
    return _recipe(UDec(local=_adam()), profile)


def celeba(profile: Profile = "text") -> Recipe:
    """FULL on CelebA at 64x64, its 16 classes made of Male, Young and hair colour; 30 rounds."""
    data = CelebA(transforms=(Crop(side=178), Resize(side=64)))
    # there the authors' images were in [0, 1] and not clipped, so that the usual FID is the one to compare
    metrics = (FID(n=5000, reference=5000), KID(n=5000, reference=5000))
    return _recipe(Full(local=_adam(batch=64)), profile, data=data, rounds=30, metrics=metrics)


def _adam(batch: int = 128) -> Adam:
    return Adam(lr=1e-4, batch=batch, epochs=5)  # its moments are new in every round, as in the authors' code


def _recipe(
    algorithm: FedAvg,
    profile: Profile,
    data: Source = FashionMNIST(),
    rounds: int = 15,
    metrics: tuple[Fidelity, ...] = FIDELITY,
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


SKEWS = {
    "iid": "iid()",
    "l-skew": "label_skew(beta=0.5, mask=True, seed=2023, legacy=True)",
    "q-skew": "quantity_skew(beta=0.5, seed=2023, legacy=True)",
}
# FID and its spread over five runs (and, where clients own models, over the clients), in the order of SKEWS
TABLE_1 = {
    ("full", 2): ((39, 2), (33, 1), (33, 3)),
    ("full", 5): ((39, 4), (43, 4), (23, 5)),
    ("full", 10): ((61, 2), (64, 3), (76, 11)),
    ("usplit", 2): ((37, 3), (38, 4), (55, 4)),
    ("usplit", 5): ((41, 5), (61, 5), (39, 9)),
    ("usplit", 10): ((62, 3), (70, 8), (87, 19)),
    ("ulatdec", 2): ((45, 13), (49, 4), (54, 24)),
    ("ulatdec", 5): ((53, 15), (72, 30), (122, 138)),
    ("ulatdec", 10): ((70, 14), (101, 83), (137, 125)),
    ("udec", 2): ((49, 16), (49, 5), (78, 48)),
    ("udec", 5): ((51, 15), (75, 31), (139, 135)),
    ("udec", 10): ((72, 20), (98, 67), (147, 119)),
}
BASELINE = 42.53  # one client, one epoch a round


def table1(profile: Profile = "text") -> Table:
    """Table 1: FID on Fashion-MNIST of four methods, three numbers of clients, three partitions."""
    cells = [
        Cell(
            labels={"method": method, "clients": clients, "partition": skew},
            recipe=f'feddiffuse.{method}(profile="{profile}")',
            settings=(f"clients={clients}", f"partition={SKEWS[skew]}"),
            metric="fid_clipped",
            printed=printed,
            spread=spread,
        )
        for (method, clients), row in TABLE_1.items()
        for skew, (printed, spread) in zip(SKEWS, row)
    ]
    smoke = _smoke("rounds=2", "algorithm.local.epochs=1")
    return _table(f"FedDiffuse, Table 1: FID on Fashion-MNIST, {profile} profile", cells, smoke)


def figure3(profile: Profile = "text") -> Table:
    """Figure 3: FID of FULL by local epochs E and clients K, after the baseline of one client."""
    cells = [
        Cell(
            labels={"epochs": epochs, "clients": clients},
            recipe=f'feddiffuse.full(profile="{profile}")',
            settings=(f"algorithm.local.epochs={epochs}", f"clients={clients}"),
            metric="fid_clipped",
            printed=BASELINE if clients == 1 else None,
        )
        for epochs, clients in ((1, 1), *itertools.product((1, 2, 3, 5, 8), (2, 5, 10)))
    ]
    smoke = _smoke("rounds=1")
    return _table(f"FedDiffuse, Figure 3: FID on Fashion-MNIST by local epochs and clients, {profile} profile", cells, smoke)


def _table(title: str, cells: list[Cell], smoke: Scale) -> Table:
    return Table(title=title, cells=tuple(cells), also=("fid", "fid_pooled"), scales={"paper": Scale(), "smoke": smoke})


def _smoke(*less: str) -> Scale:
    """The digits, a small network, few steps: whether everything works, and nothing about how well."""
    settings = (
        "data=digits()",
        "model=convnext_unet(dim=8, multipliers=[1, 2])",
        "algorithm.local.batch=128",
        "algorithm.local.lr=2e-3",
        "sampler=ddim(steps=10)",
        "evaluate.grid=20",
        "evaluate.metrics=[fid(n=200, encoder=classifier()), fid(n=200, encoder=classifier(), clipped=True)]",
        *less,
    )
    stand_ins = {"fid_clipped": "fid_classifier_clipped", "fid": "fid_classifier", "fid_pooled": "fid_classifier_pooled"}
    return Scale(settings=settings, metrics=stand_ins, comparable=False)
