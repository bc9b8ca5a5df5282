"""The ConvNeXt U-Net of FedDiffuse."""

import pytest
import torch

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch
from effuse.core.spec import text
from effuse.metrics.cost import parameters
from effuse.models.convnext_unet import ConvnextUnet, FullAttention, LinearAttention

FASHION = Shape(28, 1, 10)


def test_parameter_oracle() -> None:
    """The paper's total: 1,280,642 + 999,376 + 716,297 = 2,996,315."""
    counts = parameters(ConvnextUnet().resolved(FASHION))
    assert counts == {"total": 2_996_315, "encoder": 1_280_642, "bottleneck": 999_376, "decoder": 716_297}


def test_class_embedding_belongs_to_the_encoder() -> None:
    """Eleven embeddings of 4 x 28 values."""
    assert parameters(ConvnextUnet(conditional=True).resolved(FASHION))["encoder"] == 1_280_642 + 11 * 112


@pytest.mark.parametrize("shape", [Shape(8, 1, 2), Shape(12, 3, 4), Shape(20, 2, 5)])
def test_any_side_and_channels(shape: Shape) -> None:
    net = ConvnextUnet(conditional=True).resolved(shape).build()
    x = torch.randn(2, shape.channels, shape.side, shape.side)
    out = net(x, torch.tensor([0, 999]), torch.tensor([-1, 1]))
    assert out.shape == x.shape and out.isfinite().all()


def test_null_label() -> None:
    net = ConvnextUnet(side=8, channels=1, classes=3, conditional=True).build().eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([5, 7])
    with torch.no_grad():
        null = net(x, t, torch.tensor([3, 3]))
        assert torch.equal(net(x, t, None), null) and torch.equal(net(x, t, torch.tensor([-1, -1])), null)
        assert not torch.equal(net(x, t, torch.tensor([0, 1])), null)


def test_equal_multipliers_still_downsample_twice() -> None:
    """8 -> 4 -> 2: the last level alone has no downsampling."""
    net = ConvnextUnet(side=8, channels=1, classes=2, multipliers=(1, 1, 1)).build()
    assert [level.resample is None for level in net.downs] == [False, False, True]
    assert net(torch.randn(1, 1, 8, 8), torch.tensor([3])).shape == (1, 1, 8, 8)


def _parts(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """q, k, v of each head, B x 4 x 32 x positions, cut out by hand."""
    q, k, v = layer.qkv(layer.norm(x)).flatten(2).chunk(3, dim=1)
    return [part.unflatten(1, (4, 32)) for part in (q, k, v)]


def test_full_attention_is_softmax_of_scaled_products() -> None:
    layer, x = FullAttention(8).double(), torch.randn(2, 8, 3, 3, dtype=torch.float64)
    q, k, v = _parts(layer, x)
    weights = torch.einsum("bhdi,bhdj->bhij", q, k).div(32**0.5).softmax(-1)
    h = torch.einsum("bhij,bhdj->bhdi", weights, v).reshape(2, 128, 3, 3)
    torch.testing.assert_close(layer(x), x + layer.out(h))


def test_linear_attention_sums_over_positions_once() -> None:
    layer, x = LinearAttention(8).double(), torch.randn(2, 8, 3, 3, dtype=torch.float64)
    q, k, v = _parts(layer, x)
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    h = torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2) / 32**0.5).reshape(2, 128, 3, 3)
    torch.testing.assert_close(layer(x), x + layer.out(h))


def test_no_state_but_parameters() -> None:
    net = ConvnextUnet(side=8, channels=1, classes=2).build()
    assert net.state_dict().keys() == dict(net.named_parameters()).keys()


def test_grammar() -> None:
    arch = ConvnextUnet(conditional=True).resolved(FASHION)
    assert build(parse(text(arch)), Arch, "model") == arch
    with pytest.raises(RecipeError, match="side 30 cannot be halved 2 times"):
        build(parse("convnext_unet(side=30)"), Arch, "model")
