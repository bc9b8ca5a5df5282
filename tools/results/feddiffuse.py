"""FedDiffuse: its claims, tables and picture."""

import re
import statistics

from pictures import Picture, points
from runs import NOT_RUN, gigabytes, metric, page, printed, read, run, runs
from text import bullets, each, less, mean, plus_minus, rows, seeds, spread
from verdicts import REPRODUCED, counted, near

TABLE, SKEWED, YEARS = "feddiffuse.ablation-paper", "feddiffuse.skews-paper", (2023, 2024, 2025)
SKEWS, LOSSES = ("l-skew", "q-skew"), {"mse": "mean square, as in the text", "huber": "Huber, as in the code"}
AUTHORS = {"l-skew": 41, "q-skew": 21}  # the mean of the authors' runs without the worst of five
LOWERED = 10  # points by which the other loss must lower FID on every seed
PARTS = ("usplit", "ulatdec", "udec")
PARTITIONS = {"iid": "IID", "l-skew": "label skew", "q-skew": "quantity skew"}
SAVED = (25, 41, 74)  # per cent of FULL's traffic, printed
NAMES = {
    "tuned": "`feddiffuse.tuned`",
    "plain": "FULL as printed",
    "centralised-tuned": "`tuned`'s values, all data in one place",
    "without-rate": "`tuned` without its rate: 1e-4",
    "without-decay": "without decay",
    "without-velocity": "without velocity",
    "without-norm": "without clipped gradients",
    "without-batch": "without batches of 64",
    "without-kept": "without kept moments",
    "without-start": "without the slow start",
    "without-cosine": "without the cosine schedule",
}


def fid(method: str, name: str = "fid") -> list[float]:
    return metric(runs(f"{TABLE}/{method}", YEARS), name)


def notebook(method: str, partition: str) -> str:
    """A figure whose run files were not kept, as the notebook has it."""
    row = rf"^\| {method}[^|]*\| 5 \| {partition} \|[^|]*\| ([^|]+) \|"
    found = re.findall(row, page("../notes/results-feddiffuse.md"), re.M)
    return str(found[0]).strip("*")


def skewed(partition: str, loss: str, name: str = "fid_clipped") -> list[float]:
    return metric(runs(f"{SKEWED}/{partition}-{loss}", YEARS), name)


def cause() -> str:
    """Why skewed data are worse than printed, by the three rules that were written before the runs."""
    found = {(p, loss): skewed(p, loss) for p in SKEWS for loss in LOSSES}
    if any(len(values) < len(YEARS) for values in found.values()):
        return NOT_RUN
    if all(gap > LOWERED for p in SKEWS for gap in less(found[p, "mse"], found[p, "huber"])):
        return "the loss"
    if any(all(min(found[p, loss]) <= AUTHORS[p] <= max(found[p, loss]) for p in SKEWS) for loss in LOSSES):
        return "seeds"
    averaged = {(p, loss): skewed(p, loss, "fid_clipped_ema") for p in SKEWS for loss in LOSSES}
    if any(all(min(averaged[p, loss]) <= AUTHORS[p] for p in SKEWS) for loss in LOSSES):
        return "the noise of the last weights"
    return "unexplained"


def cells() -> list[tuple[str, int, str, list[float], str, str]]:
    """Each cell of Table 1 that was run: method, clients, partition, kept runs, ours in words, verdict."""
    plain = fid("plain", "fid_clipped")
    ten = metric([run("feddiffuse.table1-paper/full-10-iid")], "fid_clipped")
    kept = {skew: ours for skew in SKEWS if (ours := skewed(skew, "huber"))}  # the loss of the printed numbers
    lost = [*((method, "iid") for method in PARTS), *(("full", skew) for skew in SKEWS if skew not in kept)]
    found = [("full", 5, "iid", plain, f"{mean(plain)}, three seeds"), ("full", 10, "iid", ten, f"{mean(ten)}, one run")]
    for method, partition in lost:
        ours = notebook(method.upper(), PARTITIONS[partition])
        found.append((method, 5, partition, [float(ours.split()[0])], f"{ours}, one run †"))
    found += [("full", 5, skew, ours, f"{mean(ours)}, {seed_words(ours)}") for skew, ours in kept.items()]
    judged = []
    for method, clients, partition, ours, words in found:
        cell = printed("feddiffuse.table1", f"{method}-{clients}-{partition}")
        # one run has no spread of its own: FULL's three seeds lend theirs
        own = spread(ours) if (method, partition) != ("full", "iid") else None
        verdict = near(cell.printed or 0, cell.spread or 0, statistics.fmean(ours), own or spread(plain) or 0)
        judged.append((method, clients, partition, ours, words, verdict))
    return judged


def seed_words(ours: list[float]) -> str:
    return {1: "one run", 2: "two seeds", 3: "three seeds"}[len(ours)]


def claims() -> list[list[str]]:
    sent = {name: read(f"feddiffuse.traffic/{name}-5.json")["traffic"]["parameters"]["total"] for name in ("full", *PARTS)}
    saved = [100 * (1 - sent[name] / sent["full"]) for name in PARTS]
    body = []
    for method, clients, partition, _, words, verdict in cells():
        cell = printed("feddiffuse.table1", f"{method}-{clients}-{partition}")
        claim = f"{method.upper()}, {clients} clients, {PARTITIONS[partition]}: clipped FID"
        body.append([claim, f"{cell.printed:.0f} ± {cell.spread:.0f}", words, verdict, "paper", "[page](feddiffuse.md)"])
    traffic = [", ".join(map(str, SAVED)), f"{each(saved)}, counted", counted(SAVED, saved)]
    body.append(["USPLIT, ULATDEC, UDEC send less than FULL, by %", *traffic, "paper", "[traffic](../feddiffuse.md)"])
    return body


def reasons() -> list[str]:
    if cause() != NOT_RUN:
        return []
    clipped = fid("plain", "fid_clipped")
    lost = f"seeds alone move FULL's clipped FID from {min(clipped):.1f} to {max(clipped):.1f}"
    return [f"FedDiffuse with skewed data: one run each, and {lost}."]


def first_lines() -> str:
    tuned, plain, one = fid("tuned"), fid("plain"), fid("centralised-tuned")
    found = cells()
    iid = [verdict for _, _, partition, _, _, verdict in found if partition == "iid"]
    skew = {PARTITIONS[partition]: verdict for _, _, partition, _, _, verdict in found if partition != "iid"}
    clipped = fid("plain", "fid_clipped")
    why = f"The cause of the distance, by the rules below: {cause()}."
    if cause() == NOT_RUN:
        seeds = f"Seeds alone move FULL's clipped FID from {min(clipped):.1f} to {max(clipped):.1f}."
        why = f"There is one run each. {seeds}"
    return bullets(
        f"With IID data {iid.count(REPRODUCED)} of {len(iid)} printed cells are reproduced.",
        f"With skewed data: {', '.join(f'{name} {verdict}' for name, verdict in skew.items())}. {why}",
        f"`feddiffuse.tuned` has FID {mean(tuned)} where the printed setting has {mean(plain)}, "
        "for the same network, images and traffic.",
        f"Federating costs {statistics.fmean(less(tuned, one)):.1f} points against all data in one place.",
    )


def table1() -> str:
    body = []
    for method, clients, partition, ours, words, verdict in cells():
        cell = printed("feddiffuse.table1", f"{method}-{clients}-{partition}")
        over = ", over clients" if "±" in words and len(ours) == 1 else ""
        found = [plus_minus(cell.printed or 0, cell.spread, 0), words.replace(", one", f"{over}, one")]
        body.append([method.upper(), str(clients), PARTITIONS[partition], *found, verdict])
    return rows(["method", "clients", "partition", "printed", "ours, clipped", "verdict"], body)


def skews() -> str:
    body = []
    for partition in SKEWS:
        cell = printed("feddiffuse.table1", f"full-5-{partition}")
        for loss, name in LOSSES.items():
            ours = skewed(partition, loss)
            row = [PARTITIONS[partition], name, plus_minus(cell.printed or 0, cell.spread, 0), str(AUTHORS[partition])]
            averaged = mean(skewed(partition, loss, "fid_clipped_ema"))
            body.append([*row, seeds(ours, len(YEARS)), mean(ours), averaged])
    head = [
        "partition",
        "loss",
        "printed",
        "authors' middle run",
        "clipped FID, seeds 2023 to 2025",
        "mean",
        "of the average",
    ]
    return rows(head, body) + f"\n\nThe cause, by the rules: {cause()}."


def ablation() -> str:
    tuned, body = fid("tuned"), []
    for method, name in NAMES.items():
        ours = fid(method)
        row = [name, each(ours), mean(ours), mean(fid(method, "fid_clipped")), mean(fid(method, "kid"), 4)]
        body.append([*row, "" if method == "tuned" else mean(less(ours, tuned))])
    head = ["FULL, five IID clients", "FID, seeds 2023 to 2025", "FID", "FID, clipped", "KID", "less `tuned`, by seed"]
    return rows(head, body)


def parts() -> str:
    tuned, plain = fid("tuned")[0], fid("plain")[0]
    cost = {name: fid(method)[0] - tuned for method, name in NAMES.items() if method.startswith("without")}
    (largest, most), *others = sorted(cost.items(), key=lambda part: -part[1])
    idle = [name for name, points in others if points <= 0]
    return bullets(
        f"On seed 2023, {largest} costs {most:.1f} of the {plain - tuned:.1f} points between the two settings. "
        f"Leaving out another part costs {max(points for _, points in others):.1f} or less.",
        f"No help by this table: {', '.join(idle) or 'none'}.",
    )


def picture() -> Picture:
    names = {"plain": "FULL", "tuned": "tuned", "centralised-tuned": "tuned, all data in one place"}
    found = {name: runs(f"{TABLE}/{method}", YEARS) for method, name in names.items()}
    return Picture("feddiffuse", "GB sent", "FID", points(found, lambda these: metric(these, "fid"), gigabytes))


BLOCKS = {
    "feddiffuse, first lines": first_lines,
    "feddiffuse.table1": table1,
    "feddiffuse.skews": skews,
    "feddiffuse.ablation": ablation,
    "feddiffuse, parts": parts,
}
