"""Grids of samples are near-square, with the names of classes, and noise is told from pictures."""

import numpy as np
import pytest
import torch

from effuse.core.grid import MARGIN, TITLE, grid_array, too_young
from effuse.core.metric import Images
from effuse.data.sources import Digits


def grey(classes: int, each: int, side: int = 64) -> Images:
    """Images of class k whose value is k / classes."""
    labels = torch.arange(classes * each) % classes
    return Images((labels / classes)[:, None, None, None].expand(-1, 1, side, side), labels)


@pytest.mark.parametrize(("classes", "each"), [(2, 50), (10, 10), (10, 2), (3, 200), (1, 20), (100, 1), (7, 3)])
def test_grids_are_near_square(classes, each):
    """Two classes of 50 images were a strip of 2 to 50."""
    height, width, _ = grid_array(grey(classes, each), classes=[f"class {k}" for k in range(classes)]).shape
    assert 0.5 < height / width < 2


def test_each_class_has_a_block_under_its_name():
    """Four classes of four images, 8 pixels shown as 64: a row each is square, and 66 + 2 + 14 pixels high."""
    picture = grid_array(grey(4, 4), classes=["cat", "dog", "\x1b[2J", "x" * 500])
    row = MARGIN + 64 + MARGIN + TITLE
    assert picture.shape == (4 * row, MARGIN + 4 * (64 + MARGIN), 3)
    for k in range(4):
        tops = picture[k * row : k * row + TITLE]
        assert tops.min() < 128 and tops.max() == 255, "a name is written"
        pixels = picture[k * row + TITLE + MARGIN : (k + 1) * row - MARGIN, MARGIN:-MARGIN:66]
        assert (pixels == round((k / 4 + 1) * 127.5)).all(), "only images of this class are below it"
    names = [picture[k * row : k * row + TITLE] for k in range(4)]
    assert (names[0] != names[1]).any()


def test_long_names_have_room():
    """Nine classes of five: columns of one image, the squarest picture, would cut names of 36 letters to a third."""
    images, rows = grey(9, 5), 2 * 66 + MARGIN + TITLE
    assert grid_array(images, classes=["x"] * 9).shape[1] == 8 * (66 + MARGIN)
    assert grid_array(images, classes=["x" * 36] * 9).shape == (3 * rows, 3 * (3 * 66 + MARGIN), 3)


def test_without_names_or_labels():
    plain = grid_array(Images(torch.zeros(9, 3, 64, 64)))
    assert plain.shape == (3 * 66 + 2, 3 * 66 + 2, 3)
    assert grid_array(grey(4, 4)).shape == (4 * 68, 4 * 66 + 2, 3)
    assert grid_array(grey(3, 3), classes=["only one"]).shape[2] == 3, "a class without a name has its number"


def test_noise_is_told_from_pictures():
    noise = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (20, 1, 16, 16)))
    assert "close to noise (neighbours correlate by" in too_young(Images(noise.float()))
    digits = Digits().load("test")
    assert too_young(Images(digits.floats(digits.images))) is None
    assert too_young(Images(torch.zeros(3, 1, 4, 4))) is None, "flat images have nothing to correlate"
