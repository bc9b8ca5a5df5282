"""FedDDPM, its rivals and control experiments at a size for one GPU, and their tuning."""

import dataclasses
from collections.abc import Iterator

from effuse.core.table import Scale, Table
from effuse.recipes.fedddpm.methods import AS_IT_IS, AVERAGE, Data, Resized, Setting, Size, alone, setting
from effuse.recipes.fedddpm.tables import SMOKE, cell_of
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

# `fedavg_ema` is not listed: `fedavg` measures the moving average too
MAIN = ("fedavg", "fedddpm", "plus", "fedavg_matched")
RIVALS = ("scaffold", "mofedsam", "localaug", "fedprox")
BOUNDS = ("aux_only", "centralised", "local_only")
COMPARED = (*MAIN, *RIVALS, *BOUNDS, "fedavg_size")
SYNTHETIC = ("fedddpm", "plus", "localaug", "aux_only")
# the knob of each method and its values; every other method uses FedAvg's learning rate only
KNOBS: dict[str, tuple[str, tuple[int, ...] | tuple[float, ...]]] = {
    "fedavg": ("algorithm.local.lr", (1e-4, 2e-4, 5e-4, 1e-3)),  # 1e-4 extends the grid, because 2e-4 was best
    "fedddpm": ("algorithm.central.lr", (5e-5, 1e-4, 2.5e-4)),
    "plus": ("algorithm.central.epochs", (5, 20, 40)),
    "scaffold": ("algorithm.eta_g", (0.5, 1.0, 1.5)),
    # at alpha = 0.1 Adam follows the noise in Delta
    "mofedsam": ("algorithm.alpha", (0.1, 0.5, 0.9, 1.0)),
    "fedprox": ("algorithm.mu", (0.0001, 0.001, 0.01, 0.1)),
    "localaug": ("algorithm.share", (0.025, 0.05, 0.1, 0.2)),
    "fedavg_ema": ("ema", (0.5, 0.7, 0.8, 0.9)),
    # a longer run may need a smaller learning rate
    "fedavg_matched": ("algorithm.local.lr", (1e-4, 2e-4, 5e-4)),
    "centralised": ("algorithm.local.lr", (2e-4, 5e-4, 1e-3)),
}
# the best values of `tuning` on MNIST
TUNED: dict[str, int | float] = {
    "fedavg": 0.0002,
    "fedddpm": 0.0001,
    "plus": 20,
    "scaffold": 1.0,
    "mofedsam": 0.5,
    "fedprox": 0.0001,
    "localaug": 0.05,
    "fedavg_ema": 0.5,
    "fedavg_matched": 0.0002,
    "centralised": 0.0005,
}
SMALL = ("evaluate.every=0", 'evaluate.metrics=[fid(n=200, encoder=classifier(), split="train"), class_mix(n=200)]')


def comparison(
    data: Data = "mnist",
    seeds: tuple[int, ...] = (0, 1, 2),
    size: Resized = AS_IT_IS,
    every: int = 10,
    samples: int = 10_000,
) -> Table:
    """All methods and controls, scaled; only runs under shards with the first seed are evaluated between rounds."""
    refuse_results("fedddpm.comparison", seeds)
    s = setting(data, "scaled", size)
    cells = [
        cell_of(
            method,
            data,
            {"partition": partition, "seed": seed},
            None,
            f"seed={seed}",
            *evaluation_settings(s, method, every if (partition, seed) == ("shard", seeds[0]) else 0, samples),
            *as_tuned(s, method),
            size=size,
        )
        for partition, method, seed in _by_importance(seeds)
    ]
    also = ("fid_ema", "fid_auxiliary", "fid_pooled", "class_mix", "class_mix_ema", "class_mix_pooled")
    return Table(
        title="FedDDPM and rivals",
        cells=tuple(cells),
        repeats="seed",
        against=("method", "fedavg"),
        also=also,
        scales=scales(data, size),
    )


def _by_importance(seeds: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Cells in the order of importance, so that an incomplete table is most useful."""
    first, others = seeds[:1], seeds[1:]
    for partition, methods, chosen in (
        ("shard", MAIN, seeds),
        ("dir0.1", MAIN, first),
        ("shard", RIVALS, seeds),
        ("shard", BOUNDS, first),
        ("dir0.1", MAIN, others),
        ("dir0.1", RIVALS, seeds),
        ("shard", ("centralised", "local_only"), others),
        ("dir0.1", ("local_only",), seeds),  # centralised data have no partition
        ("dir0.1", ("aux_only",), first),  # its synthesis takes six times as long, so its other seeds come last
        ("shard", ("aux_only",), others),
        ("dir0.1", ("fedavg_size",), seeds),
        ("dir0.1", ("aux_only",), others),
    ):
        yield from ((partition, method, seed) for method in methods for seed in chosen)


def tuning(
    data: Data = "mnist",
    seed: int = FIRST_TUNING_SEED,
    rate: float | None = None,
    size: Resized = AS_IT_IS,
    samples: int = 5_000,
) -> Table:
    """Values of one knob of each method, under shards, on a tuning seed, in half of the rounds.

    All methods use FedAvg's best learning rate, `rate`, which is tuned first.
    """
    refuse_tuning("fedddpm.tuning", seed)
    s = setting(data, "scaled", size)
    cells = [
        cell_of(
            method,
            data,
            {"partition": "shard", "value": f"{value:g}"},
            None,
            f"seed={seed}",
            *evaluation_settings(s, method, 0, samples),
            *_rates(method, TUNED.get("fedavg", s.zeta) if rate is None else rate),
            f"{knob}={value:g}",
            size=size,
        )
        for method, (knob, values) in KNOBS.items()
        for value in values
    ]
    tried = scales(data, size)
    if not size.rounds:
        tried = {n: dataclasses.replace(x, factors={"rounds": 0.5}, label=f"{x.label}, halved") for n, x in tried.items()}
    title = f"FedDDPM and rivals: tuning on seed {seed}"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary", "class_mix"), scales=tried)


def scales(data: Data, size: Resized) -> dict[str, Scale]:
    """The scales of the comparison: one GPU, or two cores."""
    # speed=graph for all: the cells of a process share recordings, which a cell with another speed could not use
    known: dict[Size, Scale] = {
        "scaled": Scale(settings=("speed=graph",), comparable=False),
        "smoke": dataclasses.replace(SMOKE, settings=SMALL),
    }
    return {name: dataclasses.replace(scale, label=_described(setting(data, name, size))) for name, scale in known.items()}


def _described(s: Setting) -> str:
    return f"on {s.data.name}: {s.warmup} epochs of warm-up, {s.cohort} of {s.clients} clients a round, {s.rounds} rounds"


def evaluation_settings(s: Setting, method: str, every: int, samples: int) -> list[str]:
    """The evaluation settings of a run: the same rounds for all methods, or as many evaluations where rounds are longer."""
    if method == "aux_only":
        every = max(min(every, 1), round(every * alone(s)[0] / s.rounds))
    if method == "local_only":  # at the end, on pooled samples: 10,000 images of each site take too long
        return [f"evaluate.metrics={_metrics(samples)}", "evaluate.every=0", "evaluate.personal=pooled"]
    return [f"evaluate.metrics={_metrics(samples)}", f"evaluate.every={every}"]


def _metrics(samples: int) -> str:
    return f'[fid(n={samples}, split="train"), class_mix(n={samples})]'


def as_tuned(s: Setting, method: str) -> list[str]:
    """The tuned settings of a method; values tuned on MNIST are used for all data."""
    own = [f"{KNOBS[method][0]}={TUNED[method]:g}"] if method in TUNED else []
    average = [f"ema={TUNED.get('fedavg_ema', AVERAGE)}"] if method == "fedavg" else []
    return [*_rates(method, TUNED.get("fedavg", s.zeta)), *own, *average]


def _rates(method: str, rate: float) -> list[str]:
    """One learning rate for clients, their warm-up, and a server that uses the clients' learning rate."""
    solvers = ["local"] if method != "aux_only" else []
    solvers += ["warmup"] if method in SYNTHETIC else []
    solvers += ["central"] if method in ("plus", "aux_only") else []
    return [f"algorithm.{solver}.lr={rate}" for solver in solvers]
