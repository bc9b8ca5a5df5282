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


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_its_levels_are_the_ends_of_its_resolutions(norm):
    """The stem (32), then before each halving 16, 24, 32 and 96 channels, then the features; the output does not change."""
    net = MobileNetV2(norm=norm, projection=5).resolved(Shape(32, 3, 10)).build().eval()
    x = torch.randn(2, 3, 32, 32)
    output, _, levels = net(x, give="levels")
    assert torch.equal(output, net(x)) and [level.shape[1] for level in levels] == [32, 16, 24, 32, 96, 512]
    maps = net.maps(x)
    assert [m.shape[2] for m in maps] == [16, 16, 8, 4, 2, 1] and all(bool((m < 0).any()) for m in maps)
    assert torch.equal(maps[2], net.stages[:3](net.stem(x))) and torch.equal(levels[2], maps[2].mean((2, 3)))


def test_a_projection_and_a_cosine_head():
    """Without its head of 512 x 200 + 200: a projection of 512 x 512 + 512 and 512 x 256 + 256, and s alone is trained."""
    arch = MobileNetV2(projection=256, head="cosine").resolved(Shape(64, 3, 200))
    plain = 2_079_176 - (512 * 200 + 200)
    assert parameters(arch)["total"] == plain + 512 * 512 + 512 + 512 * 256 + 256 + 1
    net = arch.build()
    torch.testing.assert_close(net.head.weight @ net.head.weight.T, torch.eye(200), rtol=0, atol=1e-5)
    assert net.head.scale.item() == 20.0


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
