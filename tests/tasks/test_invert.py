"""What a classifier sees of an image: a crop with black around it, perhaps mirrored."""

import torch

from effuse.core.task import Batch
from effuse.tasks.invert import Invert

ONE = torch.Size((1, 2, 2))
IMAGE = torch.tensor([[0.1, 0.2], [0.3, 0.4]])[None, None]


def seen(corner, mirrored=False):
    task = Invert(padding=1)
    drawn = {"corner": torch.tensor([corner]), "mirrored": torch.tensor([mirrored])}
    return task.seen(IMAGE, Batch(IMAGE, torch.zeros(1), task, drawn))[0, 0]


def test_crops_by_hand():
    """With one black pixel around it, the corner (1, 1) is the image itself; (0, 2) takes its upper right corner."""
    torch.testing.assert_close(seen((1, 1)), IMAGE[0, 0])
    torch.testing.assert_close(seen((1, 1), mirrored=True), torch.tensor([[0.2, 0.1], [0.4, 0.3]]))
    torch.testing.assert_close(seen((0, 2)), torch.tensor([[-1.0, -1.0], [0.2, -1.0]]))
    torch.testing.assert_close(seen((0, 2), mirrored=True), torch.tensor([[-1.0, -1.0], [-1.0, 0.2]]))


def test_what_is_drawn():
    """Corners from 0 to twice the padding, half of the images mirrored; without padding and mirroring images stay."""
    generator = torch.Generator().manual_seed(0)
    drawn = Invert(padding=4).draw(4000, ONE, torch.zeros(4000), generator)
    assert drawn["row"].tolist() == list(range(4000))
    assert drawn["corner"].unique().tolist() == list(range(9)) and abs(drawn["mirrored"].float().mean() - 0.5) < 0.03
    plain = Invert(padding=0, flip=False)
    images = torch.rand(16, *ONE)
    drawn = plain.draw(16, ONE, torch.zeros(16), generator)
    torch.testing.assert_close(plain.seen(images, Batch(images, torch.zeros(16), plain, drawn)), images)


def test_a_crop_hands_the_gradient_to_what_is_seen():
    image = IMAGE.clone().requires_grad_()
    task = Invert(padding=1)
    drawn = {"corner": torch.tensor([[0, 2]]), "mirrored": torch.tensor([True])}
    task.seen(image, Batch(image, torch.zeros(1), task, drawn)).sum().backward()
    assert image.grad[0, 0].tolist() == [[0.0, 1.0], [0.0, 0.0]]
