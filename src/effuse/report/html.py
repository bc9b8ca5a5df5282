"""Pieces of HTML: whatever is written into them appears as text."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from effuse.core.errors import shown
from effuse.report.script import SCRIPT
from effuse.report.style import STYLE

LONG = 60  # characters of a cell that needs room


def text(words: object) -> str:
    """Words of any origin, as text that no reader takes for markup or for control characters."""
    return escape(shown(str(words)))


def document(title: str, parts: Sequence[str], interactive: bool = False) -> str:
    """An HTML document which loads nothing; an interactive one runs our script and no other."""
    script = f"<script>{SCRIPT}</script>" if interactive else ""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    policy += f"; script-src 'sha256-{digest}'" if interactive else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f"\n</main>\n{script}\n</body>\n</html>\n"
    )


def section(title: str, *parts: str, attributes: str = "") -> str:
    """A part of a page with its heading; nothing where there are no parts."""
    inner = "\n".join(filter(None, parts))
    name = "".join(c if c.isalnum() else "-" for c in title.lower())
    return (
        f'<section aria-labelledby="{name}" {attributes}>\n<h2 id="{name}">{text(title)}</h2>\n{inner}\n</section>'
        if inner
        else ""
    )


def paragraph(words: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


class Cell(str):
    """A cell that sorts by a number which its words round."""

    value: float

    def __new__(cls, words: str, value: float) -> "Cell":
        made = super().__new__(cls, words)
        made.value = value
        return made


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), name: str = "") -> str:
    """Rows of text; one with a name can be sorted, and scrolls within itself."""
    numeric = [bool(rows) and all(_number(row[i]) for row in rows) for i in range(len(head))] if name else []
    kinds = [' class="n"' if right else "" for right in numeric] or [""] * len(head)
    top = "<thead><tr>" + "".join(f"<th{kind}>{text(cell)}</th>" for kind, cell in zip(kinds, head)) + "</tr></thead>\n"
    body = "\n".join("<tr>" + "".join(_cell(cell, bool(name)) for cell in row) + "</tr>" for row in rows)
    made = f"{top if head else ''}<tbody>\n{body}\n</tbody>\n</table>"
    return scrolled(f'<table class="sorted">\n{made}', name) if name else f"<table>\n{made}"


def scrolled(inner: str, name: str) -> str:
    """A wide or long part, which scrolls within itself."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">\n{inner}\n</div>'


def _cell(cell: object, sortable: bool) -> str:
    kind = "n" if sortable and _number(cell) else "long" if sortable and len(str(cell)) > LONG else ""
    value = cell.value if isinstance(cell, Cell) else cell if isinstance(cell, int) else None
    shown = f"{cell:,}" if isinstance(cell, int) else cell
    attributes = (f' class="{kind}"' if kind else "") + (f' data-v="{value!r}"' if sortable and value is not None else "")
    return f"<td{attributes}>{text(shown)}</td>"


def _number(cell: object) -> bool:
    return isinstance(cell, (int, float, Cell)) or cell == "-"


def picture(png: bytes, words: str) -> str:
    """A PNG within the page."""
    return f'<img alt="{text(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def embedded(value: Any) -> str:
    """A value as JSON within a page, where nothing in it can end its element."""
    blob = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return blob.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
