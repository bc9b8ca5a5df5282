"""Measure the effect of a faint haze on FID, from grids of MNIST samples.

    EFFUSE_DATA=DATA python tools/haze.py runs/RUN/samples/round-00030.png ...

For each grid it prints three measures. "tones" is the share of pixels whose brightness differs from real ones. "KID" is
the kernel distance to real images, as they are and clipped (everything below mid-grey is black, which removes haze). The
last is the FID of real images to which the haze of the grid's borders, where digits have no ink, was added; the first row
has none.
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
from effuse.core.grid import MARGIN, SHOWN_SIDE
from effuse.core.metric import Subject
from effuse.data.idx import MNIST
from effuse.metrics.distances import frechet, kernel_distance, moments
from effuse.metrics.encoders import Inception, stored
from effuse.metrics.tones import apart, shares

SIDE, BORDER = 28, 3


def opened(path: Path) -> np.ndarray:
    """The images of a grid; exits if the file is not one."""
    try:
        picture = np.asarray(Image.open(path).convert("L"))
    except OSError as error:
        sys.exit(
            f"{path}: {error.strerror or 'no picture'}; name a grid of samples, such as runs/RUN/samples/round-00030.png"
        )
    step = SIDE * round(SHOWN_SIDE / SIDE) + MARGIN
    if any((length - MARGIN) % step for length in picture.shape):
        sys.exit(
            f"{path}: {picture.shape[1]}x{picture.shape[0]} pixels are not a grid of {SIDE}x{SIDE} images of a run on MNIST"
        )
    return tiles(picture)


def tiles(picture: np.ndarray) -> np.ndarray:
    """The images of a grid, N x 28 x 28 uint8; an incomplete last row ends in white images."""
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


def hazed(images: np.ndarray, backgrounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Images with haze: adds to each pixel of an image a random pixel of one random background."""
    added = np.stack([rng.choice(backgrounds[rng.integers(len(backgrounds))], (SIDE, SIDE)) for _ in images])
    return np.clip(images.astype(np.int64) + added, 0, 255).astype(np.uint8)


def measured(grids: dict[Path, np.ndarray], reference: int, n: int) -> Iterator[tuple[str, ...]]:
    """The rows of the table: real images, then every grid."""
    data = MNIST().load("train")
    subject = Subject(train=data, test=data, data="mnist()", device=torch.device("cpu"), samples=lambda n: None)  # type: ignore[arg-type,return-value]
    real = data.images[:, 0].numpy()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(real))
    references, plain = real[order[:reference]], real[order[reference : reference + n]]
    tones = shares(data.images)

    def features(images: np.ndarray, clipped: bool = False) -> Tensor:
        pixels = data.floats(torch.from_numpy(images.copy())[:, None])
        return Inception().encode(stored(pixels, clipped), subject).features

    real_features, real_clipped = features(references), features(references, clipped=True)
    gaussian = moments(real_features)

    def row(name: str, images: np.ndarray, haze: np.ndarray) -> tuple[str, ...]:
        distances = (
            kernel_distance(features(images), real_features),
            kernel_distance(features(images, clipped=True), real_clipped),
        )
        score = apart(shares(torch.from_numpy(images)[:, None]), tones)
        return name, f"{score:.3f}", *(f"{d:.4f}" for d in distances), f"{frechet(moments(features(haze)), gaussian):.1f}"

    yield row("real images", plain[:100], plain)
    for path, images in grids.items():
        yield row(str(path), images, hazed(plain, borders(images), rng))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", type=Path, nargs="+", help="sample grids of a run on MNIST")
    parser.add_argument("--reference", type=int, default=3000, help="real images to compare with")
    parser.add_argument("--images", type=int, default=1500, help="other real images, to which haze is added")
    arguments = parser.parse_args()
    grids = {path: opened(path) for path in arguments.grids}
    try:
        Inception().ready()
        found = measured(grids, arguments.reference, arguments.images)
        first = next(found)
    except EffuseError as error:
        sys.exit(str(error))
    print("grid", "tones", "KID", "KID, clipped", "FID of real images with its haze", sep="\t")
    for row in itertools.chain([first], found):
        print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
