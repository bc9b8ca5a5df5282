"""An encoder with a projector and a predictor: what each gives, and how it is saved."""

import pytest
import torch

from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.model import fill
from effuse.core.rng import Stream
from effuse.models.projected import Projected
from effuse.models.resnet import Cnn, Resnet
from effuse.models.saved import load_model
from effuse.models.unet import DigitsUnet

ARCH = Projected(encoder=Cnn(widths=(4,), groups=2), hidden=8, width=3).resolved(Shape(4, 1, 2))


def test_its_parts_follow_each_other():
    """A 4 x 4 image has 4 channels of 2 x 2 features: 16. The predictor sees the projection, and nothing else."""
    net, x = ARCH.build(), torch.randn(5, 1, 4, 4)
    net.eval()
    h, z, q = (net(x, give=what) for what in ("features", "projection", "output"))
    assert [tuple(t.shape) for t in (h, z, q)] == [(5, 16), (5, 3), (5, 3)]
    assert torch.equal(net.projector(h), z) and torch.equal(net.predictor(z), q)
    assert torch.equal(net.encoder.encoded(x), h), "the classifier's features, without its head"
    both = net(x, give="both")
    assert torch.equal(both[0], q) and torch.equal(both[1], h)
    alone = Projected(encoder=ARCH.encoder, hidden=8, width=3, predictor=False).resolved(Shape(4, 1, 2)).build()
    assert torch.equal(alone(x), alone(x, give="projection"))


def test_fedemas_network_has_no_idle_values():
    """ResNet-10 without its head has 4,903,242 - 5,130 values. Two heads: 512 -> 4096 -> 2048 -> 4096 -> 2048.

    Without biases these are 512 * 4096 + 4096 * 2048 + 2 * 2048 * 4096, and 2 * 4096 of each BatchNorm.
    """
    arch = Projected(encoder=Resnet(blocks=(1, 1, 1, 1))).resolved(Shape(32, 3, 10))
    numbers = sum(p.numel() for p in arch.hollow_net().parameters())
    assert numbers == 4_903_242 - 5_130 + 512 * 4096 + 3 * 4096 * 2048 + 4 * 4096


def test_a_saved_network_is_read_again(tmp_path):
    model = ARCH.initial(Stream((0,)))
    net = ARCH.build()
    fill(net, model)
    ARCH.save(net, tmp_path / "model", None)
    found, schedule = load_model(tmp_path / "model")
    assert found.arch == ARCH and found.params.digest() == model.params.digest() and schedule is None


def test_an_encoder_must_be_a_classifier():
    with pytest.raises(ModelError, match="model.encoder: unet is no classifier with features; use a resnet"):
        Projected(encoder=DigitsUnet()).resolved(Shape(8, 1, 10)).build()
