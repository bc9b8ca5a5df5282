"""FedDiffuse's table and figure: FID on Fashion-MNIST by method, clients and partition, and by local epochs."""

import dataclasses
import itertools

from effuse.core.table import Cell, Scale, Table
from effuse.recipes.feddiffuse.methods import Profile

SKEWS = {
    "iid": "iid()",
    "l-skew": "label_skew(beta=0.5, mask=True, seed=2023, legacy=True)",
    "q-skew": "quantity_skew(beta=0.5, seed=2023, legacy=True)",
}
# FID and its spread over five runs (for personal models also over clients), in the order of SKEWS
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
LOSSES: dict[str, Profile] = {"mse": "text", "huber": "code"}  # the printed numbers had the second
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


def skews(seeds: tuple[int, ...] = (2023, 2024, 2025)) -> Table:
    """Why FULL with skewed data is worse than printed: two losses, several seeds, and an average over rounds beside."""
    cells = [
        Cell(
            labels={"partition": skew, "loss": loss, "seed": seed},
            recipe=f'feddiffuse.full(profile="{profile}")',
            settings=(f"partition={SKEWS[skew]}", f"seed={seed}", "ema=0.5"),
            metric="fid_clipped",
            printed=printed,
            spread=spread,
        )
        for seed in seeds
        for skew, (printed, spread) in list(zip(SKEWS, TABLE_1["full", 5]))[1:]
        for loss, profile in LOSSES.items()
    ]
    title = "FedDiffuse, FULL with skewed data: FID on Fashion-MNIST by loss and seed"
    table = _table(title, cells, _smoke("rounds=2", "algorithm.local.epochs=1"))
    return dataclasses.replace(table, repeats="seed", also=("fid_clipped_ema", "fid", "fid_ema", "class_mix"))


def figure3(profile: Profile = "text") -> Table:
    """Figure 3: FID of FULL by local epochs E and clients K; first the baseline with one client."""
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
    also = ("fid", "fid_clipped_pooled", "fid_pooled", "class_mix")
    return Table(title=title, cells=tuple(cells), also=also, scales={"paper": Scale(), "smoke": smoke})


SMALL = ("data=digits()", "model=convnext_unet(dim=8, multipliers=[1, 2])", "evaluate.grid=20")
STAND_INS = {"fid": "fid_classifier", "fid_clipped": "fid_classifier_clipped", "kid": "kid_classifier"}


def _smoke(*less: str) -> Scale:
    """A smoke test: digits, a small network and few steps; its numbers mean nothing."""
    few = "fid(n=200, encoder=classifier()"
    settings = (
        *SMALL,
        "algorithm.local.batch=128",
        "algorithm.local.lr=2e-3",
        "sampler=ddim(steps=10)",
        f"evaluate.metrics=[{few}), {few}, clipped=True), class_mix(n=200)]",
        *less,
    )
    pooled = {f"{name}_pooled": f"{STAND_INS[name]}_pooled" for name in ("fid", "fid_clipped")}
    return Scale(settings=settings, metrics=STAND_INS | pooled, comparable=False, label="run on digits")
