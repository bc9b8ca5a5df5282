"""The table of clients."""

from typing import Any

from effuse.report.charts import Point, Series, chart
from effuse.report.facts import Facts
from effuse.report.html import Cell, paragraph, section, table
from effuse.report.words import amount, duration, number

LINES = 6  # clients whose losses are drawn


def client_rows(facts: Facts) -> list[dict[str, Any]]:
    """What is known of each client, as flat records."""
    rows: dict[int, dict[str, Any]] = {k: {"client": k, "images": None, "asked": 0, "silent": 0} for k in facts.clients}
    for row in rows.values():
        row |= {"bytes_up": 0, "bytes_down": 0, "seconds": None, "loss": None}
    for record in facts.records:
        for k, sent in (record.traffic.clients or {}).items():
            row = rows[int(k)]
            row["asked"] += 1
            row["bytes_up"] += sent.get("up", 0)
            row["bytes_down"] += sent.get("down", 0)
        for k, own in (record.clients or {}).items():
            row = rows[int(k)]
            row["loss"] = row["loss"] if own.loss is None else own.loss
            row["seconds"] = row["seconds"] if own.seconds is None else (row["seconds"] or 0.0) + own.seconds
        for client in record.silent or ():
            rows[client]["silent"] += 1
    held = facts.split if facts.split and facts.split.sites is None else None  # what sites told has hidden cells
    for client, counts in enumerate(held.labels if held else ()):
        rows[client]["images"] = sum(counts)
    for client, groups in enumerate((held and held.groups) or ()):
        rows[client]["groups"] = groups
    for name, values in personal(facts).items():
        for client, value in zip(rows, values):
            rows[client][name] = value
    return list(rows.values())


def personal(facts: Facts) -> dict[str, list[float]]:
    """The metrics of clients' own models, where every client has one: the values do not say whose they are."""
    found = facts.result.metrics if facts.result else {}
    return {name: m.clients for name, m in found.items() if m.clients and len(m.clients) == len(facts.clients)}


def clients(facts: Facts) -> str:
    """Data, traffic, time, drop-outs, last loss and own metrics of each client."""
    rows = client_rows(facts)
    if facts.public or not rows or not facts.records:
        return ""
    shown: dict[str, Any] = {"bytes_up": amount, "bytes_down": amount, "seconds": duration}
    keys = dict.fromkeys(key for row in rows for key in row)
    known = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [[_cell(row.get(key), shown.get(key, number)) for key in known] for row in rows]
    head = [{"asked": "rounds asked in", "silent": "rounds silent in"}.get(key, key.replace("_", " ")) for key in known]
    about = paragraph(
        "Silent: the client gave no answer that could be used. Seconds are of its work; "
        "of a remote client, until its answers came. The loss is the last that it reported.",
        "soft",
    )
    drawn = chart("loss of clients", losses(facts), "round")
    return section("Clients", about, table(cells, head, "clients"), f'<div class="charts">{drawn}</div>' if drawn else "")


def losses(facts: Facts) -> list[Series]:
    """The losses of a few clients: evenly spaced in the order of their last loss, the best and the worst among them."""
    found: dict[int, list[Point]] = {}
    for record in facts.records:
        for k, own in (record.clients or {}).items():
            if own.loss is not None:
                found.setdefault(int(k), []).append(Point(record.t + 1, own.loss))
    order = sorted(found, key=lambda k: found[k][-1].y)
    wanted = min(LINES, len(order))
    chosen = [order[round(i * (len(order) - 1) / max(1, wanted - 1))] for i in range(wanted)]
    return [Series(f"client {k}", found[k]) for k in sorted(chosen)]


def _cell(value: Any, words: Any) -> object:
    if value is None:
        return "-"
    return value if isinstance(value, int) and words is number else Cell(words(value), value)
