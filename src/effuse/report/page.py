"""The page of one run."""

from collections.abc import Sequence
from typing import Any

from effuse.core.ledger import EDGE_CLOUD
from effuse.report.charts import Point, Series, chart
from effuse.report.facts import Facts, grids_of, within_budget
from effuse.report.heat import heat
from effuse.report.html import Cell, document, embedded, paragraph, picture, section, table, text
from effuse.report.people import clients
from effuse.report.words import amount, duration, number, plural

PICTURES = 5_000_000  # bytes of pictures in a page
WEIGHTED = {
    "paper_cost": "traffic weighted by distance, of clients their uploads only",
    "symmetric_cost": "traffic weighted by distance, both ways",
}
CHARTS = 12  # metrics that are drawn; the others are in the table
OWN = (
    "This page has facts about single clients. Keep it where the run is kept. "
    "The command effuse report RUN --public writes a page that may be passed on."
)
PUBLIC = (
    "This page may be passed on: it has no real image, no file name and no single client's losses, times or small counts."
)
NEAREST = (
    "Real images: each generated image is beside its nearest training image. This page is for the site that owns them, and "
    "for nobody else."
)


def page(facts: Facts, nearest: bytes | None = None) -> str:
    """The report of a run; `nearest` is a picture of real images, for their owner only."""
    parts = [
        f"<h1>{text(facts.name)}</h1>",
        paragraph(verdict(facts), "verdict"),
        paragraph(PUBLIC if facts.public else OWN, "soft"),
        tiles(facts),
        samples(facts),
        curves(facts),
        partition(facts),
        traffic(facts),
        clients(facts),
        privacy(facts),
        audit(facts, nearest),
        costs(facts),
        metrics(facts),
        repeated(facts),
        values(facts),
    ]
    return document(f"effuse: {facts.name}", parts, interactive=True)


def verdict(facts: Facts) -> str:
    """How the run ended, and what came of it, in a few words."""
    who = f"{facts.algorithm} with {plural(facts.count('clients'), 'client')}"
    done, wanted = facts.rounds, facts.count("rounds")
    if facts.diverged:
        state = f"Diverged: {who}, in round {done + 1} of {wanted}"
    elif facts.result is None:
        state = f"Unfinished: {who}, after round {done} of {wanted}"
    else:
        state = f"Finished: {who}, {plural(done, 'round')}"
    said = [f"{state}, {amount(facts.sent[-1][1] if facts.sent else 0)} sent"]
    for name, found in list(facts.measured.items())[:1]:
        (first, _, before), (last, _, after) = found[0], found[-1]
        change = f" (it was {number(before)} after round {first.federated})" if first is not last else ""
        said.append(f"{name} is {number(after)} after round {last.federated}{change}")
    missed = sum(len(record.silent or ()) for record in facts.records)
    if missed:
        said.append(f"{plural(missed, 'answer')} of clients did not come or could not be used")
    if facts.result and facts.result.privacy:
        spent = facts.result.privacy
        said.append(f"every client spent at most epsilon {number(spent['epsilon'])} of {number(spent['budget'])}")
    return ". ".join(said) + "."


def first_numbers(facts: Facts) -> list[tuple[str, str]]:
    """The numbers that are looked at first, with their names."""
    losses = [record.loss for record in facts.records if record.loss is not None]
    shown = [("rounds", f"{facts.rounds} of {facts.count('rounds')}"), ("clients", f"{facts.count('clients')}")]
    shown += [("sent", amount(facts.sent[-1][1]))] if facts.sent else []
    shown += [("last loss", number(losses[-1]))] if losses else []
    shown += [(name, number(found[-1][2])) for name, found in list(facts.measured.items())[:3]]
    seconds = facts.result.seconds if facts.result else sum(record.seconds.total for record in facts.records)
    return [*shown, ("time", duration(seconds))]


def tiles(facts: Facts) -> str:
    """The same as a row of boxes."""
    shown = first_numbers(facts)
    return '<dl class="tiles">' + "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in shown) + "</dl>"


def samples(facts: Facts) -> str:
    """Grids by round, with a slider where there are several."""
    known = [grid for grid in grids_of(facts.path) if grid.client is None or not facts.public]
    grids = within_budget(known, PICTURES)
    if not grids:
        return ""
    figures = []
    for step, (t, pictures) in enumerate(grids.items()):
        for grid in pictures:
            words = f"round {t}, {grid.name}"
            shown = picture(grid.path.read_bytes(), f"generated images, {words}")
            made = f"{shown}<figcaption>{text(words)}</figcaption>"
            figures.append(f'<figure data-step="{step}" data-name="round {t}">{made}</figure>')
    last = len(grids) - 1
    slider = (
        '<div class="slider"><label for="round">round</label>'
        f'<input id="round" type="range" min="0" max="{last}" value="{last}" data-for="pictures">'
        '<output id="round-told" for="round"></output></div>'
    )
    about = "Generated images. A model can repeat an image that it was trained on; an audit measures that."
    shown = f'<div class="pictures" id="pictures">{"".join(figures)}</div>'
    return section("Samples", paragraph(about, "soft"), slider if last else "", shown)


def curves(facts: Facts) -> str:
    """Loss and metrics over rounds, or over what was sent."""
    losses = [(record, sent, record.loss) for record, sent in facts.sent if record.loss is not None]
    drawn: dict[str, dict[str, Any]] = {"loss": {"loss": losses}} if losses else {}
    for name, found in facts.measured.items():
        base = name.removesuffix("_ema")
        if base in drawn or len(drawn) <= CHARTS:
            drawn.setdefault(base, {})[name] = found
    by_round, by_traffic = [], []
    for base, series in drawn.items():
        rounds = [Series(name, [Point(r.t + 1, v) for r, _, v in found]) for name, found in series.items()]
        sent = [Series(name, [Point(s, v, f"{amount(s)} sent") for _, s, v in found]) for name, found in series.items()]
        by_round.append(chart(base, rounds, "round"))
        by_traffic.append(chart(base, sent, "bytes sent"))
    if not any(by_round):
        return ""
    choice = (
        '<fieldset class="axis"><legend>over</legend>'
        '<label><input type="radio" name="axis" value="round" checked> rounds</label>'
        '<label><input type="radio" name="axis" value="traffic"> traffic</label></fieldset>'
    )
    kinds = (("round", by_round), ("traffic", by_traffic))
    both = [f'<div class="charts by-{kind}">{"".join(made)}</div>' for kind, made in kinds]
    return section("Curves", choice, *both, attributes='data-axis="round"')


def partition(facts: Facts) -> str:
    """Who holds what, where that is known here."""
    if facts.split is None:
        return section("Partition", paragraph("What each client holds is not known here."))
    if facts.split.sites is None:
        about = f"Images of each client and class, divided by {facts.short('partition')}."
    else:
        about = f"Images of each client and class, as {facts.algorithm} asked for them and the clients told them."
        absent = sorted(set(facts.clients).difference(facts.split.sites))
        about += f" {plural(len(absent), 'client')} told nothing." if absent else ""
    about += " Cells below ten are not told." if facts.public or facts.split.sites is not None else ""
    return section("Partition", paragraph(about), heat(facts.split, facts.classes))


def traffic(facts: Facts) -> str:
    """Bytes of every link and direction, in each round and together."""
    links: dict[str, list[Point]] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    for record in facts.records:
        for link, ways in record.traffic.links.items():
            for way, sent in ways.items():
                links.setdefault(f"{link}, {way}", []).append(Point(record.t + 1, sent["bytes"]))
                both = sums.setdefault((link, way), [0, 0, 0])
                for i, quantity in enumerate(("bytes", "parameters", "messages")):
                    both[i] += sent[quantity]
    if not links:
        return ""
    made = chart("bytes of a round", [Series(name, points) for name, points in links.items()], "round", zero=True)
    rows = [(link, way, Cell(amount(b), b), p, m) for (link, way), (b, p, m) in sums.items()]
    head = ("link", "direction", "sent", "parameters", "messages")
    return section("Traffic", table(rows, head, "traffic by link"), f'<div class="charts">{made}</div>')


def privacy(facts: Facts) -> str:
    """The budget, and what was spent of it."""
    budget = facts.recipe.get("budget", "None")
    rows: list[Sequence[object]] = [("plan", "no budget: nothing is private" if budget == "None" else budget)]
    spent = facts.result.privacy if facts.result else None
    if spent is not None:
        rows += [("spent by a client, at most", f"epsilon {number(spent['epsilon'])} of {number(spent['budget'])}")]
        rows += [("delta", f"{spent['delta']:g}"), ("protected unit", spent["unit"]), ("accountant", spent["accountant"])]
        rows += [("not covered", spent["not_covered"])]
    for what, cost in facts.told.items():
        rows.append((f"{what}s that clients told", f"epsilon {number(cost['epsilon'])}, {cost['mechanism']}"))
    notes = []
    if spent is not None and facts.manifest.get("engine") in ("simulator", "loopback"):
        notes.append(paragraph("This run was a simulation. Its noise follows from its seed, so it protects nobody."))
    each = spent.get("clients", {}) if spent is not None else {}
    own = [(k, Cell(number(c["epsilon"]), c["epsilon"]), number(c["sigma"]), c["releases"]) for k, c in each.items()]
    tables = table(own, ("client", "epsilon", "sigma", "releases"), "privacy of each client") if own else ""
    return section("Privacy", table(rows), *notes, tables)


def audit(facts: Facts, nearest: bytes | None) -> str:
    """What an audit found; only in the owner's page, since its numbers come from private images."""
    found = facts.audit
    if found is None:
        return ""
    rows: list[Sequence[object]] = []
    memory = found.get("memorisation") or {}
    for kind, words in (("generated", "memorised images"), ("held_out", "the same of held-out real ones")) if memory else ():
        s = memory[kind]
        rows.append((words, f"{s['below']:,} of {s['n']:,}, lowest score {s['lowest']:.3f}"))
    for name, attack in found["membership"]["attacks"].items():
        auc = attack["auc"]
        rows.append((f"attack {name}, area", f"{auc['value']:.3f} ({auc['low']:.3f} to {auc['high']:.3f})"))
    if (bound := found.get("one_run")) is not None:
        rows.append(("epsilon is at least", f"{bound['epsilon']:.3f}"))
    shown = ""
    if nearest:
        pairs = picture(nearest, "pairs of a generated image and its nearest training image")
        shown = f'{paragraph(NEAREST, "error")}<div class="pictures">{pairs}</div>'
    where = paragraph("The whole audit is in audit/index.html beside this page.", "soft")
    return section("Audit", table(rows), where, shown)


def costs(facts: Facts) -> str:
    """Parameters, multiply-adds, time and speed."""
    rows: list[tuple[str, str]] = []
    if facts.result is not None:
        rows.append(("parameters", f"{facts.result.parameters:,}"))
        figures = facts.result.figures or {}
        if "gmacs" in figures:
            rows.append(("multiply-adds an image", f"{figures['gmacs']:.4g} G"))
        if EDGE_CLOUD in facts.result.traffic.links:
            rows += [(words, number(figures[name])) for name, words in WEIGHTED.items() if name in figures]
    seconds = sum(record.seconds.round for record in facts.records)
    images, calls = (sum(getattr(record, name) for record in facts.records) for name in ("images", "evaluations"))
    rows.append(("seconds of training rounds", f"{seconds:,.1f}"))
    rows.append(("seconds with evaluation and checkpoints", f"{sum(record.seconds.total for record in facts.records):,.1f}"))
    if images:
        rows += [("images trained", f"{images:,}"), ("images a second", f"{images / max(seconds, 1e-9):,.0f}")]
    rows += [("network evaluations while drawing", f"{calls:,}")] if calls else []
    memory = [record.gpu_bytes for record in facts.records if record.gpu_bytes]
    rows += [("GPU memory, at most", amount(max(memory)))] if memory else []
    return section("Cost", table(rows))


def metrics(facts: Facts) -> str:
    """Every number of the result with its protocol, and those of a later evaluation."""
    found = dict(facts.result.metrics) if facts.result else {}
    found |= {f"{name}, evaluated again": m for name, m in facts.evaluation.items()}
    spreads = any(m.std is not None for m in found.values())  # over clients with models of their own
    rows: list[Sequence[object]] = []
    for name, m in found.items():
        told = "; ".join(f"{k} {_told(v)}" for k, v in m.protocol.items()) + (f". {m.warning}" if m.warning else "")
        spread = ["-" if m.std is None else Cell(number(m.std), m.std)] if spreads else []
        rows.append((name, Cell(number(m.value), m.value), *spread, told))
    head = ("metric", "value", *(["spread"] if spreads else []), "protocol")
    return section("Protocol", table(rows, head, "metrics with their protocols")) if rows else ""


def _told(value: object) -> object:
    return number(value) if isinstance(value, float) else value


def repeated(facts: Facts) -> str:
    """How to repeat the run, with which versions it was made, and its recipe."""
    kept = ("engine", "device", "created", "trained", "warm")
    manifest, versions = facts.manifest, facts.manifest.get("versions")
    again = "manifest.json" if facts.public else facts.path / "manifest.json"
    rows: list[tuple[str, object]] = [("command", f"effuse run {again}"), ("effuse", manifest.get("effuse", "-"))]
    rows += [(key, manifest[key]) for key in kept if manifest.get(key)]
    rows += list(versions.items()) if isinstance(versions, dict) else []
    rows += [("weights_sha256", facts.result.weights_sha256)] if facts.result else []
    keys = table(list(facts.recipe.items()))
    return section("How it was made", table(rows), f"<details><summary>the recipe, key by key</summary>{keys}</details>")


def values(facts: Facts) -> str:
    """The values behind the page."""
    raw = embedded(facts.raw())
    inner = '<p><a download="run.json">save it as a file</a></p><pre tabindex="0"></pre>'
    shown = f'<details data-raw="raw"><summary>the values behind this page, as JSON</summary>{inner}</details>'
    return section("Raw values", shown, f'<script type="application/json" id="raw">{raw}</script>')
