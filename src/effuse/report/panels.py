"""Pictures of features as SVG that loads nothing: panels of points with a key, and rows of maps beside their images."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from effuse.report.html import text

# seven colours that colour-blind people tell apart (Okabe and Ito), times five shapes: neighbours differ in both
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
SHAPES = (
    "M{0} {1}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "M{0} {1}m-2.6 -2.6h5.2v5.2h-5.2z",
    "M{0} {1}m0 -3.4l3.2 5.8h-6.4z",
    "M{0} {1}m0 -3.8l3.2 3.8l-3.2 3.8l-3.2 -3.8z",
    "M{0} {1}m-1 -3h2v2h2v2h-2v2h-2v-2h-2v-2h2z",
)
MARKS = len(COLOURS) * len(SHAPES)
SIDE, GAP, LINE, EDGE = 200, 14, 16, 8  # of a panel, between panels, of text, of the picture, in pixels
LETTER = 6.6  # the usual width of a letter


class Panel(NamedTuple):
    """A title, and a place for each image."""

    title: str
    places: np.ndarray  # images x 2


def scatter(
    title: str, panels: Sequence[Panel], across: int, groups: Sequence[int], names: Sequence[str], notes: Sequence[str]
) -> str:
    """Panels of the same images, `across` in a line, each with the marks of its group, and a key to the groups."""
    width = max(EDGE * 2 + across * SIDE + (across - 1) * GAP, 2 * SIDE + 2 * EDGE)
    marks: list[str] = []
    top = EDGE + 2 * LINE
    for k, panel in enumerate(panels):
        x = float(EDGE + (k % across) * (SIDE + GAP))
        y = top + (k // across) * (SIDE + LINE + GAP) + LINE
        marks += [_words(x, y - 4, panel.title), f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" class="frame"/>']
        low, high = panel.places.min(0), panel.places.max(0)
        inside = (panel.places - low) / np.where(high > low, high - low, 1.0)
        for (right, up), group in zip(inside, groups):
            marks.append(mark(group, x + 6 + right * (SIDE - 12), y + SIDE - 6 - up * (SIDE - 12)))
    bottom: float = top + -(-len(panels) // across) * (SIDE + LINE + GAP) + LINE
    keys, bottom = _key(names, sorted(set(groups)), bottom, width)
    return _picture(title, notes, [*marks, *keys], width, bottom)


def mark(group: int, x: float, y: float) -> str:
    """The mark of a group at a place."""
    return f'<path fill="{COLOURS[group % len(COLOURS)]}" d="{SHAPES[group % len(SHAPES)].format(f"{x:.1f}", f"{y:.1f}")}"/>'


def maps(title: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[np.ndarray]]], notes: Sequence[str]) -> str:
    """A row for each image: its name, then squares of colours (side x side x 3 bytes) under the titles in `head`."""
    tile, left = SIDE // 2, EDGE + round(LETTER * max(len(name) for name, _ in rows)) + GAP
    width, top = left + len(head) * (tile + GAP) + EDGE, EDGE + 4 * LINE
    marks = []
    for k, words in enumerate(head):
        first, _, second = words.partition(", ")
        marks += [_words(left + k * (tile + GAP), top - LINE - 4, first), _words(left + k * (tile + GAP), top - 4, second)]
    for i, (name, squares) in enumerate(rows):
        y = top + i * (tile + GAP)
        marks.append(_words(EDGE, y + tile / 2, name))
        for k, square in enumerate(squares):
            place = f'x="{left + k * (tile + GAP)}" y="{y}" width="{tile}" height="{tile}"'
            marks.append(f'<image {place} style="image-rendering:pixelated" href="data:image/png;base64,{png(square)}"/>')
    return _picture(title, notes, marks, width, top + len(rows) * (tile + GAP) + LINE)


def png(square: np.ndarray) -> str:
    """An image of bytes as PNG in base64."""
    found = io.BytesIO()
    Image.fromarray(square).save(found, "PNG")
    return base64.b64encode(found.getvalue()).decode()


def _key(names: Sequence[str], shown: Sequence[int], y: float, width: float) -> tuple[list[str], float]:
    """The marks with their names in lines, and where they end."""
    found, x = [], float(EDGE)
    for group in shown:
        wide = 14 + LETTER * len(names[group]) + GAP
        if x > EDGE and x + wide > width - EDGE:
            x, y = EDGE, y + LINE
        found += [mark(group, x + 5, y - 4), _words(x + 14, y, names[group])]
        x += wide
    return found, y + LINE


def _words(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{text(words)}</text>'


def _picture(title: str, notes: Sequence[str], marks: Sequence[str], width: float, bottom: float) -> str:
    """The SVG with its title above and notes below, on white."""
    longest = max(len(line) for line in (title, *notes))
    width = max(width, round(2 * EDGE + LETTER * longest))
    lines = [_words(EDGE, bottom + LINE * (i + 1), note) for i, note in enumerate(notes)]
    height = bottom + LINE * (len(notes) + 1)
    style = "<style>text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.frame{fill:none;stroke:#bbb}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>{text(title)}</title><desc>{text(" ".join(notes))}</desc>{style}\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        + _words(EDGE, EDGE + LINE, title, ' class="title"')
        + "\n\n".join([*marks, *lines])
        + "\n</svg>\n"
    )
