"""Who would hold what, before anything runs."""

import re

from toy import ToyImages, toy_recipe

from effuse.report.heat import HIDDEN, heat, shade, size, suppressed, told
from effuse.report.partition import Division
from effuse.runs.records import Split


def test_a_division_is_the_runs_own(run):
    """The toy's 40 images are dealt 14, 13 and 13, and the run wrote the same counts."""
    from effuse.runs.folder import RunFolder

    division = Division.of(toy_recipe(), "toy")
    assert [sum(row) for row in division.split.labels] == [14, 13, 13]
    assert division.split == RunFolder(run).read_split()
    html = division.page()
    assert "40 images in 2 classes, 3 clients: the smallest has 13 images, the largest 14." in html
    cells = re.findall(r'<td class="s\d">(\d+)</td>', html)
    assert [int(n) for n in cells] == [n for row in division.split.labels for n in row]


def test_nothing_is_computed_but_labels(monkeypatch):
    monkeypatch.setattr("effuse.core.model.Arch.build", None)
    assert len(Division.of(toy_recipe(data=ToyImages(n=9)), "toy").split.labels) == 3


def test_small_cells_are_suppressed():
    split = suppressed(Split([[9, 10, 0], [10, 11, 12]], [1, 2]))
    assert split == Split([[HIDDEN, 10, HIDDEN], [10, 11, 12]])
    assert [size(row) for row in split.labels] == ["10 or more", "33"]
    assert told(HIDDEN) == "<10" and told(1234) == "1,234"
    assert "&lt;10" in heat(split, ["a", "b", "c"])


def test_shades_rise_with_the_images():
    """None is shade 0, one image at least 1, the most 5; the root tells small numbers apart."""
    assert [shade(n, 100) for n in (0, 1, 4, 16, 36, 64, 100)] == [0, 1, 2, 3, 4, 5, 5]
    assert shade(HIDDEN, 100) == 0
