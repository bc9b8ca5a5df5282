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
    if images.labels is None:
        columns = columns or math.ceil(math.sqrt(len(pixels)))
        places = list(range(len(pixels)))
    else:
        places, columns = _by_class(images.labels)
    scale = max(1, round(SHOWN_SIDE / pixels.shape[-1]))
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
    tiles = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1).numpy()
    side, rows = tiles.shape[1] + MARGIN, max(places, default=-1) // columns + 1
    canvas = np.full((rows * side + MARGIN, columns * side + MARGIN, 3), 255, np.uint8)
    for place, tile in zip(places, tiles):
        top, left = MARGIN + place // columns * side, MARGIN + place % columns * side
        canvas[top : top + side - MARGIN, left : left + side - MARGIN] = tile
    return canvas


def _by_class(labels: torch.Tensor) -> tuple[list[int], int]:
    """The place of every image along the rows, and the columns: a row for each class, or more if classes are few."""
    present, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    most = int(counts.max()) if len(counts) else 1
    rows = max(1, round(math.sqrt(most / max(1, len(present)))))  # of each class, so that the picture is nearly square
    columns = math.ceil(most / rows)
    seen, places = [0] * len(present), []
    for kind in inverse.tolist():
        places.append(kind * rows * columns + seen[kind])
        seen[kind] += 1
    return places, columns


def save_grid(images: "Images", path: Path) -> None:
    """Write the grid as a PNG."""
    from PIL import Image

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid_array(images)).save(path)
