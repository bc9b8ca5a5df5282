"""Pictures of samples: near-square, the images of each class together and under its name."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from effuse.core.errors import shown
from effuse.core.files import writing

if TYPE_CHECKING:
    from effuse.core.metric import Images

MARGIN = 2
LETTER = 6  # pixels of a letter of a name, about
TITLE = 14  # pixels above the images of a class, for its name
SHOWN_SIDE = 64  # small images are enlarged to about this many pixels by repeating pixels
NOISE = 0.15  # mean correlation of neighbouring pixels, below which images are close to noise


def grid_array(images: "Images", columns: int | None = None, classes: Sequence[str] = ()) -> np.ndarray:
    """The images side by side, H x W x 3 uint8; without labels in so many columns, or in a square."""
    tiles = _tiles(images)
    side = tiles.shape[1] + MARGIN
    if images.labels is None:
        return _block(tiles, columns or math.ceil(math.sqrt(len(tiles))))
    parts = [(int(k), tiles[(images.labels == k).numpy()]) for k in images.labels.unique()]
    most, title = max(len(part) for _, part in parts), TITLE if classes else 0
    names = [classes[label] if label < len(classes) else str(label) for label, _ in parts] if classes else []
    across, columns = _layout(len(parts), most, side, title, [len(name) * LETTER for name in names])
    height, width = MARGIN + math.ceil(most / columns) * side + title, MARGIN + columns * side
    canvas = np.full((math.ceil(len(parts) / across) * height, across * width, 3), 255, np.uint8)
    for i, (_, part) in enumerate(parts):
        top, left = i // across * height, i % across * width
        block = _block(part, columns)
        if classes:
            canvas[top : top + title, left : left + width] = _name(names[i], width)
        canvas[top + title : top + title + block.shape[0], left : left + block.shape[1]] = block
    return canvas


def _layout(classes: int, most: int, side: int, title: int, names: Sequence[int] = ()) -> tuple[int, int]:
    """How many classes stand side by side, and in how many columns the images of each.

    The picture is the squarest one, unless that cuts off much of the names, whose widths are given.
    """

    def stretched(choice: tuple[int, int]) -> float:
        across, columns = choice
        height = math.ceil(classes / across) * (math.ceil(most / columns) * side + title)
        empty = (-most % columns) * classes + (-classes % across) * columns
        cut = sum(max(0.0, 1 - columns * side / name) for name in names if name) / classes
        return abs(math.log(height / (across * columns * side))) + empty / (classes * most) + cut

    # a row for each class, where that is square enough, is the easiest to read
    if stretched((1, most)) < math.log(2):
        return 1, most
    return min(((a, c) for a in range(1, classes + 1) for c in range(1, min(most, 100) + 1)), key=stretched)


def _tiles(images: "Images") -> np.ndarray:
    pixels = images.bytes()
    scale = max(1, round(SHOWN_SIDE / pixels.shape[-1]))
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
    tiles: np.ndarray = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1).numpy()
    return tiles


def _block(tiles: np.ndarray, columns: int) -> np.ndarray:
    side, rows = tiles.shape[1] + MARGIN, math.ceil(len(tiles) / columns)
    canvas = np.full((rows * side + MARGIN, columns * side + MARGIN, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = MARGIN + i // columns * side, MARGIN + i % columns * side
        canvas[top : top + side - MARGIN, left : left + side - MARGIN] = tile
    return canvas


def _name(name: str, width: int) -> np.ndarray:
    """The name of a class as pixels, as much of it as there is room for."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (width, TITLE), "white")
    ImageDraw.Draw(strip).text((MARGIN, 1), shown(name, 200), fill="black")
    return np.asarray(strip)


def save_grid(images: "Images", path: Path, classes: Sequence[str] = ()) -> None:
    """Write the grid as a PNG."""
    from PIL import Image

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid_array(images, classes=classes)).save(path)


def too_young(images: "Images") -> str | None:
    """A note on images that are close to noise: neighbouring pixels hardly agree, as they do in any picture."""
    x = images.pixels.double()
    x = x - x.mean((2, 3), keepdim=True)
    if x.shape[-1] < 2 or not (power := x.square().mean()):
        return None
    beside = ((x[..., 1:] * x[..., :-1]).mean() + (x[..., 1:, :] * x[..., :-1, :]).mean()) / 2
    agreement = float(beside / power)
    if agreement >= NOISE or not torch.isfinite(beside):
        return None
    return f"these images are close to noise (neighbours correlate by {agreement:.2f}): the model needs more training"
