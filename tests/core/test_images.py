"""Images as pictures of their own, and all in one."""

import io

import numpy as np
import torch
from PIL import Image

from effuse.core.metric import Images

# two images of 2x2 pixels: black, and white in its first pixel
PAIR = Images(torch.tensor([[[[-1.0, -1.0], [-1.0, -1.0]]], [[[1.0, -1.0], [-1.0, -1.0]]]]))


def test_a_grid_is_a_picture_with_every_image(tmp_path):
    """Two images side by side, each pixel repeated 32 times, with margins of two: 2 + 2 (64 + 2) = 134 wide, 68 high."""
    grid = PAIR.grid()
    assert grid.size == (134, 68)
    pixels = np.asarray(grid)
    assert (pixels[2:66, 2:66] == 0).all() and (pixels[2:34, 68:100] == 255).all() and (pixels[34:66, 68:132] == 0).all()
    PAIR.save(tmp_path / "a" / "grid.png")
    assert (np.asarray(Image.open(tmp_path / "a" / "grid.png")) == pixels).all()
    assert (np.asarray(Image.open(io.BytesIO(PAIR._repr_png_()))) == pixels).all()


def test_every_image_is_a_picture_of_its_own():
    """Grey and coloured ones."""
    first, second = PAIR.pil()
    assert first.mode == "L" and np.asarray(second).tolist() == [[255, 0], [0, 0]] and first.size == (2, 2)
    assert Images(torch.zeros(1, 3, 4, 4)).pil()[0].mode == "RGB"
