"""FedDDPM: its claims, tables and picture."""

import statistics

from pictures import Picture, points
from runs import OWN, gigabytes, metric, printed, runs, seconds
from text import bullets, each, less, mean, rows, seeds
from verdicts import AHEAD, NOT_TESTABLE, REPRODUCED, UNDECIDED, answer, clear, gains, order, standing

from effuse.runs.records import Result

TABLE, HEADLINE = "fedddpm.comparison-scaled", "fedddpm.headline-paper"
SEEDS = (0, 1)  # of the headline
A_PRINTED = 1.34
SHOWN = ("fedavg", "fedddpm", "plus", "aux_only", "fedavg_matched", "mofedsam", "scaffold")  # in the headline
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


def at_scale(method: str, name: str = "fid") -> list[float]:
    """At the paper's own scale."""
    return metric(runs(f"{HEADLINE}/{method}", SEEDS), name)


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


def judged_at_scale(method: str, other: str) -> str:
    """The verdict on two methods at the paper's scale, by the rule that was written before: A is judged first."""
    a, base = at_scale("auxiliary", "fid_auxiliary"), at_scale("fedavg")
    if clear(a, base) != REPRODUCED:
        return NOT_TESTABLE if min(len(a), len(base)) == len(SEEDS) else UNDECIDED
    return clear(at_scale(method), at_scale(other))


def _compared(claim: str, told: str, method: str, other: str, failed: str) -> list[str]:
    """A claim that one method is ahead of another: at the paper's scale where it was run, else at a tenth."""
    page, (ours, base) = "[page](fedddpm.md)", (at_scale(method), at_scale(other))
    if ours and base:
        return [claim, told, f"{mean(ours, 2)}; {mean(base, 2)}", judged_at_scale(method, other), "paper", page]
    ours, base = fid(method), fid(other)
    verdict = NOT_TESTABLE if failed else order(standing(gains(ours, base, lower=True)))
    return [claim, told, f"{mean(ours)}; {mean(base)}", verdict, "a tenth", page]


def claims() -> list[list[str]]:
    failed, base, real = control_fails(), fid("fedavg"), with_real_images()
    body = []
    for method, name in (("fedddpm", "FedDDPM"), ("plus", "FedDDPM+")):
        claim = f"MNIST, shards: {name} is ahead of FedAvg; FID"
        body.append(_compared(claim, f"{_printed(method)}; {_printed('fedavg')}", method, "fedavg", failed))
    on_a = printed("fedddpm.necessity", "aux_only-mnist-shard").printed or 0
    told = f"{_printed('fedddpm')}; {on_a:.2f}"
    body.append(_compared("FedDDPM is ahead of a model that saw A alone", told, "fedddpm", "aux_only", failed))
    judged = answer(gains(real, base, lower=True))
    gap = f"{mean(real)}; by seed {mean(less(real, base))} against FedAvg"
    page = "[page](fedddpm.md)"
    body.append(["is FedDDPM ahead of FedAvg where A is real images?", OWN, gap, judged, "a tenth", page])
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


def headline() -> str:
    base, body = at_scale("fedavg"), []
    for method, name in {"auxiliary": "A itself", **{m: NAMES[m] for m in SHOWN}}.items():
        of = "_auxiliary" if method == "auxiliary" else ""
        ours, broken = at_scale(method, f"fid{of}"), at_scale(method, f"unclear{of}")
        told = printed("fedddpm.headline", f"{method}-0").printed
        behind = "" if method == "fedavg" else mean(less(ours, base), 2)
        row = [name, "" if told is None else f"{told:.2f}", seeds(ours, len(SEEDS), 2), behind]
        body.append([*row, mean([100 * share for share in broken]), seconds(runs(f"{HEADLINE}/{method}", SEEDS))])
    floor = at_scale("fedavg", "fid_real")[:1]
    body.append(["10,000 real images, the test set", "", mean(floor, 2) or "not run", "", "1.0, by definition", ""])
    head = ["method", "printed", "FID, seeds 0 and 1", "less FedAvg, by seed", "broken images, %", "seconds"]
    return rows(head, body)


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
    "fedddpm.headline": headline,
    "fedddpm, first lines": first_lines,
    "fedddpm.comparison, shards": lambda: comparison("shard"),
    "fedddpm.comparison, Dirichlet": lambda: comparison("dir0.1"),
}
