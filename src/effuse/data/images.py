"""Read image files into one tensor: decode, transform and stack them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from effuse.core.errors import DataError
from effuse.data.files import pixel_tensor
from effuse.data.transforms import Transform, transform

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # by content; others could start programs, as PostScript does
LARGEST = 2**25  # pixels of an image before it is resized: 5,792 x 5,792
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
# Modes with palettes, transparency or print colours are converted to grey or RGB.
PLAIN_MODES = {"1": "L", "LA": "L", "La": "L", "P": "RGB", "PA": "RGB", "RGBA": "RGB", "RGBa": "RGB", "RGBX": "RGB"}
PLAIN_MODES |= {"CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # Pillow's 16-bit grey modes; it reads 16-bit colour as 8-bit


def read_image(path: Path) -> tuple[Tensor, int]:
    """One file as a 1 x C x H x W tensor and the integer that means white."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as picture:
            return image_tensor(picture, str(path))
    except FileNotFoundError:
        raise DataError(f"{path}: not found; put the image there or remove it from the table") from None
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise DataError(f"{path}: cannot be read as an image ({error}); replace or remove the file") from None


def image_tensor(picture: "Image", place: str) -> tuple[Tensor, int]:
    """A decoded picture as a 1 x C x H x W tensor and the integer that means white."""
    if picture.width * picture.height > LARGEST:
        found = f"{picture.height}x{picture.width} pixels, more than {LARGEST:,}"
        raise DataError(f"{place}: {found}; store it smaller, or as several images")
    picture.load()  # a truncated file must fail, not give grey pixels
    if picture.mode in SIXTEEN_BIT:
        wide = np.asarray(picture).astype(np.int64)
        if wide.min() < 0 or wide.max() > 65535:
            raise DataError(f"{place}: pixels from {wide.min()} to {wide.max()}; store 8 or 16 bits")
        return pixel_tensor(wide.astype(np.uint16)[None], place)
    if picture.mode in PLAIN_MODES:
        picture = picture.convert(PLAIN_MODES[picture.mode])
    if picture.mode not in ("L", "RGB"):
        raise DataError(f"{place}: pixels of mode {picture.mode}; store 8 bits grey or colour, or 16 bits grey")
    return pixel_tensor(np.array(picture)[None], place)


def stack(
    places: Sequence[str], read: Callable[[int], tuple[Tensor, int]], transforms: Sequence[Transform]
) -> tuple[Tensor, int]:
    """Read, transform and stack images; they may differ in size until the transforms are done."""

    def prepare(i: int) -> tuple[Tensor, int]:
        image, peak = read(i)
        try:
            return transform(image, transforms, peak), peak
        except DataError as error:
            raise DataError(f"{places[i]}: {error}") from None

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # decoding releases the GIL
    try:
        ready = pool.map(prepare, range(len(places)))
        first, peak = next(ready)
        images = torch.empty((len(places), *first.shape[1:]), dtype=first.dtype)
        images[0] = first[0]
        for i, (image, its_peak) in enumerate(ready, start=1):
            _check_same(places, i, (image, its_peak), (first, peak))
            images[i] = image[0]
        return images, peak
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, skip the other images


def _check_same(places: Sequence[str], i: int, this: tuple[Tensor, int], first: tuple[Tensor, int]) -> None:
    (image, peak), (other, other_peak) = this, first
    if image.shape == other.shape and peak == other_peak:
        return
    channels, height, width = image.shape[1:]
    c, h, w = other.shape[1:]
    if (height, width) != (h, w):
        remedy = "add resize(side=...) to the data's transforms"
        raise DataError(f"{places[i]}: {height}x{width} pixels, but {places[0]} has {h}x{w}; {remedy}")
    if channels != c:
        remedy = "add channels(1) or channels(3) to the data's transforms"
        raise DataError(f"{places[i]}: {channels} channels, but {places[0]} has {c}; {remedy}")
    raise DataError(f"{places[i]}: white is {peak}, but in {places[0]} it is {other_peak}; store all with one bit depth")
