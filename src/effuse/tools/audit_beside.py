"""Two audits in one picture: memorisation scores and membership attacks, such as of a private run and a run that is not."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from effuse.core.errors import RunError
from effuse.core.files import parsed
from effuse.report.html import document, table
from effuse.tools.audit_page import ATTACKS, COLOURS, WIDTH, histogram, within

ROW, GAP = 18, 14  # of the picture of intervals: a run's line, and the space after an attack
LABELS = 210  # pixels for the attacks' names


def read_audit(run: Path) -> dict[str, Any]:
    """The report of a run that has been audited."""
    path = run / "audit" / "audit.json"
    try:
        found: dict[str, Any] = parsed(path.read_bytes(), path)
    except FileNotFoundError:
        raise RunError(f"{run}: it has no audit; make one with `effuse audit {run}`") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}; audit the run again") from None
    return found


def beside(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """A page with the numbers of both."""
    runs = {"generated": first, "other": second}
    names = {kind: title_of(report) for kind, report in runs.items()}
    title = f"Audits of {names['generated']} and {names['other']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<p>This page and its numbers come from private images. Decide who may see them before you pass them on.</p>",
        "<h2>Memorisation</h2>",
        *memorisation(runs, names),
        "<h2>Membership</h2>",
        *membership(runs, names),
    ]
    return document(title, parts)


def title_of(report: Mapping[str, Any]) -> str:
    """A run's name, the audited model and what was promised."""
    promise = report["promise"]
    said = "no budget" if promise is None else f"epsilon {promise['epsilon']:g}"
    about = report["about"]
    return f"{about.get('run', 'a model')} ({about.get('model', 'model')}, {said})"


def memorisation(runs: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Sequence[str]:
    """The scores of both runs' images and of held-out real ones."""
    found = {kind: report["memorisation"] for kind, report in runs.items()}
    missing = [names[kind] for kind, memory in found.items() if memory is None]
    if missing:
        return [f"<p>Not compared: {escape(missing[0])} has no generated images.</p>"]
    series = {kind: memory["generated"] for kind, memory in found.items()} | {"held_out": found["generated"]["held_out"]}
    labels = {**names, "held_out": "held-out real"}
    rows = [
        (labels[kind], f"{s['n']:,}", f"{s['below']:,} ({s['share']:.2%})", f"{s['lowest']:.3f}", f"{s['median']:.3f}")
        for kind, s in series.items()
    ]
    edges, threshold = found["generated"]["edges"], found["generated"]["threshold"]
    counts = {kind: s["histogram"] for kind, s in series.items()}
    return [
        table(rows, ("images", "number", f"below {threshold:g}", "lowest", "median")),
        histogram(edges, counts, threshold, labels),
    ]


def membership(runs: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Sequence[str]:
    """The areas under the curves of both runs, with their intervals."""
    found = {kind: report["membership"]["attacks"] for kind, report in runs.items()}
    shared = [name for name in found["generated"] if name in found["other"]]
    rows = [
        (ATTACKS.get(attack, attack), names[kind], within(own[attack]["auc"]), within(own[attack]["tpr"], ".1%"))
        for attack in shared
        for kind, own in found.items()
    ]
    head = ("attack", "run", "area under the curve", "true positives at 1 % false ones")
    return [table(rows, head), intervals(shared, found, names)]


def intervals(attacks: Sequence[str], found: Mapping[str, Mapping[str, Mapping[str, Any]]], names: Mapping[str, str]) -> str:
    """Each area as a dot on its interval, as an SVG; the dashed line, 0.5, is an attack that tells nothing."""
    each = ROW * len(found) + GAP
    left = LABELS

    def x(area: float) -> float:
        return left + area * (WIDTH - left - 16)

    marks = []
    for place, (kind, name) in enumerate(names.items()):
        marks.append(f'<rect x="8" y="{4 + 16 * place}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        marks.append(f'<text x="26" y="{15 + 16 * place}">{escape(name)}</text>')
    top = 16 * len(names) + 16
    for i, attack in enumerate(attacks):
        marks.append(f'<text x="8" y="{top + i * each + ROW + 4}">{escape(ATTACKS.get(attack, attack))}</text>')
        for place, kind in enumerate(names):
            auc, y, colour = found[kind][attack]["auc"], top + i * each + place * ROW + 10, COLOURS[kind]
            low, value, high = (f"{x(auc[limit]):.1f}" for limit in ("low", "value", "high"))
            marks.append(f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
            marks.append(f'<circle class="{kind}" cx="{value}" cy="{y}" r="4" fill="{colour}"/>')
    bottom = top + each * len(attacks)
    marks.append(
        f'<line x1="{x(0.5):.1f}" x2="{x(0.5):.1f}" y1="{top}" y2="{bottom}" stroke="currentColor" stroke-dasharray="4"/>'
    )
    for area in (0.0, 0.25, 0.5, 0.75, 1.0):
        marks.append(f'<text x="{x(area):.1f}" y="{bottom + 14}" text-anchor="middle">{area:g}</text>')
    height = bottom + 36
    marks.append(f'<text x="{x(0.5):.1f}" y="{height - 4}" text-anchor="middle">area under the curve</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-size="12" '
        'aria-label="Areas under the curves of membership attacks, with intervals">\n' + "\n".join(marks) + "\n</svg>"
    )
