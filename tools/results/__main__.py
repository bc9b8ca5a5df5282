"""Write the computed parts of docs/results from the run files beside the pages.

    python tools/results            # the pages
    python tools/results --draw     # and the pictures; needs matplotlib
    python tools/results --check    # change nothing; fail where a page or a picture shows other numbers than the files

A computed part stands in its page between `<!-- computed: NAME -->` and `<!-- end -->`.
Outside of these parts a page states no figures. Settings stand in backticks.
"""

import argparse

from pages import wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the pictures too")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args()
    if found := wrong(write=not asked.check, draw=asked.draw):
        remedy = "run `python tools/results --draw`; move a figure in prose to a computed part"
        raise SystemExit("\n".join([*found, remedy]))


if __name__ == "__main__":
    main()
