"""Write the tables and pictures of docs/results from the run files beside them.

    python tools/results            # the tables
    python tools/results --draw     # and the pictures; needs matplotlib
    python tools/results --check    # change nothing; fail where a page or a picture shows other numbers than the files

A table stands in its page between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import re
from collections.abc import Callable
from functools import partial

import claims
import tables
from costs import not_run
from pictures import pictures
from runs import RESULTS

TABLES: dict[str, Callable[[], str]] = {
    "claims of FedDiffuse": claims.feddiffuse,
    "claims of FedDDPM": claims.fedddpm,
    "claims of FedPhD": claims.fedphd,
    "claims of FedDiff": claims.feddiff,
    "claims of FedDifRC": claims.feddifrc,
    "not run": not_run,
    "feddiffuse.ablation": tables.feddiffuse,
    "fedddpm.comparison, shards": partial(tables.fedddpm, "shard"),
    "fedddpm.comparison, Dirichlet": partial(tables.fedddpm, "dir0.1"),
    "fedphd.comparison": tables.fedphd,
    "feddiff.digits": tables.digits,
    "feddiff.private_comparison": tables.private,
    "nearest means": tables.bars,
    "feddifrc.digits, Dirichlet": partial(tables.feddifrc, "dirichlet"),
    "feddifrc.digits, NID2": partial(tables.feddifrc, "nid2"),
}
MARKED = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end -->", re.S)


def written(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the pictures too")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args()
    wrong, shown = [], set()
    for file in sorted(RESULTS.glob("*.md")):
        page = file.read_text()
        shown |= {found[1] for found in MARKED.finditer(page)}
        if (new := written(page)) != page:
            wrong.append(file.name)
            if not asked.check:
                file.write_text(new)
    for picture in pictures():
        if asked.draw:
            picture.draw()
        if picture.kept() != picture.numbers:
            wrong.append(picture.file.name)
    if missing := TABLES.keys() - shown:
        wrong.append(f"no page shows {', '.join(sorted(missing))}")
    if asked.check and wrong:
        raise SystemExit(f"not what the run files say: {', '.join(wrong)}; python tools/results --draw")


if __name__ == "__main__":
    main()
