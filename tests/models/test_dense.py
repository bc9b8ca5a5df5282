"""DENSE's generator."""

import math

import pytest
import torch

from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.metrics.cost import macs, parameters
from effuse.models.dense import DenseGenerator

CIFAR = Shape(32, 3, 10)


def test_the_layers_of_the_paper():
    """256 inputs z of 256 numbers; linear to 128 maps of 8x8, 3x3 from 128 to 128, to 64 and to 3, and three BatchNorms."""
    arch = DenseGenerator().resolved(CIFAR)
    linear, norms = 256 * 8192 + 8192, 2 * (128 + 128 + 64)
    convolutions = (128 * 128 * 9 + 128) + (128 * 64 * 9 + 64) + (64 * 3 * 9 + 3)
    assert parameters(arch)["total"] == 256 * 256 + linear + norms + convolutions == 2_394_627
    # multiplied at 1, 16x16, 32x32 and 32x32 places
    assert macs(arch) == 256 * 8192 + 128 * 128 * 9 * 256 + (128 * 64 + 64 * 3) * 9 * 1024


def test_images_and_first_weights():
    torch.manual_seed(0)
    net = DenseGenerator(batch=64).resolved(CIFAR).build().requires_grad_(False)
    images = net(torch.arange(64))
    assert images.shape == (64, 3, 32, 32) and -1 < images.min() < images.max() < 1
    assert net.z.std() == pytest.approx(1.0, abs=0.02) and net.first.weight.std() == pytest.approx(0.02, rel=0.01)
    assert net.layers[2].weight.std() == pytest.approx(0.02, rel=0.02) and not net.first.bias.any()
    alone = net.eval()(torch.tensor([3, 5]))
    torch.testing.assert_close(alone, net(torch.arange(64))[[3, 5]])


def test_the_batch_of_the_lowest_loss_is_remembered():
    net = DenseGenerator(batch=2, z=1, width=2).resolved(Shape(4, 1, 2)).build()
    assert math.isinf(net.lowest)
    for loss, colour in ((3.0, 0.1), (1.0, 0.2), (2.0, 0.3)):
        net.remember(torch.full((2, 1, 4, 4), colour), torch.tensor(loss))
    assert net.lowest == 1.0 and torch.equal(net.best, torch.full((2, 1, 4, 4), 0.2))


def test_sides_that_cannot_be_doubled_twice_are_refused():
    with pytest.raises(RecipeError, match="side 6 is no multiple of 4"):
        DenseGenerator().resolved(Shape(6, 1, 2))
