"""What a faint haze costs in FID: of grids of MNIST samples, as runs keep them.

    EFFUSE_DATA=DATA python tools/haze.py runs/RUN/samples/round-00030.png ...

For each grid: its tones (the share of pixels of another brightness than real ones); the kernel distance of its images to real ones, as
they are and clipped (all below mid-grey black in both, which leaves no haze); and the FID of real images that were given the haze of its
borders, where digits have no ink, beside that of the same real images without it.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from effuse.core.errors import EffuseError
from effuse.core.metric import Subject
from effuse.data.idx import MNIST
from effuse.metrics.distances import frechet, kernel_distance, moments
from effuse.metrics.encoders import Inception, stored
from effuse.metrics.tones import apart, shares
from effuse.runs.grid import MARGIN, SHOWN_SIDE

SIDE, BORDER = 28, 3


def opened(path: Path) -> np.ndarray:
    """The images of a grid; what is none is refused."""
    try:
        picture = np.asarray(Image.open(path).convert("L"))
    except OSError as error:
        sys.exit(
            f"{path}: {error.strerror or 'no picture'}; name a grid of samples, such as runs/RUN/samples/round-00030.png"
        )
    step = SIDE * round(SHOWN_SIDE / SIDE) + MARGIN
    if any((length - MARGIN) % step for length in picture.shape):
        sys.exit(
            f"{path}: {picture.shape[1]}x{picture.shape[0]} pixels are no grid of {SIDE}x{SIDE} images as a run on MNIST keeps it"
        )
    return tiles(picture)


def tiles(picture: np.ndarray) -> np.ndarray:
    """The images of a grid, N x 28 x 28 uint8; a last row that is not full ends in white ones."""
    scale = round(SHOWN_SIDE / SIDE)
    step = SIDE * scale + MARGIN
    corners = [range(MARGIN, length - MARGIN, step) for length in picture.shape]
    return np.stack(
        [picture[y : y + SIDE * scale : scale, x : x + SIDE * scale : scale] for y in corners[0] for x in corners[1]]
    )


def borders(images: np.ndarray) -> np.ndarray:
    """The pixels of each image's outermost rows and columns."""
    outer = np.ones((SIDE, SIDE), bool)
    outer[BORDER:-BORDER, BORDER:-BORDER] = False
    return images[:, outer]


def hazed(images: np.ndarray, grounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every image with pixels of some one border added to all of its own."""
    added = np.stack([rng.choice(grounds[rng.integers(len(grounds))], (SIDE, SIDE)) for _ in images])
    return np.clip(images.astype(np.int64) + added, 0, 255).astype(np.uint8)


def looked_at(grids: dict[Path, np.ndarray], reference: int, n: int) -> Iterator[tuple[str, ...]]:
    """A row of the table for every grid, after that of real images."""
    data = MNIST().load("train")
    subject = Subject(train=data, test=data, data="mnist()", device=torch.device("cpu"), samples=lambda n: None)  # type: ignore[arg-type,return-value]
    real = data.images[:, 0].numpy()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(real))
    known, plain = real[order[:reference]], real[order[reference : reference + n]]
    tones = shares(data.images)

    def features(images: np.ndarray, clipped: bool = False) -> Tensor:
        pixels = data.floats(torch.from_numpy(images.copy())[:, None])
        return Inception().encode(stored(pixels, clipped), subject).features

    theirs, dark = features(known), features(known, clipped=True)
    gaussian = moments(theirs)

    def row(name: str, images: np.ndarray, haze: np.ndarray) -> tuple[str, ...]:
        near = kernel_distance(features(images), theirs), kernel_distance(features(images, clipped=True), dark)
        score = apart(shares(torch.from_numpy(images)[:, None]), tones)
        return name, f"{score:.3f}", *(f"{d:.4f}" for d in near), f"{frechet(moments(features(haze)), gaussian):.1f}"

    yield row("real images", plain[:100], plain)
    for path, images in grids.items():
        yield row(str(path), images, hazed(plain, borders(images), rng))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", type=Path, nargs="+", help="pictures of samples of a run on MNIST")
    parser.add_argument("--reference", type=int, default=3000, help="real images to compare with")
    parser.add_argument("--images", type=int, default=1500, help="other real images, to be hazed")
    asked = parser.parse_args()
    grids = {path: opened(path) for path in asked.grids}
    try:
        Inception().ready()
        found = looked_at(grids, asked.reference, asked.images)
        first = next(found)
    except EffuseError as error:
        sys.exit(str(error))
    print("grid", "tones", "KID", "KID, clipped", "FID of real images with its haze", sep="\t")
    for row in itertools.chain([first], found):
        print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
