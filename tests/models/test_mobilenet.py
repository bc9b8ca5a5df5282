"""MobileNetV2: published parameter counts, shapes, and both normalisations."""

import pytest
import torch

from effuse.core.data import Shape
from effuse.metrics.cost import macs, parameters
from effuse.models.mobilenet import Inverted, MobileNetV2


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("last", "classes", "count"), [(512, 200, 2_079_176), (1280, 1000, 3_504_872)])
def test_the_published_numbers_of_parameters(norm, last, classes, count):
    """Either normalisation has a scale and a shift for each channel."""
    arch = MobileNetV2(last=last, norm=norm).resolved(Shape(64, 3, classes))
    assert parameters(arch)["total"] == count


def test_the_published_arithmetic():
    """At 224 pixels with 1280 features and 1000 classes: 300.8 million multiply-adds."""
    arch = MobileNetV2(last=1280, norm="batch").resolved(Shape(224, 3, 1000))
    assert macs(arch) / 1e6 == pytest.approx(300.8, abs=0.1)


def test_five_halvings_and_fewer_with_another_stem():
    for stride, side in ((2, 2), (1, 4)):
        net = MobileNetV2(stride=stride).resolved(Shape(64, 3, 200)).hollow_net()
        x = torch.zeros(2, 3, 64, 64, device="meta")
        assert net.stages(net.stem(x)).shape == (2, 512, side, side)
        logits, features = net(x, give="both")
        assert logits.shape == (2, 200) and features.shape == (2, 512)


def test_a_shortcut_where_shapes_agree():
    """A branch of noughts: the image itself with a shortcut, noughts without."""
    arch, x = MobileNetV2(), torch.rand(1, 16, 4, 4)
    for width, stride, kept in ((16, 1, True), (16, 2, False), (24, 1, False)):
        block = Inverted(arch, 16, width, stride, 6)
        torch.nn.init.zeros_(block.branch[-2].weight)
        found = block(x)
        assert torch.equal(found, x) if kept else not found.any()


def test_widths_must_divide_into_groups():
    with pytest.raises(ValueError, match="width 24 is not a multiple of groups=16"):
        MobileNetV2(groups=16)
    MobileNetV2(groups=16, norm="batch")
