"""FedDDPM: Peng et al., 2025, "Federated Learning for Diffusion Models", section V, with fair controls."""

import dataclasses
import math
from typing import Literal

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
from effuse.core.errors import RecipeError
from effuse.core.model import Arch
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.sampler import Sampler
from effuse.core.solvers import Adam
from effuse.core.table import Cell, Scale, Table
from effuse.data.idx import MNIST
from effuse.data.npz import CIFAR10, CIFAR100
from effuse.data.partition import Shards
from effuse.data.sources import Digits, Some
from effuse.diffusion.objective import Denoise
from effuse.diffusion.samplers import Ancestral, Ddim
from effuse.diffusion.schedules import Linear
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.unet import CifarUnet, MnistUnet, Unet

Data = Literal["mnist", "cifar10", "cifar100"]
Size = Literal["paper", "scaled", "smoke"]
AVERAGE = 0.9  # of the model over rounds, in `fedavg_ema`


@dataclasses.dataclass(frozen=True)
class Setting:
    """A data set at a scale: everything that the methods have in common."""

    data: Source
    images: int  # for training
    model: Arch
    steps: int  # of diffusion
    rounds: int  # T
    batch: int
    K: int  # local epochs
    E: int  # the server's epochs in a round of FedDDPM
    E_plus: int  # and in the one correction of FedDDPM+
    warmup: int  # epochs
    clients: int = 100  # N
    p: float = 0.15
    zeta: float = 2e-4
    eta: float = 5e-5
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
        """Adam, new in every round: with the printed rates the SGD of the theory would hardly move."""
        return Adam(lr=self.zeta, batch=self.batch, epochs=epochs or self.K)

    def central(self, lr: float, epochs: int) -> Adam:
        return Adam(lr=lr, batch=self.batch, epochs=epochs)


CIFAR = {"images": 50_000, "model": CifarUnet(), "steps": 1000, "rounds": 600, "batch": 64, "K": 5, "E": 5, "E_plus": 30}
PAPER = {
    "mnist": Setting(
        data=MNIST(), images=60_000, model=MnistUnet(), steps=500, rounds=400, batch=128, K=3, E=1, E_plus=20, warmup=200,
        synthesis=Ancestral(batch=60),
    ),
    "cifar10": Setting(data=CIFAR10(), warmup=400, **CIFAR),
    "cifar100": Setting(data=CIFAR100(), warmup=600, **CIFAR),
}  # fmt: skip


# few steps for models that were trained little: noise on the way and clipped predictions keep their errors from growing; steps that are
# short where fine contrast is made, or A would have lost some of it, and what is trained on A some more
SHORT = Ddim(steps=50, spacing="quadratic", eta=0.5, clip=True, batch=500)


def _setting(data: Data, scale: Size) -> Setting:
    printed = PAPER[data]
    if scale == "scaled":
        # as non-IID as in the paper and nearly as rarely asked; ten clients, so that each model has steps enough to draw something:
        # 752 of warm-up, 2,820 one after another in the rounds; epochs of warm-up 16, federated ones T p K = 12
        return dataclasses.replace(
            printed, clients=10, p=0.2, rounds=30, batch=128, K=2, E=1, E_plus=20, warmup=16, zeta=5e-4, eta=1e-4,
            # groups of four channels, as the paper's network has
            model=Unet(widths=(64, 64, 128), layers=1, groups=16) if data == "mnist"
            else Unet(widths=(64, 128, 128, 128), layers=1, groups=16),
            # one batch size: a single recording of the sampler serves evaluation, synthesis and quick test
            sampler=SHORT, synthesis=SHORT, test=QuickTest(every=4, threshold=1.0),
        )  # fmt: skip
    if scale == "smoke":
        return Setting(
            data=Digits(), images=1442, model=Unet(widths=(8, 16), layers=1, attention=(), middle_attention=False, groups=8),
            steps=50, rounds=3, batch=64, K=1, E=1, E_plus=2, warmup=2, clients=6, p=0.34, zeta=2e-3, eta=5e-4, every=0,
            sampler=Ddim(steps=5), synthesis=Ddim(steps=5, batch=24), fid=FID(n=200, encoder=Classifier(), split="train"),
            test=QuickTest(every=1, size=50, encoder=Pixels(), threshold=0.05),
        )  # fmt: skip
    return printed


def _recipe(s: Setting, algorithm: Algorithm, rounds: int | None = None, **rest: object) -> Recipe:
    values = {"evaluate": Evaluate(every=s.every, grid=100, metrics=(s.fid,))} | rest
    return Recipe(
        data=s.data, clients=s.clients, partition=Shards(), model=s.model, task=Denoise(schedule=Linear(steps=s.steps)),
        algorithm=algorithm, rounds=rounds or s.rounds, sampler=s.sampler, **values,
    )  # fmt: skip


def _synthesis(s: Setting) -> dict[str, object]:
    return {"warmup": s.local(s.warmup), "sampler": s.synthesis}


# all average uniformly, as Eq. 9 has it, so that they differ in nothing but the method


def fedavg(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedAvg in FedDDPM's setting."""
    s = _setting(data, scale)
    return _recipe(s, FedAvg(local=s.local(), cohort=s.p, weights="uniform"))


def fedprox(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedProx in FedDDPM's setting; its mu is not printed."""
    s = _setting(data, scale)
    return _recipe(s, FedProx(local=s.local(), cohort=s.p, weights="uniform", mu=0.01))


def scaffold(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """SCAFFOLD in FedDDPM's setting, under Adam with mean gradients as control variates."""
    s = _setting(data, scale)
    return _recipe(s, Scaffold(local=s.local(), cohort=s.p))


def mofedsam(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """MoFedSAM in FedDDPM's setting, under Adam with the mean perturbed gradient as momentum."""
    s = _setting(data, scale)
    return _recipe(s, MoFedSAM(local=s.local(), cohort=s.p, weights="uniform"))


def localaug(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """LocalAug: FedDDPM's auxiliary images shared out to the clients."""
    s = _setting(data, scale)
    return _recipe(s, LocalAug(**_synthesis(s), local=s.local(), cohort=s.p, weights="uniform"))


def fedddpm(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedDDPM: warm-up, synthesis, then rounds with a correction at the server."""
    s = _setting(data, scale)
    return _recipe(s, FedDDPM(**_synthesis(s), local=s.local(), cohort=s.p, central=s.central(s.eta, s.E)))


def plus(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedDDPM+: FedAvg until its quick test says stop, then one long correction, by the clients' step as in the listing."""
    s = _setting(data, scale)
    central = s.central(s.zeta, s.E_plus)
    return _recipe(s, FedDDPMPlus(**_synthesis(s), local=s.local(), cohort=s.p, central=central, test=s.test))


def aux_only(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """The auxiliary set alone, as large as the real one, with as many gradient steps as FedAvg's clients take."""
    s = _setting(data, scale)
    rounds, epochs = _alone(s)
    central = dataclasses.replace(s.local(epochs), state="kept")
    return _recipe(s, AuxOnly(**_synthesis(s), central=central), rounds=rounds)


def centralised(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """All data in one place, with as many gradient steps as FedAvg's clients take."""
    s = _setting(data, scale)
    return _recipe(s, Centralised(local=Adam(lr=s.zeta, batch=s.batch, steps=s.cohort * s.K * s.batches, state="kept")))


def local_only(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """Each site alone, with as many epochs as FedAvg asks of it on average."""
    s = _setting(data, scale)
    evaluate = Evaluate(grid=16, metrics=(s.fid,))  # in the end only: every client's own model is looked at
    rounds, epochs = _alone(s)
    return _recipe(s, LocalOnly(local=s.local(epochs)), rounds=rounds, evaluate=evaluate)


def fedavg_matched(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedAvg with as many gradient steps as FedDDPM takes in all, warm-up and corrections included: more rounds."""
    s = _setting(data, scale)
    return dataclasses.replace(fedavg(data, scale), rounds=_matched(s))


def fedavg_ema(data: Data = "mnist", scale: Size = "paper") -> Recipe:
    """FedAvg whose server keeps a moving average of the model over rounds; see the metrics that end in _ema."""
    return dataclasses.replace(fedavg(data, scale), ema=AVERAGE)


def _alone(s: Setting) -> tuple[int, int]:
    """Rounds and epochs in each that make up the epochs of a client that takes part in FedAvg, on average; K or a few more in each."""
    in_all = max(s.K, round(s.rounds * s.cohort * s.K / s.clients))
    epochs = next(e for e in range(s.K, in_all + 1) if in_all % e == 0)
    return in_all // epochs, epochs


def _matched(s: Setting) -> int:
    warmup = s.clients * s.warmup * s.batches
    federated = s.cohort * s.K * s.batches
    corrections = s.E * math.ceil(0.1 * s.images / s.batch)
    return math.ceil(warmup / federated + s.rounds * (1 + corrections / federated))


def loss_curves(method: Literal["fedavg", "localaug", "fedddpm"] = "fedddpm", scale: Size = "paper") -> Recipe:
    """The comparison with LocalAug: 20 clients with 500 images of CIFAR-100 each, Dirichlet 0.1, 2,000 auxiliary images."""
    base = {"fedavg": fedavg, "localaug": localaug, "fedddpm": fedddpm}[method]("cifar100", scale)
    if scale != "smoke":
        base = dataclasses.replace(base, data=Some(source=CIFAR100(), n=10_000), clients=20)
    return base.changed([f"partition={PARTITIONS['dir0.1']}", *([] if method == "fedavg" else ["algorithm.share=0.2"])])


# a client may come out of such a draw with no image at all; it is given ten by the largest
PARTITIONS = {
    "shard": "shards(per_client=2)",
    "dir0.1": "label_skew(beta=0.1, top_up=True)",
    "dir0.3": "label_skew(beta=0.3, top_up=True)",
}
METHODS = ("fedavg", "fedprox", "scaffold", "mofedsam", "fedddpm", "plus")
# FID in the order of METHODS; shard, Dirichlet 0.1 and 0.3 with 15 % of the clients a round, then with 30 %
PRINTED = {
    "mnist": (
        (5.822, 4.448, 2.786, 4.868, 2.842, 2.377), (5.714, 4.331, 2.981, 4.651, 2.893, 2.343),
        (4.889, 3.876, 2.584, 4.237, 2.421, 2.150), (4.840, 2.797, 2.358, 4.324, 2.983, 1.903),
        (1.910, 2.151, 1.997, 1.842, 1.662, 1.768), (2.188, 2.037, 1.876, 1.865, 1.771, 1.762),
    ),
    "cifar10": (
        (39.326, 35.348, 28.686, 33.669, 32.886, 25.418), (36.019, 34.230, 29.167, 35.131, 33.118, 25.351),
        (29.659, 33.053, 28.616, 27.820, 30.561, 24.957), (35.522, 31.045, 29.422, 28.626, 30.672, 23.852),
        (22.296, 21.730, 18.089, 19.731, 18.817, 16.354), (21.508, 22.512, 20.531, 21.468, 20.753, 18.741),
    ),
    "cifar100": (
        (37.711, 30.281, 30.674, 37.829, 31.105, 28.667), (40.075, 32.732, 32.878, 38.426, 34.414, 32.580),
        (38.415, 31.862, 31.456, 37.154, 29.670, 30.161), (37.646, 30.442, 28.719, 36.817, 28.502, 28.923),
        (21.818, 23.416, 17.139, 19.096, 24.026, 20.196), (23.612, 22.007, 20.793, 22.996, 27.643, 24.554),
    ),
}  # fmt: skip
STAND_INS = {k: k.replace("fid", "fid_classifier") for k in ("fid", "fid_ema", "fid_auxiliary", "fid_pooled")}
SMOKE = Scale(metrics=STAND_INS, comparable=False)
SCALES = {"paper": Scale(), "scaled": Scale(comparable=False), "smoke": SMOKE}
LESS = ("clients=6", "rounds=2", "evaluate.every=0",
        'evaluate.metrics=[fid(n=200, encoder=classifier(), split="train"), class_mix(n=200)]')  # fmt: skip
# recorded, all of them: cells of a process share what was recorded, and would record anew where the next one chose otherwise
SMALL_SCALES = {
    "scaled": Scale(settings=("speed=graph",), comparable=False),
    "smoke": dataclasses.replace(SMOKE, settings=LESS),
}


def table1() -> Table:
    """Table 1: FID on MNIST of six methods, three partitions, two rates of participation."""
    return _fid_table("Table 1", "mnist", "MNIST")


def table2() -> Table:
    """Table 2: FID on CIFAR-10 of six methods, three partitions, two rates of participation."""
    return _fid_table("Table 2", "cifar10", "CIFAR-10")


def table3() -> Table:
    """Table 3: FID on CIFAR-100 of six methods, three partitions, two rates of participation."""
    return _fid_table("Table 3", "cifar100", "CIFAR-100")


def _fid_table(number: str, data: Data, called: str) -> Table:
    columns = [(partition, p) for p in (15, 30) for partition in PARTITIONS]
    cells = [
        _cell(method, data, {"partition": partition, "participation": p}, printed, f"algorithm.cohort={p / 100}")
        for method, row in zip(METHODS, PRINTED[data])
        for (partition, p), printed in zip(columns, row)
    ]
    title = f"FedDDPM, {number}: FID on {called}, participation in per cent"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary",), scales=SCALES)


def necessity() -> Table:
    """The necessity test: a full-size auxiliary set alone, against FedAvg and FedDDPM; fid_auxiliary is that of the set."""
    printed = {
        ("mnist", "shard"): (4.204, 5.822, 1.910),
        ("cifar10", "dir0.1"): (47.332, 35.348, 21.730),
        ("cifar100", "dir0.3"): (49.434, 30.674, 17.139),
    }
    cells = [
        _cell(method, data, {"data": data, "partition": partition}, number)
        for (data, partition), row in printed.items()
        for method, number in zip(("aux_only", "fedavg", "fedddpm"), row)
    ]
    title = "FedDDPM, necessity test: FID; the auxiliary sets themselves are printed as 1.344, 17.435 and 14.420"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary",), scales=SCALES)


def curves() -> Table:
    """The comparison with LocalAug, of which loss curves are printed: they are in each cell's rounds.jsonl."""
    methods = ("fedavg", "localaug", "fedddpm")
    recipe = 'fedddpm.loss_curves(method="{}", scale="{{scale}}")'
    cells = [Cell(labels={"method": m}, recipe=recipe.format(m), metric="fid") for m in methods]
    return Table(title="FedDDPM against LocalAug on CIFAR-100: loss curves", cells=tuple(cells), scales=SCALES)


# the most telling first; FedAvg keeps an average of its model beside it, which is `fedavg_ema`
COMPARED = ("fedavg", "fedddpm", "plus", "fedavg_matched", "scaffold", "mofedsam", "localaug", "fedprox", "aux_only", "centralised",
            "local_only")  # fmt: skip
# what is tried of each method; those that are not here take FedAvg's step, as all do
KNOBS: dict[str, tuple[str, tuple[float, ...]]] = {
    "fedavg": ("algorithm.local.lr", (2e-4, 5e-4, 1e-3)),
    "fedddpm": ("algorithm.central.lr", (1e-4, 2.5e-4, 5e-4)),
    "plus": ("algorithm.central.epochs", (5, 20, 40)),
    "scaffold": ("algorithm.eta_g", (0.5, 1.0, 1.5)),
    # rho matters less: with an alpha of 0.1, Adam drifts along the noise of Delta
    "mofedsam": ("algorithm.alpha", (0.1, 0.5, 0.9)),
    "fedprox": ("algorithm.mu", (0.001, 0.01, 0.1)),
    "localaug": ("algorithm.share", (0.05, 0.1, 0.2)),
    "fedavg_ema": ("ema", (0.7, 0.8, 0.9)),
    "centralised": ("algorithm.local.lr", (2e-4, 5e-4, 1e-3)),
}
# what `tuning` found best, by method; nothing yet: each has the value of its recipe
TUNED: dict[str, float] = {}
FIRST_TUNING_SEED = 100  # those from here on are never reported


def comparison(
    data: Data = "mnist",
    seeds: tuple[int, ...] = (0, 1, 2),
    rounds: int | None = None,
    clients: int | None = None,
    warmup: int | None = None,
    every: int = 10,
    samples: int = 10_000,
) -> Table:
    """All methods and fair controls at the scaled size, which can be changed; looked at on the way with the first seed only."""
    if any(seed >= FIRST_TUNING_SEED for seed in seeds):
        raise RecipeError(f"fedddpm.comparison: seeds from {FIRST_TUNING_SEED} on are for tuning; choose lower ones")
    s = _resized(data, rounds, clients, warmup)
    cells = [
        _cell(
            method, data, {"partition": partition, "seed": seed}, None, f"seed={seed}",
            *_budget(s, method, every if seed == seeds[0] else 0, samples), *_tuned(s, method),
        )
        for partition in ("shard", "dir0.1")
        for method in COMPARED
        for seed in seeds
        if method != "centralised" or partition == "shard"  # which has no partition
    ]  # fmt: skip
    title = f"FedDDPM and rivals on {data}, scaled: {s.clients} clients, {s.rounds} rounds, {s.warmup} epochs of warm-up"
    also = ("fid_ema", "fid_auxiliary", "fid_pooled", "class_mix", "class_mix_pooled")
    return Table(title=title, cells=tuple(cells), repeats="seed", also=also, scales=SMALL_SCALES)


def tuning(
    data: Data = "mnist",
    seed: int = FIRST_TUNING_SEED,
    rate: float | None = None,
    rounds: int = 15,
    clients: int | None = None,
    warmup: int | None = None,
    samples: int = 5_000,
) -> Table:
    """Three values of one knob of each method under shards, on a seed that is not reported, all at FedAvg's best `rate`, which comes first."""
    if seed < FIRST_TUNING_SEED:
        raise RecipeError(f"fedddpm.tuning: seed {seed} is for results; choose {FIRST_TUNING_SEED} or more")
    s = _resized(data, rounds, clients, warmup)
    cells = [
        _cell(
            method, data, {"partition": "shard", "value": f"{value:g}"}, None, f"seed={seed}",
            *_budget(s, method, 0, samples), *_rates(method, rate or TUNED.get("fedavg", s.zeta)), f"{knob}={value}",
        )
        for method, (knob, values) in KNOBS.items()
        for value in values
    ]  # fmt: skip
    title = f"FedDDPM and rivals on {data}: what was tried on seed {seed}, {s.rounds} rounds, {s.warmup} epochs of warm-up"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary", "class_mix"), scales=SMALL_SCALES)


def _resized(data: Data, rounds: int | None, clients: int | None, warmup: int | None) -> Setting:
    changed = {k: v for k, v in (("rounds", rounds), ("clients", clients), ("warmup", warmup)) if v is not None}
    return dataclasses.replace(_setting(data, "scaled"), **changed)


def _tuned(s: Setting, method: str) -> list[str]:
    """A method as `tuning` left it."""
    own = [f"{KNOBS[method][0]}={TUNED[method]}"] if method in TUNED else []
    average = [f"ema={TUNED.get('fedavg_ema', AVERAGE)}"] if method == "fedavg" else []
    return [*_rates(method, TUNED.get("fedavg", s.zeta)), *own, *average]


SYNTHETIC = ("fedddpm", "plus", "localaug", "aux_only")


def _rates(method: str, rate: float) -> list[str]:
    """One step for all: of clients, of their warm-up, and of a server that takes the clients' step."""
    solvers = ["local"] if method != "aux_only" else []
    solvers += ["warmup"] if method in SYNTHETIC else []
    solvers += ["central"] if method in ("plus", "aux_only") else []
    return [f"algorithm.{solver}.lr={rate}" for solver in solvers]


def _budget(s: Setting, method: str, every: int, samples: int) -> list[str]:
    """Settings that give every method the same work at this size."""
    (alone, epochs), matched = _alone(s), _matched(s)
    T = {"fedavg_matched": matched, "aux_only": alone, "local_only": alone}.get(method, s.rounds)
    # runs of other lengths are looked at as often; lone sites in the end, and only what all draw together: 10,000 images of each are too many
    looks = 0 if method == "local_only" else max(min(every, 1), round(every * T / s.rounds))
    metrics = f'evaluate.metrics=[fid(n={samples}, split="train"), class_mix(n={samples})]'
    chosen = [f"rounds={T}", f"clients={s.clients}", metrics]
    chosen += [f"evaluate.every={looks}", *(["evaluate.personal=pooled"] if method == "local_only" else [])]
    chosen += [f"algorithm.warmup.epochs={s.warmup}"] if method in SYNTHETIC else []
    chosen += [f"algorithm.local.steps={s.cohort * s.K * s.batches}"] if method == "centralised" else []
    chosen += [f"algorithm.central.epochs={epochs}"] if method == "aux_only" else []
    return chosen + ([f"algorithm.local.epochs={epochs}"] if method == "local_only" else [])


def _cell(method: str, data: Data, labels: dict[str, str | int], printed: float | None, *settings: str) -> Cell:
    recipe = "fedddpm" if method == "fedddpm" else f"fedddpm.{method}"
    return Cell(
        labels={"method": method, **labels},
        recipe=f'{recipe}(data="{data}", scale="{{scale}}")',
        settings=(f"partition={PARTITIONS[str(labels['partition'])]}", *settings),
        metric={"fedavg_ema": "fid_ema", "local_only": "fid_pooled"}.get(method, "fid"),
        printed=printed,
    )
