"""Who holds what: clients by classes, as a table whose cells are coloured."""

import dataclasses
from collections.abc import Sequence

from effuse.report.html import scrolled, text
from effuse.runs.records import Split

SHADES = 6
FEWEST = 10  # a cell with fewer images is not told in a public page
HIDDEN = -1


def suppressed(split: Split) -> Split:
    """The same without small cells, and without the numbers of groups."""
    labels = [[n if n >= FEWEST else HIDDEN for n in row] for row in split.labels]
    return dataclasses.replace(split, labels=labels, groups=None)


def heat(split: Split, classes: Sequence[str]) -> str:
    """A row for each client, with its size."""
    most = max((n for row in split.labels for n in row), default=1) or 1
    head = ["client", "images", *(["groups"] if split.groups else []), *classes]
    top = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    rows = []
    for i, (client, row) in enumerate(zip(split.clients, split.labels)):
        groups = f"<td>{split.groups[i]:,}</td>" if split.groups else ""
        cells = "".join(f'<td class="s{shade(n, most)}">{text(told(n))}</td>' for n in row)
        rows.append(f'<tr><th scope="row">{client}</th><td>{text(size(row))}</td>{groups}{cells}</tr>')
    made = f'<table class="heat"><thead><tr>{top}</tr></thead>\n<tbody>\n' + "\n".join(rows) + "\n</tbody></table>"
    return scrolled(made, "images of each client and class")


def size(row: Sequence[int]) -> str:
    """A client's number of images; at least how many where cells are hidden, since the sum would tell a single one."""
    known = sum(n for n in row if n != HIDDEN)
    return f"{known:,} or more" if HIDDEN in row else f"{known:,}"


def told(n: int) -> str:
    """The words of a cell."""
    return f"<{FEWEST}" if n == HIDDEN else f"{n:,}"


def shade(n: int, most: int) -> int:
    """How dark a cell is, from 0 for none."""
    return 0 if n <= 0 else 1 + min(SHADES - 2, int((n / most) ** 0.5 * (SHADES - 1)))
