"""FedDifRC: its claims, tables and picture."""

from pictures import Picture, Point, points
from runs import NOT_RUN, OWN, accuracy, figure, megabytes, metric, runs
from text import bullets, less, mean, rows, seeds
from verdicts import AHEAD, NOT_TESTABLE, answer, standing

from effuse.runs.records import Result

TABLE, LAST = "feddifrc.digits", figure("accuracy_last5")
PRINTED = 4.9  # points of accuracy ahead of FedAvg
SCENARIOS = {"dirichlet": "Dirichlet 0.05", "nid2": "NID2 of equal sizes"}
NAMES = {
    "fedavg": "FedAvg",
    "vectors": "FedDifRC, random class vectors",
    "own": "FedDifRC, own guide",
    "own_tdcl": "the same, TDCL alone",
    "own_ndcr": "the same, NDCR alone",
}


def quality(found: list[Result]) -> list[float]:
    """Accuracy in per cent, the mean of the last five rounds."""
    return [100 * LAST(one) for one in found]


def last5(scenario: str, method: str) -> list[float]:
    return quality(runs(f"{TABLE}/{scenario}-{method}"))


def against(scenario: str, method: str, other: str) -> list[float]:
    return less(last5(scenario, method), last5(scenario, other))


def claims() -> list[list[str]]:
    page, scale = "[page](feddifrc.md)", "digits"
    body = [
        [
            "guided by Stable Diffusion: points ahead of FedAvg",
            str(PRINTED),
            "",
            NOT_TESTABLE,
            "paper",
            page,
        ]
    ]
    for other, claim in (("fedavg", "FedAvg"), ("vectors", "random class vectors, which know no image")):
        for scenario, name in SCENARIOS.items():
            found = against(scenario, "own", other)
            ours = f"{mean(found)} points, by seed" if found else NOT_RUN
            row = f"{name}: is FedDifRC with a guide of the same federation ahead of {claim}?"
            body.append([row, OWN, ours, answer(found) if found else NOT_RUN, scale, page])
    return body


def reasons() -> list[str]:
    return ["FedDifRC with Stable Diffusion: its weights are not at hand."]


def first_lines() -> str:
    ahead = {
        name: sum(standing(against(scenario, "own", other)) == AHEAD for scenario in SCENARIOS)
        for other, name in (("fedavg", "FedAvg"), ("vectors", "random class vectors"))
    }
    lines = [
        f"FedDifRC with its own guide is ahead of {name} in {n} of {len(SCENARIOS)} scenarios." for name, n in ahead.items()
    ]
    for scenario, name in SCENARIOS.items():
        helps, image = against(scenario, "own", "fedavg"), against(scenario, "own", "vectors")
        vectors = against(scenario, "vectors", "fedavg")
        training, alone = (sum(map(megabytes, runs(f"{TABLE}/{scenario}-{method}"))) for method in ("guide", "fedavg"))
        lines += [
            f"**{name}: does the guide help?** Own guide less FedAvg: {mean(helps)} points, {standing(helps)}. "
            f"Training the guide sends {training / alone:.0f} times as much as FedAvg.",
            f"**{name}: the image, or a shared class vector?** Own guide less class vectors: {mean(image)} points, "
            f"{standing(image)}. Class vectors less FedAvg: {mean(vectors)} points, {standing(vectors)}.",
        ]
    return bullets(*lines)


def comparison(scenario: str) -> str:
    base, controls, body = last5(scenario, "fedavg"), last5(scenario, "vectors"), []
    for method, name in NAMES.items():
        found = runs(f"{TABLE}/{scenario}-{method}")
        ours, guided = quality(found), method.startswith("own")
        row = [name, seeds(ours, 3), mean(ours), "" if method == "fedavg" else mean(less(ours, base))]
        row += [mean(less(ours, controls)) if guided else "", mean(accuracy(found))]
        body.append([*row, *_cost(found)])
    head = ["method", "last five rounds, seeds 0, 1, 2", "mean", "less FedAvg, by seed", "less class vectors"]
    return rows([*head, "last round", "MB sent", "seconds"], body)


def _cost(found: list[Result]) -> list[str]:
    taken = [one.seconds for one in found]
    return [f"{megabytes(found[0]):.0f}", f"{min(taken):.0f} to {max(taken):.0f}"] if found else ["", ""]


def guides() -> str:
    body = []
    for scenario, name in SCENARIOS.items():
        found = runs(f"{TABLE}/{scenario}-guide")
        body.append([name, seeds(metric(found, "conditional_accuracy", 100), 3), *_cost(found)])
    return rows(["scenario", "drawn digits that show their label, %, seeds 0, 1, 2", "MB sent", "seconds"], body)


def picture() -> Picture:
    short = {
        "fedavg": "FedAvg",
        "vectors": "class vectors",
        "own": "own guide",
        "own_tdcl": "TDCL alone",
        "own_ndcr": "NDCR alone",
    }
    shown: tuple[Point, ...] = ()
    for scenario, where in (("dirichlet", "Dirichlet"), ("nid2", "NID2")):
        training = max(map(megabytes, runs(f"{TABLE}/{scenario}-guide")), default=0)
        for method, name in short.items():
            guide = training if method.startswith("own") else 0
            found = {f"{name}, {where}": runs(f"{TABLE}/{scenario}-{method}")}
            shown += points(found, quality, lambda one, guide=guide: megabytes(one) + guide)
    return Picture("feddifrc", "MB sent, with the guide's training", "accuracy in %", shown)


BLOCKS = {
    "feddifrc, first lines": first_lines,
    "feddifrc.digits, Dirichlet": lambda: comparison("dirichlet"),
    "feddifrc.digits, NID2": lambda: comparison("nid2"),
    "feddifrc.digits, guides": guides,
}
