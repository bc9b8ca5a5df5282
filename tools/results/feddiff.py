"""FedDiff: its claims, tables and picture."""

import statistics

from pictures import Picture, points
from runs import NOT_RUN, OWN, accuracy, megabytes, printed, runs, seconds
from text import bullets, less, mean, plus_minus, rows, seeds
from verdicts import AHEAD, BEHIND, LEVEL, NOT_TESTABLE, answer, close, gains, standing

from effuse.runs.records import Result

DIGITS, PRIVATE, SEEDS = "feddiff.digits", "feddiff.private_comparison", range(5)
NAMES = {
    "class_means": "`class_means`: a classifier on noisy class means, no generator",
    "nearest_mean": "`nearest_mean`: the nearest of the same means",
    "additions": "`additions`: FedDiff with every addition",
    "paper": "`paper`: FedDiff as printed",
}
PARTS = {
    "means": "`means`: a warm start on noisy class means",
    "batch": "`batch`: whole-site batches",
    "ema": "`ema`: averaged weights",
    "repeats": "`repeats`: four noise draws an image",
}
DATA = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
WORDS = {AHEAD: "ahead of", BEHIND: "behind", LEVEL: "not told apart from"}
LAST = ["epsilon spent", "MB sent", "seconds"]
BARS = {1: "feddiff.table5", 10: "feddiff.table4"}


def private(method: str) -> list[float]:
    return accuracy(runs(f"{PRIVATE}/{method}", SEEDS))


def bar(data: str, epsilon: int) -> list[float]:
    return accuracy(runs(f"{BARS[epsilon]}-scaled/nearest_mean-{data}-{epsilon}"))


def told(data: str, epsilon: int) -> tuple[float, float]:
    """FedDiff's printed accuracy in per cent, and its deviation."""
    cell = printed(BARS[epsilon], f"feddiff-{data}-{epsilon}-0")
    return 100 * (cell.printed or 0), 100 * (cell.spread or 0)


def beside_the_bar(data: str, epsilon: int) -> str:
    value, deviation = told(data, epsilon)
    gap = value - statistics.fmean(bar(data, epsilon))
    return AHEAD if gap > deviation else BEHIND if gap < -deviation else "level"


def claims() -> list[list[str]]:
    page, drawn, real = "[page](feddiff.md)", accuracy(runs(f"{DIGITS}/digits")), accuracy(runs(f"{DIGITS}/real"))
    best = printed("feddiff.table1", "feddiff-fashion-0.01-0").printed or 0
    ours = f"digits: {mean(drawn) or NOT_RUN}; real digits {mean(real) or NOT_RUN}"
    claim = "a classifier that saw drawn images alone is near one that saw real ones; accuracy in %"
    body = [[claim, f"{100 * best:.1f} on Fashion-MNIST", ours, close(drawn, real), "digits", page]]
    for epsilon in BARS:
        values = [plus_minus(*told(data, epsilon)) for data in DATA]
        bars = ", ".join(mean(bar(data, epsilon)) for data in DATA)
        stands = ", ".join(f"{beside_the_bar(data, epsilon)} on {name}" for data, name in DATA.items())
        claim = f"private FedDiff at epsilon {epsilon}: {', '.join(DATA.values())}"
        ours = f"not run; the nearest noisy class mean, which trains nothing: {bars}; the printed are {stands}"
        body.append([claim, ", ".join(values), ours, NOT_TESTABLE, "scaled", page])
    means = private("class_means")
    for method, name in (("paper", "FedDiff as printed"), ("additions", "FedDiff with additions")):
        found = private(method)
        ours = f"digits: {mean(found) or NOT_RUN}; class means {mean(means)}, by seed {mean(less(found, means)) or NOT_RUN}"
        judged = answer(gains(found, means)) if found else NOT_RUN
        body.append([f"is {name} at epsilon 10 ahead of noisy class means alone?", OWN, ours, judged, "digits", page])
    return body


def reasons() -> list[str]:
    return ["FedDiff on Fashion-MNIST and CIFAR-10: it needs a GPU, and none was left."]


def first_lines() -> str:
    drawn, real = accuracy(runs(f"{DIGITS}/digits")), accuracy(runs(f"{DIGITS}/real"))
    gap, means = less(real, drawn), private("class_means")
    lines = [
        f"Without privacy, a classifier that saw drawn digits alone is {mean(gap) or NOT_RUN} points behind the real ones'."
    ]
    for method, name in (("additions", "FedDiff with every addition"), ("paper", "FedDiff as printed")):
        found = private(method)
        if found:
            lines.append(
                f"At epsilon 10 {name} is {WORDS[standing(gains(found, means))]} noisy class means without a generator: "
                f"{mean(less(found, means))} points, by seed."
            )
    stands = "; ".join(f"{name} {beside_the_bar(d, e)} at {e}" for d, name in DATA.items() for e in BARS)
    lines.append(f"FedDiff's printed private accuracy against the nearest noisy class mean, by epsilon: {stands}.")
    wanted = len(SEEDS) * len([*NAMES, *PARTS])
    left = wanted - sum(len(runs(f"{PRIVATE}/{method}", SEEDS)) for method in [*NAMES, *PARTS])
    if left:
        lines.append(f"Of the private comparison {left} of {wanted} runs are missing, minutes each on two idle cores.")
    return bullets(*lines)


def digits() -> str:
    names = {"digits": "drawn digits (`feddiff.digits`)", "real": "real digits, in one place (`feddiff.real_digits`)"}
    body = []
    for method, name in names.items():
        found = runs(f"{DIGITS}/{method}")
        body.append([name, seeds(accuracy(found), 3), mean(accuracy(found)), seconds(found)])
    return rows(["trained on", "seeds 0, 1, 2", "mean", "seconds"], body)


def comparison() -> str:
    base, body = private("class_means"), []
    for method, name in NAMES.items():
        found, ours = runs(f"{PRIVATE}/{method}", SEEDS), private(method)
        behind = "" if method == "class_means" else mean(less(ours, base))
        body.append([name, seeds(ours, len(SEEDS)), mean(ours), behind, *_spent(found), seconds(found)])
    return rows(["method", "seeds 0 to 4", "mean", "less `class_means`, by seed", *LAST], body)


def parts() -> str:
    base, body = private("paper"), []
    for method, name in PARTS.items():
        found, ours = runs(f"{PRIVATE}/{method}", SEEDS), private(method)
        body.append([name, seeds(ours, len(SEEDS)), mean(ours), mean(less(ours, base)), *_spent(found), seconds(found)])
    table = rows(["FedDiff as printed, and", "seeds 0 to 4", "mean", "less `paper`, by seed", *LAST], body)
    return f"{table}\n\n{what_helps()}" if all(private(method) for method in PARTS) else table


def what_helps() -> str:
    """What the budget is best spent on, by the rule for two methods."""
    base, all_of = private("paper"), private("additions")
    gained = {method: gains(private(method), base) for method in PARTS}
    most = max(gained, key=lambda method: statistics.fmean(gained[method]))
    whole, best = statistics.fmean(less(all_of, base)), statistics.fmean(gained[most])
    stands = [f"`{method}` {standing(gained[method])}" for method in PARTS]
    return bullets(
        f"Against `paper`: {', '.join(stands)}.",
        f"`{most}` alone gains {best:.1f} of the {whole:.1f} points that all additions gain together.",
    )


def _spent(found: list[Result]) -> list[str]:
    if not found:
        return ["", ""]
    epsilon = max((one.privacy or {})["epsilon"] for one in found)
    return [f"{epsilon:.3f}", f"{megabytes(found[0]):.2f}"]


def bars() -> str:
    body = []
    for data, name in DATA.items():
        row = [name]
        for epsilon in BARS:
            row += [mean(bar(data, epsilon), 2), plus_minus(*told(data, epsilon)), beside_the_bar(data, epsilon)]
        body.append(row)
    head = [f"{column}, epsilon {epsilon}" for epsilon in BARS for column in ("nearest mean", "FedDiff as printed", "it is")]
    return rows(["", *head], body)


def picture() -> Picture:
    names = {
        "nearest_mean": "nearest mean",
        "class_means": "class means",
        "paper": "FedDiff",
        "additions": "FedDiff, additions",
    }
    found = {f"{name}, epsilon 10": runs(f"{PRIVATE}/{method}", SEEDS) for method, name in names.items()}
    found["FedDiff without privacy"] = runs(f"{DIGITS}/digits")
    return Picture("feddiff", "MB sent", "accuracy in %", points(found, accuracy, megabytes), "log")


BLOCKS = {
    "feddiff, first lines": first_lines,
    "feddiff.digits": digits,
    "feddiff.private_comparison": comparison,
    "feddiff.private_comparison, parts": parts,
    "nearest means": bars,
}
