"""Charts: ticks, places of points, and what is left out."""

import json
import math
import re
from html import unescape

import pytest

from effuse.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, Series, _ticks, chart


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1, 12], [0, 5, 10, 15]),
        ([1, 2], [1, 2]),
        ([0.11, 0.47], [0.1, 0.2, 0.3, 0.4, 0.5]),
        ([3.0], [1, 2, 3, 4, 5]),
        ([0.0, 0.0], [0, 1]),
        ([-2.5, 2.5], [-4, -2, 0, 2, 4]),
        ([1e-13, 2e-13], [1e-13, 1.25e-13, 1.5e-13, 1.75e-13, 2e-13]),
        ([0.9, 0.9000000000000001], [0.25, 0.5, 0.75, 1, 1.25, 1.5]),
    ],
)
def test_ticks_are_round_and_around_all_values(values, ticks):
    """Whole values have whole ticks: there is no half round."""
    assert _ticks(values) == pytest.approx(ticks, abs=0, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([0.3, 0.1 + 0.2], 2), ([1.7e308] * 2, 0), ([5e-324, 1e-323], 2), ([-1.7e308, 1.0], 1), ([-1e300, 1e300], 2)],
)
def test_every_pair_of_values_has_a_chart(values, drawn):
    """What cannot be subtracted is left out, and what is nearly the same stands still."""
    svg = chart("a", [Series("a", [Point(i, y) for i, y in enumerate(values)])], "round")
    places = points_of(svg) if svg else []
    assert len(places) == drawn and all(TOP <= y <= HEIGHT - BOTTOM for _, y, _ in places)


def points_of(svg: str) -> list:
    return json.loads(unescape(re.search(r'data-points="(.*?)"', svg)[1]))


def test_points_lie_where_their_values_say():
    """From (0, 0) at the lower left to (10, 1) at the upper right."""
    svg = chart("loss", [Series("loss", [Point(0, 0.0), Point(5, 0.5), Point(10, 1.0)])], "round")
    low, middle, high = points_of(svg)
    assert low == [LEFT, HEIGHT - BOTTOM, "round 0\n0"] and high == [WIDTH - RIGHT, TOP, "round 10\n1"]
    assert middle[:2] == [(LEFT + WIDTH - RIGHT) / 2, (HEIGHT - BOTTOM + TOP) / 2]
    assert "loss over round; loss ends at 1" in svg


def test_values_that_are_no_numbers_are_left_out():
    assert len(points_of(chart("a", [Series("a", [Point(1, math.nan), Point(2, 1.0), Point(3, math.inf)])], "round"))) == 1
    assert chart("a", [Series("a", [Point(1, math.nan)])], "round") == "" == chart("a", [], "round")


def test_long_curves_are_thinned_and_keep_their_end():
    """Of 1,000 points every fourth is drawn: 250."""
    drawn = points_of(chart("a", [Series("a", [Point(t, t) for t in range(1, 1001)])], "round"))
    assert len(drawn) == 250 and drawn[-1][2] == "round 1000\n1000"


def test_a_chart_can_begin_at_zero():
    svg = chart("bytes", [Series("up", [Point(1, 900), Point(2, 1000)])], "round", zero=True)
    assert points_of(svg)[1][1] < points_of(svg)[0][1] < (HEIGHT - BOTTOM + TOP) / 2, "900 of 1,000 is near the top"


def test_several_series_have_a_key():
    svg = chart("a", [Series("<b>", [Point(1, 1)]), Series("c", [Point(1, 2)])], "round")
    assert '<i class="key b0"></i>&lt;b&gt;</span>' in svg and points_of(svg)[0][2] == "round 1\n<b> 1"
