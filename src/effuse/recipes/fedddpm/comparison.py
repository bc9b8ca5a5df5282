"""FedDDPM, its rivals and fair controls at a size that one GPU can do, and how they are tuned for it."""

import dataclasses
from collections.abc import Iterator

from effuse.core.table import Scale, Table
from effuse.recipes.fedddpm.methods import AS_IT_IS, AVERAGE, Data, Resized, Setting, Size, alone, setting
from effuse.recipes.fedddpm.tables import SMOKE, cell_of
from effuse.recipes.seeds import FIRST_TUNING_SEED, refuse_results, refuse_tuning

# FedAvg keeps an average of its model beside it, which is `fedavg_ema`
TELLING = ("fedavg", "fedddpm", "plus", "fedavg_matched")
RIVALS = ("scaffold", "mofedsam", "localaug", "fedprox")
BOUNDS = ("aux_only", "centralised", "local_only")
COMPARED = (*TELLING, *RIVALS, *BOUNDS, "fedavg_size")
SYNTHETIC = ("fedddpm", "plus", "localaug", "aux_only")
# what is tried of each method; those that are not here take FedAvg's step, as all do
KNOBS: dict[str, tuple[str, tuple[int, ...] | tuple[float, ...]]] = {
    "fedavg": ("algorithm.local.lr", (1e-4, 2e-4, 5e-4, 1e-3)),  # 1e-4 added since 2e-4, the edge of three, was the best
    "fedddpm": ("algorithm.central.lr", (5e-5, 1e-4, 2.5e-4)),
    "plus": ("algorithm.central.epochs", (5, 20, 40)),
    "scaffold": ("algorithm.eta_g", (0.5, 1.0, 1.5)),
    # with an alpha of 0.1, Adam drifts along the noise of Delta
    "mofedsam": ("algorithm.alpha", (0.1, 0.5, 0.9, 1.0)),
    "fedprox": ("algorithm.mu", (0.0001, 0.001, 0.01, 0.1)),
    "localaug": ("algorithm.share", (0.025, 0.05, 0.1, 0.2)),
    "fedavg_ema": ("ema", (0.5, 0.7, 0.8, 0.9)),
    # the longer run may want a smaller step
    "fedavg_matched": ("algorithm.local.lr", (1e-4, 2e-4, 5e-4)),
    "centralised": ("algorithm.local.lr", (2e-4, 5e-4, 1e-3)),
}
# what `tuning` found best on MNIST, by method
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
    """All methods and fair controls at the scaled size, which can be changed; on the way looked at under shards, with the first seed."""
    refuse_results("fedddpm.comparison", seeds)
    s = setting(data, "scaled", size)
    cells = [
        cell_of(
            method,
            data,
            {"partition": partition, "seed": seed},
            None,
            f"seed={seed}",
            *looks(s, method, every if (partition, seed) == ("shard", seeds[0]) else 0, samples),
            *as_tuned(s, method),
            size=size,
        )
        for partition, method, seed in _most_telling_first(seeds)
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


def _most_telling_first(seeds: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Cells in the order in which they are worth having, wherever the time ends."""
    first, others = seeds[:1], seeds[1:]
    for partition, methods, chosen in (
        ("shard", TELLING, seeds),
        ("dir0.1", TELLING, first),
        ("shard", RIVALS, seeds),
        ("shard", BOUNDS, first),
        ("dir0.1", TELLING, others),
        ("dir0.1", RIVALS, seeds),
        ("shard", ("centralised", "local_only"), others),
        ("dir0.1", ("local_only",), seeds),  # all data in one place have no partition
        ("dir0.1", ("aux_only",), first),  # six times the synthesis of the others: its further seeds come last
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
    """Three values of one knob of each method, or four where one was added, under shards, on a seed that is not reported, in half of
    the rounds, all at FedAvg's best `rate`, which comes first."""
    refuse_tuning("fedddpm.tuning", seed)
    s = setting(data, "scaled", size)
    cells = [
        cell_of(
            method,
            data,
            {"partition": "shard", "value": f"{value:g}"},
            None,
            f"seed={seed}",
            *looks(s, method, 0, samples),
            *_rates(method, TUNED.get("fedavg", s.zeta) if rate is None else rate),
            f"{knob}={value:g}",
            size=size,
        )
        for method, (knob, values) in KNOBS.items()
        for value in values
    ]
    tried = scales(data, size)
    if not size.rounds:
        tried = {
            n: dataclasses.replace(x, factors={"rounds": 0.5}, told=f"{x.told}, the half of them") for n, x in tried.items()
        }
    title = f"FedDDPM and rivals: what was tried on seed {seed}"
    return Table(title=title, cells=tuple(cells), also=("fid_auxiliary", "class_mix"), scales=tried)


def scales(data: Data, size: Resized) -> dict[str, Scale]:
    """One GPU, or two cores, and what either means for a run."""
    # recorded, all of them: cells of a process share what was recorded, and would record reset_for where the next one chose otherwise
    known: dict[Size, Scale] = {
        "scaled": Scale(settings=("speed=graph",), comparable=False),
        "smoke": dataclasses.replace(SMOKE, settings=SMALL),
    }
    return {name: dataclasses.replace(scale, told=_told(setting(data, name, size))) for name, scale in known.items()}


def _told(s: Setting) -> str:
    return f"on {s.data.name}: {s.warmup} epochs of warm-up, {s.cohort} of {s.clients} clients a round, {s.rounds} rounds"


def looks(s: Setting, method: str, every: int, samples: int) -> list[str]:
    """How a run is looked at: all by the same rounds, but where a method's rounds are longer, as often as others in all."""
    if method == "aux_only":
        every = max(min(every, 1), round(every * alone(s)[0] / s.rounds))
    if method == "local_only":  # in the end, and only what all draw together: 10,000 images of each site are too many
        return [f"evaluate.metrics={_metrics(samples)}", "evaluate.every=0", "evaluate.personal=pooled"]
    return [f"evaluate.metrics={_metrics(samples)}", f"evaluate.every={every}"]


def _metrics(samples: int) -> str:
    return f'[fid(n={samples}, split="train"), class_mix(n={samples})]'


def as_tuned(s: Setting, method: str) -> list[str]:
    """A method as `tuning` left it, on MNIST; other data take its values, too."""
    own = [f"{KNOBS[method][0]}={TUNED[method]:g}"] if method in TUNED else []
    average = [f"ema={TUNED.get('fedavg_ema', AVERAGE)}"] if method == "fedavg" else []
    return [*_rates(method, TUNED.get("fedavg", s.zeta)), *own, *average]


def _rates(method: str, rate: float) -> list[str]:
    """One step for all: of clients, of their warm-up, and of a server that takes the clients' step."""
    solvers = ["local"] if method != "aux_only" else []
    solvers += ["warmup"] if method in SYNTHETIC else []
    solvers += ["central"] if method in ("plus", "aux_only") else []
    return [f"algorithm.{solver}.lr={rate}" for solver in solvers]
