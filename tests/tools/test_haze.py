"""Haze: a grid is read back as it was written, and the haze of its borders is added to other images."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from effuse.core.grid import grid_array
from effuse.core.metric import Images

TOOL = Path(__file__).parent.parent.parent / "tools" / "haze.py"
found = importlib.util.spec_from_file_location("haze", TOOL)
haze = importlib.util.module_from_spec(found)
found.loader.exec_module(haze)


def test_a_grid_is_read_back():
    written = np.random.default_rng(0).integers(0, 256, (9, 28, 28)).astype(np.uint8)
    picture = grid_array(Images(torch.from_numpy(written)[:, None] / 127.5 - 1))
    assert (haze.tiles(picture[..., 0]) == written).all()


def test_other_pictures_are_refused_in_a_sentence(tmp_path):
    Image.fromarray(np.zeros((30, 61), np.uint8)).save(tmp_path / "other.png")
    (tmp_path / "words.png").write_text("no picture")
    for name, words in (
        ("other.png", "61x30 pixels are not a grid"),
        ("words.png", "no picture"),
        ("none.png", "No such file"),
    ):
        with pytest.raises(SystemExit, match=words):
            haze.opened(tmp_path / name)
    Image.fromarray(np.full((60, 118), 7, np.uint8)).save(tmp_path / "two.png")
    assert haze.opened(tmp_path / "two.png").shape == (2, 28, 28)


def test_borders_are_the_pixels_outside_of_the_middle():
    """28 x 28 without the 22 x 22 in the middle: 300 pixels."""
    images = np.zeros((2, 28, 28), np.uint8)
    images[1, 3:-3, 3:-3] = 255
    assert haze.borders(images).shape == (2, 300) and not haze.borders(images).any()
    images[1, 2, 5] = 7
    assert haze.borders(images)[1].sum() == 7


def test_a_haze_is_added_and_never_wraps():
    """A border of 20 turns black into 20 and leaves white; a border of two values adds both."""
    images = np.stack([np.zeros((28, 28)), np.full((28, 28), 250)]).astype(np.uint8)
    grey = haze.hazed(images, np.full((1, 300), 20, np.uint8), np.random.default_rng(0))
    assert (grey[0] == 20).all() and (grey[1] == 255).all()
    two = haze.hazed(images[:1], np.array([[0, 30]], np.uint8), np.random.default_rng(0))
    assert {*two.flatten()} == {0, 30}
