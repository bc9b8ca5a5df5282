"""Pictures of samples, with one row per class if there are labels."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from effuse.core.files import writing

if TYPE_CHECKING:
    from effuse.core.metric import Images

MARGIN = 2
SHOWN_SIDE = 64  # small images are enlarged to about this many pixels by repeating pixels


def grid_array(images: "Images", columns: int | None = None) -> np.ndarray:
    """The images side by side, H x W x 3 uint8; those without labels in so many columns, or in a square."""
    pixels = images.bytes()
    if images.labels is not None:
        order = torch.sort(images.labels, stable=True).indices
        pixels = pixels[order]
        columns = max(1, int(torch.bincount(images.labels).max()))
    else:
        columns = columns or math.ceil(math.sqrt(len(pixels)))
    scale = max(1, round(SHOWN_SIDE / pixels.shape[-1]))
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
    tiles = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1).numpy()
    side, rows = tiles.shape[1] + MARGIN, math.ceil(len(tiles) / columns)
    canvas = np.full((rows * side + MARGIN, columns * side + MARGIN, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = MARGIN + i // columns * side, MARGIN + i % columns * side
        canvas[top : top + side - MARGIN, left : left + side - MARGIN] = tile
    return canvas


def save_grid(images: "Images", path: Path) -> None:
    """Write the grid as a PNG."""
    from PIL import Image

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid_array(images)).save(path)
