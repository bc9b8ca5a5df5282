"""Pages of results: their computed parts, and what in them is not what the run files say."""

import re
from collections.abc import Callable

import cifar10
import costs
import fedddpm
import feddiff
import feddiffuse
import feddifrc
import fedphd
import runs
from pictures import Picture
from text import bullets, rows

PAPERS = (feddiffuse, fedddpm, fedphd, feddiff, feddifrc)
NAMES = ("FedDiffuse", "FedDDPM", "FedPhD", "FedDiff", "FedDifRC")
MARKED = re.compile(r"<!-- computed: (.+?) -->\n.*?<!-- end -->", re.S)
ASIDE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.S)  # commands, settings and targets of links
FIGURE = re.compile(r"\d\.\d|± ?\d|\d %")


def claims() -> str:
    """Every claim of every paper, with the verdict on it."""
    body = [[name, *row] for name, paper in zip(NAMES, PAPERS, strict=True) for row in paper.claims()]
    return rows(("paper", "claim", "printed", "ours", "verdict", "scale", "more"), body)


def reasons() -> str:
    """Why some claims have no verdict."""
    return bullets(*(reason for paper in PAPERS for reason in paper.reasons()))


BLOCKS: dict[str, Callable[[], str]] = {"claims": claims, "reasons": reasons, "not run": costs.not_run}
BLOCKS |= {name: made for paper in (*PAPERS, cifar10) for name, made in paper.BLOCKS.items()}


def pictures() -> list[Picture]:
    return [paper.picture() for paper in PAPERS]


def written(page: str) -> str:
    """A page with its computed parts made anew."""
    return MARKED.sub(lambda found: f"<!-- computed: {found[1]} -->\n{BLOCKS[found[1]]()}\n<!-- end -->", page)


def by_hand(page: str) -> list[str]:
    """Lines outside the computed parts that state a figure; settings stand in backticks."""
    prose = ASIDE.sub("", MARKED.sub("", page))
    return [line for line in prose.splitlines() if FIGURE.search(line)]


def wrong(write: bool = False, draw: bool = False) -> list[str]:
    """What differs from the run files, after writing pages and drawing pictures where that is asked for."""
    runs.run.cache_clear()
    found, shown = [], set()
    for file in sorted(runs.RESULTS.glob("*.md")):
        page = file.read_text()
        shown |= {block[1] for block in MARKED.finditer(page)}
        if (new := written(page)) != page:
            if write:
                file.write_text(new)
            else:
                found.append(f"{file.name} shows other numbers")
        found += [f'{file.name} has a figure that is not computed: "{line}"' for line in by_hand(page)]
    if missing := sorted(BLOCKS.keys() - shown):
        found.append(f"no page shows {'; '.join(missing)}")
    for picture in pictures():
        if draw:
            picture.draw()
        if picture.kept() != picture.numbers:
            found.append(f"{picture.file.name} shows other numbers")
    return found
