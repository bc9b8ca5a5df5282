"""Quality against traffic: one picture a paper."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runs import RESULTS, Amount, accuracy, figure, gigabytes, megabytes, metric, results, spread

from effuse.runs.records import Result

KEPT = "Comment"  # where a PNG keeps the numbers that it shows


@dataclass(frozen=True)
class Picture:
    paper: str
    across: str
    up: str
    points: tuple[tuple[str, float, float, float], ...]  # name, amount sent, mean over seeds, deviation

    @property
    def file(self) -> Path:
        return RESULTS / f"traffic-{self.paper}.png"

    @property
    def numbers(self) -> str:
        return "; ".join(
            f"{name}: {sent:.4g}, {value:.3f} ± {deviation:.3f}" for name, sent, value, deviation in self.points
        )

    def draw(self) -> None:
        from matplotlib.figure import Figure

        plot = Figure(figsize=(6.5, 3.8), layout="constrained")
        axes = plot.subplots()
        for name, sent, value, deviation in self.points:
            axes.errorbar(sent, value, deviation, marker="o", capsize=3)
            axes.annotate(name, (sent, value), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel=self.across, ylabel=self.up)
        axes.margins(x=0.2, y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        plot.savefig(self.file, dpi=110, metadata={KEPT: self.numbers})

    def kept(self) -> str:
        """The numbers that the committed picture shows."""
        from PIL import Image

        with Image.open(self.file) as image:
            return str(image.info.get(KEPT, ""))


def point(name: str, found: list[Result], quality: list[float], sent: Amount) -> tuple[str, float, float, float]:
    return name, statistics.fmean(map(sent, found)), statistics.fmean(quality), spread(quality) or 0.0


def fids(
    table: str, names: dict[str, str], sent: Amount, seeds: Iterable[int] = (0, 1, 2)
) -> tuple[tuple[str, float, float, float], ...]:
    found = {name: results(f"{table}/{method}", seeds) for method, name in names.items()}
    return tuple(point(name, runs, metric(runs, "fid"), sent) for name, runs in found.items())


def accuracies(
    table: str, names: dict[str, str], seeds: Iterable[int], value: str = "accuracy"
) -> tuple[tuple[str, float, float, float], ...]:
    found = {name: results(f"{table}/{method}", seeds) for method, name in names.items()}
    return tuple(point(name, runs, accuracy(runs, value), megabytes) for name, runs in found.items() if runs)


def pictures() -> list[Picture]:
    tuned = {"plain": "FULL", "tuned": "tuned", "centralised-tuned": "tuned, all data in one place"}
    shards = {
        "fedavg-shard": "FedAvg",
        "fedavg_matched-shard": "FedAvg, more rounds",
        "scaffold-shard": "SCAFFOLD",
        "mofedsam-shard": "MoFedSAM",
        "fedddpm-shard": "FedDDPM",
        "plus-shard": "FedDDPM+",
        "aux_only-shard": "A alone",
        "centralised-shard": "all data in one place",
    }
    trees = {
        "fedavg-e1": "FedAvg, one epoch",
        "fedavg": "FedAvg, five",
        "fedphd-0": "FedPhD, unpruned",
        "fedphd-44": "44 %",
        "fedphd-os": "one-shot",
    }
    private = {
        "nearest_mean": "nearest mean",
        "class_means": "class means",
        "additions": "FedDiff, additions",
        "paper": "FedDiff",
    }
    guides = {"fedavg": "FedAvg", "vectors": "class vectors", "own": "own guide", "own_tdcl": "TDCL", "own_ndcr": "NDCR"}
    guides = {f"dirichlet-{method}": name for method, name in guides.items()}
    return [
        Picture("feddiffuse", "GB sent", "FID", fids("feddiffuse.ablation-paper", tuned, gigabytes, (2023, 2024, 2025))),
        Picture("fedddpm", "GB sent", "FID", fids("fedddpm.comparison-scaled", shards, gigabytes)),
        Picture(
            "fedphd", "cost by the paper's ledger", "FID", fids("fedphd.comparison-scaled", trees, figure("paper_cost"))
        ),
        Picture("feddiff", "MB sent", "accuracy in %", accuracies("feddiff.private_comparison", private, range(5))),
        Picture("feddifrc", "MB sent", "accuracy in %", accuracies("feddifrc.digits", guides, range(3), "accuracy_last5")),
    ]
