"""Our recipe for CIFAR-10: what was run, and the goals by their rules."""

import statistics

from runs import NOT_RUN, gigabytes, metric, printed, runs
from text import each, mean, rows
from verdicts import below, controlled, within

TABLE = "cifar10"
NAMES = {
    "two-classes": "ours, two classes a client",
    "iid": "the same on IID data",
    "centralised": "the same with all data in one place",
    "labelled": "the same, class-conditional",
    "fedavg-e1": "FedAvg, one epoch a round",
    "fedavg-e5": "FedAvg, five",
    "fedphd-0": "FedPhD, unpruned",
    "fedphd-44": "FedPhD, 44 %",
}


def fid(setting: str) -> list[float]:
    return metric(runs(f"{TABLE}/{setting}"), "fid_ema")


def goals() -> str:
    ours, iid, pooled = (fid(setting) for setting in ("two-classes", "iid", "centralised"))
    lowest, second = (printed("fedphd.table1", f"{name}-computation").printed or 0 for name in ("fedphd", "fedavg-iid"))
    bound = f"{1.2 * statistics.fmean(pooled):.1f}" if pooled else "1.2 times that of all data in one place"
    body = [
        ["IID data are two deviations ahead of two classes a client", shown(iid), shown(ours), controlled(iid, ours)],
        ["FID on IID data is within 1.2 times that of all data in one place", shown(iid), bound, within(iid, pooled, 1.2)],
        ["FID is below FedPhD's on two classes", shown(ours), f"{lowest:.2f}", below(ours, lowest)],
        ["FID is below the paper's FedAvg on IID data", shown(ours), f"{second:.2f}", below(ours, second)],
    ]
    return rows(("goal", "ours", "against", "reached"), body)


def shown(numbers: list[float]) -> str:
    return mean(numbers) or NOT_RUN


def every_run() -> str:
    body = []
    for setting, name in NAMES.items():
        found = runs(f"{TABLE}/{setting}")
        sent = f"{gigabytes(found[0]):,.0f}" if found else ""
        body.append([name, each(fid(setting)) or NOT_RUN, mean(fid(setting)), mean(metric(found, "kid_ema"), 4), sent])
    return rows(["method", "FID, by seed", "FID", "KID", "GB, all links"], body)


BLOCKS = {"cifar10, goals": goals, "cifar10, runs": every_run}
