"""The page of an audit: one file without scripts, whose names and values are shown as text."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from effuse.report.html import document, table

WIDTH, HEIGHT = 720, 260  # of the histogram's plane
LEFT, TOP, BOTTOM = 48, 24, 44
COLOURS = {"generated": "#3b6ea5", "held_out": "#c2661d", "other": "#4f8f3a"}
NAMES = {"generated": "generated", "held_out": "held-out real"}
ATTACKS = {
    "loss": "loss",
    "pia": "PIA, two evaluations",
    "secmi": "SecMI, twelve evaluations",
    "norm": "norm of the predicted noise",
}
ACCOUNTANTS = {"pld": "privacy loss distributions (pld)", "rdp": "Renyi divergences (rdp)"}
UNITS = {"image": "an image", "group": "all images of one group, such as a patient"}


def page(report: Mapping[str, Any]) -> str:
    """The report as an HTML document."""
    title = f"Audit of {report['about'].get('run', 'a model')}"
    weights = [("weights", report["weights_sha256"])] if report["weights_sha256"] else []
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="error">{escape(report["error"])}</p>' if report["error"] else "",
        "<p>This page and its numbers come from private images. Decide who may see them before you pass them on.</p>",
        table([*report["about"].items(), ("task", report["task"]), *weights]),
        "<h2>What was promised</h2>",
        promise(report["promise"]),
        "<h2>Memorisation</h2>",
        memorisation(report["memorisation"]),
        "<h2>Membership</h2>",
        membership(report["membership"]),
        "<h2>A lower bound on epsilon from this training</h2>",
        one_run(report["one_run"], report["promise"]),
        "" if report["clients"] is None else clients(report["clients"]),
    ]
    return document(title, parts)


def promise(promised: Mapping[str, Any] | None) -> str:
    """Epsilon, delta, what they mean, and what was spent of them."""
    if promised is None:
        return "<p>Nothing: the recipe has no budget, and the training was not differentially private.</p>"
    epsilon, delta, unit = promised["epsilon"], promised["delta"], promised["unit"]
    rows: list[tuple[str, object]] = [
        ("budget of each client, epsilon", f"{epsilon:g}"),
        ("delta", f"{delta:g}"),
        ("unit, which is protected", UNITS[unit]),
        ("neighbouring data sets", promised["adjacency"]),
        ("accountant", ACCOUNTANTS[promised["accountant"]]),
    ]
    words = (
        f"Suppose that somebody sees everything that a client sent, and asks whether one {unit} was in its data. "
        f"The odds of the answer change by a factor of at most e^{epsilon:g} = {math.exp(min(epsilon, 700.0)):,.4g}, "
        f"except with a probability of about {delta:g}. A factor of 1 would tell nothing; a large one promises little."
    )
    parts = [f"<p>{escape(words)}</p>", table(rows), spent(promised["ledger"])]
    if promised["simulated"]:
        parts.append(
            "<p>This run was a simulation. Its noise follows from its seed, so it protects nobody; "
            "it shows what the same training would promise at real sites, whose noise is secret.</p>"
        )
    return "\n".join(parts)


def spent(ledger: Mapping[str, Any] | None) -> str:
    """What each client spent, by the run's result."""
    if ledger is None or not ledger["clients"]:
        return "<p>What was spent is not recorded here. Each site keeps a ledger of its own.</p>"
    rows = []
    for client, own in ledger["clients"].items():
        sigma = "-" if own["sigma"] is None else f"{own['sigma']:.4g}"
        rows.append((client, f"{own['epsilon']:.4g}", sigma, own["releases"], ", ".join(own.get("what", ()))))
    words = (
        f"Everything that a client sent cost it at most epsilon {ledger['epsilon']:.4g} of {ledger['budget']:g}. "
        "Sigma is the training's noise over the largest gradient of a unit. "
        "Where a person's data are at several clients, what these spent adds up."
    )
    head = ("client", "epsilon spent", "sigma", "releases", "of")
    return "\n".join([f"<p>{escape(words)}</p>", table(rows, head), f"<p>Not covered: {escape(ledger['not_covered'])}.</p>"])


def clients(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The numbers of each client's model."""
    attacks = list(next(iter(found.values()))["membership"]["attacks"])
    rows = []
    for client, own in found.items():
        memory, seen = own["memorisation"], own["membership"]
        made = "-" if memory is None else f"{memory['generated']['below']:,} of {memory['generated']['n']:,}"
        areas = [within(seen["attacks"][name]["auc"]) for name in attacks]
        lowest = "-" if memory is None else f"{memory['generated']['lowest']:.3f}"
        rows.append((client, made, lowest, f"{seen['members']:,}", *areas))
    head = ("client", "memorised", "lowest score", "attacked", *(f"area, {name}" for name in attacks))
    words = (
        "Each client's generator is audited against this client's own images. "
        "So are the images that were drawn from it. The sections above are of all clients together. "
        "Networks differ in scale, so there an attack's numbers are counted in standard deviations of the client's held-out "
        "images from their mean. Canaries are ranked within their client. "
        "A client adds as many training images as held-out ones. "
        "Here, about one interval in twenty misses the truth by chance."
    )
    return f"<h2>Each client</h2>\n<p>{escape(words)}</p>\n{table(rows, head)}"


def memorisation(found: Mapping[str, Any] | None) -> str:
    """Shares, a histogram and where the pairs are."""
    if found is None:
        return "<p>Not measured: there are no generated images.</p>"
    rows = [
        (NAMES[kind], f"{s['n']:,}", f"{s['below']:,} ({s['share']:.2%})", f"{s['lowest']:.3f}", f"{s['median']:.3f}")
        for kind, s in ((kind, found[kind]) for kind in NAMES)
    ]
    words = (
        f"The score compares an image's distance from its nearest training image with the mean over "
        f"{found['neighbours']} neighbours, among {found['training_images']:,} training images (FedDiff, Eq. 4, "
        f"alpha {found['alpha']:g}). Copies score 0. A score below {found['threshold']:g} is called memorised. "
        "Held-out images show how real images that nobody trained on score."
    )
    return "\n".join(
        [
            f"<p>{escape(words)}</p>",
            table(rows, ("images", "number", f"below {found['threshold']:g}", "lowest", "median")),
            histogram(found["edges"], {kind: found[kind]["histogram"] for kind in NAMES}, found["threshold"]),
            "<p>The nearest pairs are in private/nearest.png: a generated image, then its nearest training image. "
            "They show training images, so they are not in this page.</p>",
        ]
    )


def membership(found: Mapping[str, Any]) -> str:
    """Every attack with its intervals, and the bound."""
    rows = [
        (ATTACKS.get(name, name), within(a["auc"]), within(a["tpr"], ".1%"), within(a["fpr"], ".1%"))
        for name, a in found["attacks"].items()
    ]
    words = (
        f"{found['members']:,} training images against {found['others']:,} others with the same labels in the same "
        "proportions. An area of 0.5 says that the attack tells nothing. Intervals have 95 %: Newcombe's method 5 for the "
        "area, Clopper and Pearson's for the shares. False positives: the share here, and what it may be among all others."
    )
    bound = found["bound"]
    rule = "The promise allows true positives of e^epsilon / 100 + delta"
    if bound is None:
        allowed = "Nothing was promised that these figures could contradict"
    elif bound == 1:
        allowed = f"{rule}: all of them, so that no attack can contradict it"
    else:
        allowed = f"{rule}: at most {bound:.2%}"
    if found["above"]:
        allowed += f". Above it by more than chance: {', '.join(found['above'])}; look into the noise and its accounting"
    return "\n".join(
        [
            f"<p>{escape(words)}</p>",
            table(rows, ("attack", "area under the curve", "true positives at 1 % false ones", "false positives")),
            f"<p>{escape(allowed)}. These attacks train no networks of their own, so a stronger attacker may see more.</p>",
        ]
    )


def one_run(found: Mapping[str, Any] | None, promised: Mapping[str, Any] | None) -> str:
    """The bound, beside the promise."""
    if found is None:
        return "<p>Not measured: the recipe set no canaries aside.</p>"
    beside = "nothing was promised" if promised is None else f"the promise is {promised['epsilon']:g}"
    words = (
        f"Of {found['canaries']:,} canaries, each trained on or left out by a coin, {found['guesses']:,} were guessed by "
        f"the attack '{found['attack']}', and {found['right']:,} guesses are right. At {found['confidence']:.0%} confidence "
        f"and delta {found['delta']:g}, epsilon is at least {found['epsilon']:.3f}; {beside}."
    )
    return f"<p>{escape(words)}</p>"


def within(estimate: Mapping[str, float], form: str = ".3f") -> str:
    """A number with its interval."""
    return f"{estimate['value']:{form}} ({estimate['low']:{form}} to {estimate['high']:{form}})"


def histogram(
    edges: Sequence[float], series: Mapping[str, Sequence[int]], threshold: float, names: Mapping[str, str] = NAMES
) -> str:
    """The series as bars side by side in each bin, on a logarithmic scale of counts, as an SVG."""
    above = TOP if len(series) < 3 else 16 * len(series) + 8  # long names have a line each
    most = max(1, *(max(counts) for counts in series.values()))
    top = math.log10(most / 0.5)  # a single image is 0.3 high, and none is nought

    def x(score: float) -> float:
        return LEFT + (score - edges[0]) / (edges[-1] - edges[0]) * (WIDTH - LEFT - 8)

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(count / 0.5) / top if count else 0) * (HEIGHT - BOTTOM - above)

    marks = []
    wide = (x(edges[1]) - x(edges[0])) / len(series)
    for place, (kind, counts) in enumerate(series.items()):
        for i, count in enumerate(counts):
            if count:
                box = f'x="{x(edges[i]) + place * wide:.1f}" y="{y(count):.1f}" width="{wide:.1f}"'
                told = f"<title>{escape(names[kind])}: {count}</title>"
                tall = f'height="{y(0) - y(count):.1f}"'
                marks.append(f'<rect class="{kind}" {box} {tall} fill="{COLOURS[kind]}">{told}</rect>')
        left, down = (LEFT + 8 + 150 * place, 0) if above == TOP else (LEFT + 8, 16 * place)
        marks.append(f'<rect x="{left}" y="{4 + down}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        marks.append(f'<text x="{left + 18}" y="{15 + down}">{escape(names[kind])}</text>')
    for power in range(int(math.log10(most)) + 1):
        level = y(10**power)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{level:.1f}" y2="{level:.1f}" class="grid"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{10**power}</text>')
    for quarter in range(5):
        score = edges[0] + quarter / 4 * (edges[-1] - edges[0])
        marks.append(f'<text x="{x(score):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{score:g}</text>')
    line = x(threshold)
    marks.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{above}" y2="{HEIGHT - BOTTOM}" '
        'stroke="currentColor" stroke-dasharray="4"/>'
    )
    marks.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">score; left of the line: memorised</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="12" '
        'aria-label="Histogram of memorisation scores, logarithmic counts">\n' + "\n".join(marks) + "\n</svg>"
    )
