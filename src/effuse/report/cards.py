"""The documents of a release: model card and data sheet, from the run's own records."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from effuse.core.errors import shown
from effuse.report.facts import Facts
from effuse.report.scorecard import STATED, Contents, Line, Question
from effuse.report.words import amount, number, plural

POOLS = re.compile(r"^centralised\b|\boracle\b|\breal=True")  # algorithms to which a simulation gives all images
USE = {"purpose": "Purpose", "limits": "Not meant for", "contact": "Contact"}
MARKS = {mark: f"\\{mark}" for mark in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;"}


def model_card(name: str, facts: Facts, stated: Mapping[str, str], private: Sequence[Line]) -> str:
    """A model card, with the head that model hubs read."""
    result = facts.result
    assert result is not None  # only finished runs are released
    numbers = [[key, number(m.value), _said(m.protocol)] for key, m in result.metrics.items()]
    return _page(
        {"license": stated.get("license") or "other", "tags": ["synthetic", "federated-learning"]},
        f"# {plain(name)}",
        f"Trained by {facts.algorithm} {_where(facts)}.",
        "## Use",
        _list(USE, stated),
        "`model/` opens with diffusers where it is a denoiser, else with effuse.",
        "## Training",
        f"{plural(facts.rounds, 'round')}, {amount(result.traffic.bytes.total)} sent, {result.parameters:,} parameters.",
        "Keys that are not named are at their defaults. `images/provenance.json` names all.",
        _table(["key", "value"], ((key, facts.short(key)) for key in facts.recipe)),
        "## Measured at the end of training",
        _table(["metric", "value", "protocol"], numbers) if numbers else "Nothing was measured.",
        "## Privacy",
        _lines(private),
        f"SHA-256 of the weights: {result.weights_sha256}",
    )


def _where(facts: Facts) -> str:
    """Whose images trained the model, and where these were."""
    stayed = "were all in one place" if POOLS.search(facts.recipe.get("algorithm", "")) else "stayed with them"
    return f"with {facts.count('clients')} clients, whose images {stayed}"


def data_sheet(
    name: str, facts: Facts, held: Contents, stated: Mapping[str, str], questions: Sequence[Question], missing: Sequence[str]
) -> str:
    """A data sheet: why, what, how, how good, and what was not measured."""
    size = f"{held.images:,} images of {held.side}x{held.side} pixels; channels: {held.channels}."
    counts = [[label, f"{count:,}"] for label, count in held.by_class.items()]
    return _page(
        None,
        f"# Data sheet of {plain(name)}",
        "Every image here was drawn by a network. None is a photograph or a scan of anybody.",
        "## Motivation",
        _list(USE, stated),
        "## Composition",
        size if held.images else "No images.",
        _table(["class", "images"], counts) if counts else "The images have no labels.",
        "## How it was made",
        f"{facts.algorithm} trained the generator with {facts.count('clients')} clients. The model card has every setting.",
        _list({"source": "Real images that it was trained on", "basis": "Legal basis"}, stated),
        "## Quality",
        *(f"### {q.name}\n\n{q.asked}\n\n{_lines(q.lines)}" for q in questions),
        "## Not measured",
        "\n".join(f"- {plain(words)}" for words in missing) or "Nothing that is asked above.",
        "## Licence",
        plain(stated.get("license") or STATED),
    )


def plain(words: object) -> str:
    """Words of any origin as text in Markdown: no markup, no line breaks, no control characters."""
    return "".join(MARKS.get(c, c) for c in shown(" ".join(str(words).split())))


def _page(head: Mapping[str, Any] | None, *parts: str) -> str:
    top = "" if head is None else "---\n" + "".join(f"{k}: {json.dumps(v)}\n" for k, v in head.items()) + "---\n\n"
    return top + "\n\n".join(part for part in parts if part) + "\n"


def _list(items: Mapping[str, str], stated: Mapping[str, str]) -> str:
    return "\n".join(f"- {what}: {plain(stated.get(key) or STATED)}" for key, what in items.items())


def _lines(lines: Sequence[Line]) -> str:
    return _table(["what", "value", "how"], [[line.what, line.value, line.how] for line in lines])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    made = [[plain(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(head), ["---"] * len(head), *made])


def _said(protocol: Mapping[str, Any]) -> str:
    told = {key: number(value) if isinstance(value, float) else value for key, value in protocol.items()}
    return ", ".join(f"{key} {value}" for key, value in told.items() if key not in ("weights", "data"))
