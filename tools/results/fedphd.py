"""FedPhD: its claims, tables and picture."""

import statistics

from pictures import Picture, points
from runs import figure, gigabytes, metric, printed, read, runs
from text import bullets, each, less, mean, rows, spread
from verdicts import NOT_TESTABLE, counted, gains, order, standing

TABLE, COUNTS = "fedphd.comparison-scaled", "fedphd.table4"
SAVED = 88  # per cent of the cost of FedAvg with one epoch, printed
NAMES = {
    "fedavg-e1": "FedAvg, one epoch a round",
    "fedavg": "FedAvg, five",
    "fedphd-0": "FedPhD, unpruned",
    "fedphd-44": "FedPhD, 44 %",
    "fedphd-os": "FedPhD, one-shot, 44 %",
    "fedphd-44-random-edges": "FedPhD, 44 %, random edges",
    "fedphd-44-weights-by-size": "FedPhD, 44 %, weights by size",
    "fedphd-44-unregularised": "FedPhD, 44 %, no regulariser",
    "fedphd-0-neither": "FedPhD, unpruned, neither part",
    "fedphd-25": "FedPhD, 25 %",
    "fedphd-61": "FedPhD, 61 %",
    "fedphd-74": "FedPhD, 74 %",
    "moon": "MOON",
    "feddiffuse-udec": "FedDiffuse, UDEC, the pool",
    "feddiffuse-usplit": "FedDiffuse, USPLIT",
    "fedprox-0.001": "FedProx, mu = 0.001",
    "fedprox": "FedProx, mu = 1",
    "scaffold-e1": "SCAFFOLD, one epoch",
    "scaffold": "SCAFFOLD, five",
    "fedavg-iid": "FedAvg, five, on IID data",
    "centralised": "all data in one place",
}
COST, SYMMETRIC, MILLIONS = figure("paper_cost"), figure("symmetric_cost"), figure("parameters_m")


def fid(method: str) -> list[float]:
    return metric(runs(f"{TABLE}/{method}"), "fid_pooled" if method == "feddiffuse-udec" else "fid")


def control_fails() -> str:
    """Why this scale cannot judge the methods, if it cannot: IID data have to be two deviations ahead of two classes."""
    iid, two = fid("fedavg-iid"), fid("fedavg")
    if statistics.fmean(gains(iid, two, lower=True)) > 2 * (spread(two) or 0):
        return ""
    return f"on seed 0 FedAvg has FID {iid[0]:.1f} on IID data, {two[0]:.1f} on two classes a client"


def claims() -> list[list[str]]:
    page, scale, failed, ours = "[page](fedphd.md)", "a hundredth of the images", control_fails(), fid("fedphd-44")
    body = []
    for rival, name in (("fedavg-e1", "one local epoch"), ("fedavg", "five")):
        told = [printed("fedphd.table1", f"{method}-computation").printed or 0 for method in ("fedphd", rival)]
        judged = NOT_TESTABLE if failed else order(standing(gains(ours, fid(rival), lower=True)))
        claim = f"CIFAR-10, two classes a client: FedPhD is ahead of FedAvg with {name}; FID"
        body.append([claim, each(told).replace(", ", "; "), f"{mean(ours)}; {mean(fid(rival))}", judged, scale, page])
    small, wanted = read(f"{COUNTS}/fedphd-os/check.json")["figures"], printed("fedphd.table4", "fedphd-os").beside
    sizes = [[figures["parameters_m"], figures["gmacs"]] for figures in (wanted, small)]
    body.append(["pruned by 44 %: parameters in M, GMAC", *_counted(sizes, 2), "paper", "[pruning](../fedphd.md)"])
    methods = ("fedavg", "fedavg-e1", "scaffold", "fedphd-os")
    costs = [
        [printed("fedphd.table4", method).printed or 0 for method in methods],
        [read(f"{COUNTS}/{method}/check.json")["figures"]["paper_cost"] for method in methods],
    ]
    claim = "cost of a cloud round: FedAvg, FedAvg with one epoch, SCAFFOLD, FedPhD"
    body.append([claim, *_counted(costs, 1), "paper", "[costs](../fedphd.md)"])
    saved = 100 * (1 - COST(runs(f"{TABLE}/fedphd-44")[0]) / COST(runs(f"{TABLE}/fedavg-e1")[0]))
    claim = "FedPhD saves, of the cost of FedAvg with one epoch, %, by the paper's ledger"
    ledger = [str(SAVED), f"{saved:.0f}, over a run", counted([SAVED], [saved])]
    return [*body, [claim, *ledger, scale, page]]


def reasons() -> list[str]:
    return [f"FedPhD at a hundredth of the images: {control_fails()}."] if control_fails() else []


def _counted(pair: list[list[float]], digits: int) -> list[str]:
    told, ours = pair
    return [each(told, digits), f"{each(ours, digits)}, counted", counted(told, ours)]


def first_lines() -> str:
    failed, one = control_fails(), fid("fedavg-e1")
    judged = {method: standing(gains(fid(method), one, lower=True)) for method in ("fedphd-0", "fedphd-44")}
    share = {m: COST(runs(f"{TABLE}/{m}")[0]) / COST(runs(f"{TABLE}/fedavg-e1")[0]) for m in judged}
    chosen, random = fid("fedphd-44"), fid("fedphd-44-random-edges")
    edges = standing(gains(chosen, random, lower=True))
    return bullets(
        f"**This comparison cannot judge the methods.** Its positive control failed: {failed}."
        if failed
        else "The positive control passed: IID data are ahead of two classes a client.",
        f"Against FedAvg with one local epoch, FedPhD is {judged['fedphd-0']} unpruned and {judged['fedphd-44']} pruned by "
        f"44 %. By the paper's ledger it costs {100 * share['fedphd-0']:.0f} % and {100 * share['fedphd-44']:.0f} % of it.",
        f"Edges by the paper's rule against random ones: {edges} (FID {mean(less(chosen, random))}, by seed).",
    )


def remarks() -> str:
    apart = fid("fedphd-44-weights-by-size")[0] - fid("fedphd-44")[0]
    return bullets(
        "SCAFFOLD by the rule for SGD diverged in its fifth round and has no figures.",
        f"Weights by size hardly change a run, and yet FID differs by {apart:.1f}. Differences of one seed mean little.",
    )


def comparison() -> str:
    base, body = fid("fedavg-e1"), []
    for method, name in NAMES.items():
        found, ours = runs(f"{TABLE}/{method}"), fid(method)
        kid = metric(found, "kid_pooled" if method == "feddiffuse-udec" else "kid")
        row = [name, each(ours), mean(ours), "" if method == "fedavg-e1" else mean(less(ours, base)), each(kid, 3)]
        row += [f"{MILLIONS(found[0]):.2f}", f"{gigabytes(found[0]):.1f}"]
        body.append([*row, f"{COST(found[0]):,.0f}", f"{SYMMETRIC(found[0]):,.0f}"])
    quality = ["method", "FID, seeds 0, 1, 2", "FID", "less the first, by seed", "KID"]
    return rows([*quality, "parameters, M", "GB, all links", "cost, paper's ledger", "cost, both ways alike"], body)


def picture() -> Picture:
    names = {
        "fedavg-e1": "FedAvg, one epoch",
        "fedavg": "FedAvg, five",
        "fedphd-0": "FedPhD, unpruned",
        "fedphd-44": "FedPhD, 44 %",
        "fedphd-os": "FedPhD, one-shot, 44 %",
    }
    found = {name: runs(f"{TABLE}/{method}") for method, name in names.items()}
    quality = "cost by the paper's ledger", "FID"
    return Picture("fedphd", *quality, points(found, lambda these: metric(these, "fid"), COST))


BLOCKS = {
    "fedphd, first lines": first_lines,
    "fedphd.comparison": comparison,
    "fedphd, remarks": remarks,
}
