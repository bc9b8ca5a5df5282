"""The page of an audit: one file without scripts, whose names and values are shown as text."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 720, 260  # of the histogram's plane
LEFT, TOP, BOTTOM = 48, 24, 44
COLOURS = {"generated": "#3b6ea5", "held_out": "#c2661d"}
NAMES = {"generated": "generated", "held_out": "held-out real"}
ATTACKS = {
    "loss": "loss",
    "pia": "PIA, two evaluations",
    "secmi": "SecMI, twelve evaluations",
    "norm": "norm of the predicted noise",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2em 1.2em .2em 0; border-bottom: 1px solid #ddd; }
svg { max-width: 100%; height: auto; } .error { border: 2px solid #b00020; padding: .5em 1em; }
"""


def page(report: Mapping[str, Any]) -> str:
    """The report as an HTML document."""
    title = f"Audit of {report['about'].get('run', 'a model')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="error">{escape(report["error"])}</p>' if report["error"] else "",
        "<p>This page and its numbers come from private images. Decide who may see them before you pass them on.</p>",
        table([(k, v) for k, v in {**report["about"], "task": report["task"], "weights": report["weights_sha256"]}.items()]),
        "<h2>What was promised</h2>",
        promise(report["promise"]),
        "<h2>Memorisation</h2>",
        memorisation(report["memorisation"]),
        "<h2>Membership</h2>",
        membership(report["membership"]),
        "<h2>A lower bound on epsilon from this training</h2>",
        one_run(report["one_run"], report["promise"]),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body>\n</html>\n"
    )


def promise(promised: Mapping[str, Any] | None) -> str:
    """Epsilon, delta, and what they mean."""
    if promised is None:
        return "<p>Nothing: the recipe has no budget, and the training was not differentially private.</p>"
    rows: list[tuple[str, object]] = [
        ("epsilon", f"{promised['epsilon']:g}"),
        ("delta", f"{promised['delta']:g}"),
        ("unit", promised["unit"]),
        ("neighbouring data sets", promised["adjacency"]),
        ("accountant", promised["accountant"]),
    ]
    return table(rows + ([("ledger", promised["ledger"])] if promised["ledger"] is not None else []))


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
    allowed = "no bound: nothing was promised" if bound is None else f"at most {bound:.2%}"
    if found["above"]:
        allowed += f". Above it by more than chance: {', '.join(found['above'])}; look into the noise and its accounting"
    return "\n".join(
        [
            f"<p>{escape(words)}</p>",
            table(rows, ("attack", "area under the curve", "true positives at 1 % false ones", "false positives")),
            f"<p>The promise allows true positives of e^epsilon / 100 + delta: {escape(allowed)}. "
            "These attacks train no networks of their own, so a stronger attacker may see more.</p>",
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


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Rows of text."""
    top = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>\n" if head else ""
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n{top}{body}\n</table>"


def histogram(edges: Sequence[float], series: Mapping[str, Sequence[int]], threshold: float) -> str:
    """The series as bars side by side in each bin, on a logarithmic scale of counts, as an SVG."""
    most = max(1, *(max(counts) for counts in series.values()))
    top = math.log10(most / 0.5)  # a single image is 0.3 high, and none is nought

    def x(score: float) -> float:
        return LEFT + (score - edges[0]) / (edges[-1] - edges[0]) * (WIDTH - LEFT - 8)

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(count / 0.5) / top if count else 0) * (HEIGHT - BOTTOM - TOP)

    marks = []
    wide = (x(edges[1]) - x(edges[0])) / len(series)
    for place, (kind, counts) in enumerate(series.items()):
        for i, count in enumerate(counts):
            if count:
                marks.append(
                    f'<rect class="{kind}" x="{x(edges[i]) + place * wide:.1f}" y="{y(count):.1f}" width="{wide:.1f}" '
                    f'height="{y(0) - y(count):.1f}" fill="{COLOURS[kind]}"><title>{NAMES[kind]}: {count}</title></rect>'
                )
        left = LEFT + 8 + 150 * place
        marks.append(f'<rect x="{left}" y="4" width="12" height="12" fill="{COLOURS[kind]}"/>')
        marks.append(f'<text x="{left + 18}" y="15">{NAMES[kind]}</text>')
    for power in range(int(math.log10(most)) + 1):
        level = y(10**power)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{10**power}</text>')
    for quarter in range(5):
        score = edges[0] + quarter / 4 * (edges[-1] - edges[0])
        marks.append(f'<text x="{x(score):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{score:g}</text>')
    line = x(threshold)
    marks.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#222" stroke-dasharray="4"/>'
    )
    marks.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">score; left of the line: memorised</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="12" '
        'aria-label="Histogram of memorisation scores, logarithmic counts">\n' + "\n".join(marks) + "\n</svg>"
    )
