"""FedDDPM's tables: FID on three data sets, the necessity test, the comparison with LocalAug."""

import dataclasses
from typing import Literal, get_args

from effuse.algorithms.shared.synthesis import Synthesising
from effuse.core.recipe import Recipe
from effuse.core.spec import text
from effuse.core.table import Cell, Scale, Table
from effuse.data.npz import CIFAR100
from effuse.data.sources import Some
from effuse.recipes.fedddpm.methods import AS_IT_IS, Data, Resized, Size, fedavg, fedddpm, localaug, mofedsam

# a Dirichlet draw may leave a client without images; the largest client then gives it ten
PARTITIONS = {
    "shard": "shards(per_client=2)",
    "dir0.1": "label_skew(beta=0.1, top_up=True)",
    "dir0.3": "label_skew(beta=0.3, top_up=True)",
}
METHODS = ("fedavg", "fedprox", "scaffold", "mofedsam", "fedddpm", "plus")
# FID in the order of METHODS: shard, Dirichlet 0.1 and 0.3 with 15 % of the clients a round, then with 30 %
PRINTED = {
    "mnist": (
        (5.822, 4.448, 2.786, 4.868, 2.842, 2.377),
        (5.714, 4.331, 2.981, 4.651, 2.893, 2.343),
        (4.889, 3.876, 2.584, 4.237, 2.421, 2.150),
        (4.840, 2.797, 2.358, 4.324, 2.983, 1.903),
        (1.910, 2.151, 1.997, 1.842, 1.662, 1.768),
        (2.188, 2.037, 1.876, 1.865, 1.771, 1.762),
    ),
    "cifar10": (
        (39.326, 35.348, 28.686, 33.669, 32.886, 25.418),
        (36.019, 34.230, 29.167, 35.131, 33.118, 25.351),
        (29.659, 33.053, 28.616, 27.820, 30.561, 24.957),
        (35.522, 31.045, 29.422, 28.626, 30.672, 23.852),
        (22.296, 21.730, 18.089, 19.731, 18.817, 16.354),
        (21.508, 22.512, 20.531, 21.468, 20.753, 18.741),
    ),
    "cifar100": (
        (37.711, 30.281, 30.674, 37.829, 31.105, 28.667),
        (40.075, 32.732, 32.878, 38.426, 34.414, 32.580),
        (38.415, 31.862, 31.456, 37.154, 29.670, 30.161),
        (37.646, 30.442, 28.719, 36.817, 28.502, 28.923),
        (21.818, 23.416, 17.139, 19.096, 24.026, 20.196),
        (23.612, 22.007, 20.793, 22.996, 27.643, 24.554),
    ),
}
STAND_INS = {k: k.replace("fid", "fid_classifier") for k in ("fid", "fid_ema", "fid_auxiliary", "fid_pooled")}
SMOKE = Scale(metrics=STAND_INS, comparable=False, label="run on digits")
SCALES = {"paper": Scale(), "scaled": Scale(comparable=False, label="scaled"), "smoke": SMOKE}


Drawn = Literal["fedavg", "mofedsam", "localaug", "fedddpm"]  # the curves of Fig. 8


def loss_curves(method: Drawn = "fedddpm", scale: Size = "paper") -> Recipe:
    """The comparison with LocalAug: 20 clients, 10,000 images of CIFAR-100 by Dirichlet 0.1, 2,000 auxiliary images."""
    make = {"fedavg": fedavg, "mofedsam": mofedsam, "localaug": localaug, "fedddpm": fedddpm}[method]
    base = make("cifar100", scale)
    if scale != "smoke":
        base = dataclasses.replace(base, data=Some(source=CIFAR100(), n=10_000), clients=20)
    share = ["algorithm.share=0.2"] if isinstance(base.algorithm, Synthesising) else []
    return base.changed([f"partition={PARTITIONS['dir0.1']}", *share])


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
        cell_of(method, data, {"partition": partition, "participation": p}, printed, f"algorithm.cohort={p / 100}")
        for method, row in zip(METHODS, PRINTED[data])
        for (partition, p), printed in zip(columns, row)
    ]
    title = f"FedDDPM, {number}: FID on {called}, participation in per cent"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary",), scales=SCALES)


def necessity() -> Table:
    """The necessity test: training on a full-size auxiliary set alone, beside FedAvg and FedDDPM."""
    printed: dict[tuple[Data, str], tuple[float, float, float]] = {
        ("mnist", "shard"): (4.204, 5.822, 1.910),
        ("cifar10", "dir0.1"): (47.332, 35.348, 21.730),
        ("cifar100", "dir0.3"): (49.434, 30.674, 17.139),
    }
    cells = [
        cell_of(method, data, {"data": data, "partition": partition}, number)
        for (data, partition), row in printed.items()
        for method, number in zip(("aux_only", "fedavg", "fedddpm"), row)
    ]
    title = "FedDDPM, necessity test: FID; the paper prints 1.344, 17.435 and 14.420 for the auxiliary sets"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary",), scales=SCALES)


def curves() -> Table:
    """The comparison with LocalAug; the paper prints loss curves, which are in each cell's rounds.jsonl."""
    methods = get_args(Drawn)
    recipe = 'fedddpm.loss_curves(method="{}", scale="{{scale}}")'
    cells = [Cell(labels={"method": m}, recipe=recipe.format(m), metric="fid") for m in methods]
    return Table(title="FedDDPM against LocalAug on CIFAR-100: loss curves", cells=tuple(cells), scales=SCALES)


def cell_of(
    method: str, data: Data, labels: dict[str, str | int], printed: float | None, *settings: str, size: Resized = AS_IT_IS
) -> Cell:
    """The cell of a method, at any scale."""
    recipe = "fedddpm" if method == "fedddpm" else f"fedddpm.{method}"
    resized = "" if size == AS_IT_IS else f", size={text(size, full=False)}"
    return Cell(
        labels={"method": method, **labels},
        recipe=f'{recipe}(data="{data}", scale="{{scale}}"{resized})',
        settings=(f"partition={PARTITIONS[str(labels['partition'])]}", *settings),
        metric={"fedavg_ema": "fid_ema", "local_only": "fid_pooled"}.get(method, "fid"),
        printed=printed,
    )
