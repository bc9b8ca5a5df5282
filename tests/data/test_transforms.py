"""Transforms on hand-made images."""

import pytest
import torch

from effuse.core.build import build_text
from effuse.core.errors import DataError, RecipeError
from effuse.data.transforms import CHUNK, Channels, Crop, Flip, Pad, Resize, Shift, Transform, prepared, transform

SQUARE = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)


def test_resize_halves_with_antialiasing_and_rounds():
    """Halving 0 0 255 255: the triangle is two pixels wide, weights 0.75 0.75 0.25, so 255 * 0.25 / 1.75 = 36.4."""
    image = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).view(1, 1, 1, 4).expand(1, 1, 4, 4)
    assert Resize(side=2).apply(image, 255)[0, 0].tolist() == [[36, 219], [36, 219]]


def test_resize_leaves_the_right_size_alone():
    assert Resize(side=4).apply(SQUARE, 255) is SQUARE


def test_resize_makes_images_square():
    assert Resize(side=8).apply(torch.zeros(2, 3, 4, 6, dtype=torch.uint8), 255).shape == (2, 3, 8, 8)


def test_crop_takes_the_middle():
    assert Crop(side=2).apply(SQUARE, 255)[0, 0].tolist() == [[5, 6], [9, 10]]


def test_crop_without_a_side_takes_the_largest_square():
    """CelebA's 218x178: 20 rows go at the top and at the bottom."""
    image = torch.arange(218, dtype=torch.int32).view(1, 1, 218, 1).expand(1, 1, 218, 178)
    cropped = Crop().apply(image, 65535)
    assert cropped.shape[-2:] == (178, 178) and cropped[0, 0, 0, 0] == 20 and cropped[0, 0, -1, 0] == 197


def test_pad_frames_with_black():
    dot = torch.full((1, 1, 1, 1), 9, dtype=torch.uint8)
    assert Pad(side=3).apply(dot, 255)[0, 0].tolist() == [[0, 0, 0], [0, 9, 0], [0, 0, 0]]
    assert torch.equal(Pad(amount=2).apply(SQUARE, 255), Pad(side=8).apply(SQUARE, 255))


def test_impossible_crops_and_pads_are_refused():
    with pytest.raises(DataError, match="only 4x4; crop less or pad first"):
        Crop(side=5).apply(SQUARE, 255)
    with pytest.raises(DataError, match="already 4x4"):
        Pad(side=3).apply(SQUARE, 255)


@pytest.mark.parametrize("source", ["pad()", "pad(side=4, amount=1)"])
def test_pad_takes_one_of_two(source: str):
    with pytest.raises(RecipeError, match="either side or amount"):
        build_text(source, Transform, "transforms")


def test_channels_repeats_grey_and_weighs_colour():
    """Luma of (100, 200, 50): 29.9 + 117.4 + 5.7 = 153."""
    assert torch.equal(Channels(n=3).apply(SQUARE, 255), SQUARE.repeat(1, 3, 1, 1))
    colour = torch.tensor([100, 200, 50], dtype=torch.uint8).view(1, 3, 1, 1)
    assert Channels(n=1).apply(colour, 255).item() == 153
    white = torch.full((1, 3, 1, 1), 65535, dtype=torch.int32)
    assert Channels(n=1).apply(white, 65535).item() == 65535
    with pytest.raises(DataError, match="cannot convert 3 channels to 2"):
        Channels(n=2).apply(colour, 255)


def test_flip_marks_training_data_and_touches_no_pixel():
    both = [prepared(SQUARE, torch.zeros(1).long(), ["a"], split=split, transforms=[Flip()]) for split in ("train", "test")]
    assert [d.flip for d in both] == [True, False]
    assert all(torch.equal(d.images, SQUARE) for d in both)


def test_shift_marks_training_data_and_touches_no_pixel():
    labels = torch.zeros(1).long()
    both = [prepared(SQUARE, labels, ["a"], split=split, transforms=[Shift(pad=2)]) for split in ("train", "test")]
    assert [d.shift for d in both] == [2, 0] and not both[0].flip
    assert all(torch.equal(d.images, SQUARE) for d in both)
    assert Shift().pad == 4
    with pytest.raises(DataError, match="only 4 wide, so nothing of it may be left; shift less"):
        Shift().apply(SQUARE, 255)


def test_images_move_within_a_black_frame():
    """Pixels 0 to 15 of a square of four, framed by two black ones: the corner (2, 2) is where the image lies.

    The corner (0, 3) is two rows above it and one column to its right: two black rows, then rows 0 and 1 from their second
    pixel on, and a black pixel. Mirroring comes first.
    """
    data = prepared(SQUARE, torch.zeros(1).long(), ["a"], split="train", transforms=[Shift(pad=2), Flip()])
    x = torch.arange(16.0).view(1, 1, 4, 4).expand(3, 2, -1, -1)
    drawn = {"corner": torch.tensor([[2, 2], [0, 3], [0, 3]]), "mirrored": torch.tensor([False, False, True])}
    moved = data.changed(x, drawn)
    assert torch.equal(moved[0], x[0])
    assert moved[1, 1].tolist() == [[-1.0] * 4, [-1.0] * 4, [1.0, 2.0, 3.0, -1.0], [5.0, 6.0, 7.0, -1.0]]
    assert moved[2, 0].tolist() == [[-1.0] * 4, [-1.0] * 4, [2.0, 1.0, 0.0, -1.0], [6.0, 5.0, 4.0, -1.0]]


def test_every_place_is_drawn():
    """Of 5 x 5 places, 2,000 draws leave none out, and none has more than twice its share of 80."""
    data = prepared(SQUARE, torch.zeros(1).long(), ["a"], split="train", transforms=[Shift(pad=2)])
    corner = data.chances(2000, torch.Generator().manual_seed(0))["corner"]
    found = torch.bincount(5 * corner[:, 0] + corner[:, 1], minlength=25)
    assert len(found) == 25 and found.min() > 40 and found.max() < 160


def test_chunks_change_nothing_and_results_are_contiguous():
    images = torch.arange(CHUNK + 5).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    steps = (Crop(side=2), Channels(n=3))
    whole = transform(images, steps, 255)
    assert whole.is_contiguous() and whole.shape == (CHUNK + 5, 3, 2, 2)
    assert torch.equal(whole[-1], transform(images[-1:], steps, 255)[0])


def test_images_without_pixels_only_change_shape():
    ghost = torch.empty((9, 1, 28, 28), dtype=torch.uint8, device="meta")
    changed = transform(ghost, (Resize(side=32), Channels(n=3)), 255)
    assert changed.shape == (9, 3, 32, 32) and changed.is_meta and changed.dtype == torch.uint8
