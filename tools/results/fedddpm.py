"""FedDDPM: its claims, tables and picture."""

import statistics

from pictures import Picture, points
from runs import OWN, gigabytes, metric, printed, runs
from text import bullets, each, less, mean, rows
from verdicts import AHEAD, NOT_TESTABLE, answer, gains, order, standing

from effuse.runs.records import Result

TABLE = "fedddpm.comparison-scaled"
A_PRINTED = 1.34
NAMES = {
    "fedavg": "FedAvg",
    "fedavg_matched": "FedAvg, FedDDPM's number of steps",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "mofedsam": "MoFedSAM",
    "localaug": "LocalAug",
    "fedddpm": "FedDDPM",
    "plus": "FedDDPM+",
    "aux_only": "`aux_only`: ten times as large an A, nothing else",
    "centralised": "all data in one place",
    "local_only": "each site alone, drawing together",
}


def fid(method: str, partition: str = "shard") -> list[float]:
    return metric(runs(f"{TABLE}/{method}-{partition}"), "fid")


def auxiliary(partition: str = "shard") -> list[float]:
    return metric(runs(f"{TABLE}/fedddpm-{partition}"), "fid_auxiliary")


def with_real_images() -> list[float]:
    return metric(runs("fedddpm.causes-scaled/real"), "fid")


def control_fails() -> str:
    """Why this scale cannot judge the method, if it cannot: A has to be ahead of FedAvg, which it corrects."""
    a, base = auxiliary(), fid("fedavg")
    if standing(gains(a, base, lower=True)) == AHEAD:
        return ""
    return f"FID of the auxiliary set A {mean(a)}, of FedAvg {mean(base)}; printed {A_PRINTED} and {_printed('fedavg')}"


def _printed(method: str) -> str:
    return f"{printed('fedddpm.table1', f'{method}-shard-15').printed:.2f}"


def claims() -> list[list[str]]:
    failed, base = control_fails(), fid("fedavg")
    scale, page = "a tenth", "[page](fedddpm.md)"

    def verdict(ours: list[float], other: list[float]) -> str:
        return NOT_TESTABLE if failed else order(standing(gains(ours, other, lower=True)))

    body = []
    for method, name in (("fedddpm", "FedDDPM"), ("plus", "FedDDPM+")):
        ours = fid(method)
        numbers = [f"{_printed(method)}; {_printed('fedavg')}", f"{mean(ours)}; {mean(base)}"]
        body.append([f"MNIST, shards: {name} is ahead of FedAvg; FID", *numbers, verdict(ours, base), scale, page])
    alone, ours, real = fid("aux_only"), fid("fedddpm"), with_real_images()
    on_a = printed("fedddpm.necessity", "aux_only-mnist-shard").printed or 0
    numbers = [f"{_printed('fedddpm')}; {on_a:.2f}", f"{mean(ours)}; {mean(alone)}"]
    body.append(["FedDDPM is ahead of a model that saw A alone", *numbers, verdict(ours, alone), scale, page])
    judged = answer(gains(real, base, lower=True))
    gap = f"{mean(real)}; by seed {mean(less(real, base))} against FedAvg"
    body.append(["is FedDDPM ahead of FedAvg where A is real images?", OWN, gap, judged, scale, page])
    return body


def reasons() -> list[str]:
    return [f"FedDDPM at a tenth of the scale: {control_fails()}."] if control_fails() else []


def first_lines() -> str:
    words = {p: standing(gains(fid("fedddpm", p), fid("fedavg", p), lower=True)) for p in ("shard", "dir0.1")}
    plus = {p: standing(gains(fid("plus", p), fid("fedavg", p), lower=True)) for p in ("shard", "dir0.1")}
    real, base = with_real_images(), fid("fedavg")
    judged = standing(gains(real, base, lower=True))
    return bullets(
        f"At a tenth of the paper's scale FedDDPM, against FedAvg, is {words['shard']} under shards and {words['dir0.1']} "
        f"under Dirichlet; FedDDPM+ is {plus['shard']} and {plus['dir0.1']}.",
        f"This scale cannot judge the method: {control_fails()}." if control_fails() else "The scale can judge the method.",
        f"With real images as A, FedDDPM has {mean(real)} and is {judged}: by seed {mean(less(real, base))} against FedAvg.",
    )


def comparison(partition: str) -> str:
    base, body = fid("fedavg", partition), []
    for method, name in NAMES.items():
        found = runs(f"{TABLE}/{method}-{partition}")
        if not found:
            continue
        ours = metric(found, "fid_pooled" if method == "local_only" else "fid")
        aux = metric(found, "fid_auxiliary") if "fid_auxiliary" in found[0].metrics else []
        behind = "" if method == "fedavg" else mean(less(ours, base))
        body.append([name, each(ours), mean(ours), behind, mean(aux), _sent(found)])
    return rows(["method", "FID, seeds 0, 1, 2", "FID", "less FedAvg, by seed", "FID of A", "GB sent"], body)


def _sent(found: list[Result]) -> str:
    sent = [gigabytes(one) for one in found]
    return f"{statistics.fmean(sent):.2f}" if max(sent) - min(sent) < 0.01 else each(sent, 2)


def picture() -> Picture:
    short = {"fedavg_matched": "FedAvg, more rounds", "aux_only": "A alone", "centralised": "all data in one place"}
    shown = ("fedavg", "fedavg_matched", "scaffold", "mofedsam", "fedddpm", "plus", "aux_only", "centralised")
    found = {short.get(method, NAMES[method]): runs(f"{TABLE}/{method}-shard") for method in shown}
    return Picture("fedddpm", "GB sent", "FID", points(found, lambda these: metric(these, "fid"), gigabytes))


BLOCKS = {
    "fedddpm, first lines": first_lines,
    "fedddpm.comparison, shards": lambda: comparison("shard"),
    "fedddpm.comparison, Dirichlet": lambda: comparison("dir0.1"),
}
