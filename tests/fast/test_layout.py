"""Networks with replaced modules compute the same as before."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.upsampling import Upsample2D
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from effuse.core.build import build_text
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.model import Arch
from effuse.fast.layout import for_tensor_cores
from effuse.fast.ops.conv import AlignedConv2d, AlignedConvTranspose2d, _padded, channels_last, doubled
from effuse.fast.ops.dropout import KeyedDropout, seed_of
from effuse.fast.ops.products import aligned
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import CifarUnet, Unet
from effuse.pruning.prune import cut

CONVOLUTIONS = {
    "aligned": lambda: nn.Conv2d(8, 16, 3, padding=1),
    "odd widths": lambda: nn.Conv2d(3, 5, 3, padding=1),
    "no bias, strided": lambda: nn.Conv2d(18, 28, 4, 2, 1, bias=False),
    "depthwise": lambda: nn.Conv2d(6, 6, 7, padding=3, groups=6),
    "transposed": lambda: nn.ConvTranspose2d(5, 9, 4, 2, 1),
    "transposed, aligned": lambda: nn.ConvTranspose2d(16, 8, 4, 2, 1),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_mathematics_stays(kind: str) -> None:
    """Zero channels times any weight add zero: outputs and every gradient are those of the plain convolution."""
    torch.manual_seed(0)
    plain = CONVOLUTIONS[kind]()
    x = torch.randn(2, plain.in_channels, 8, 8, requires_grad=True)
    y = plain(x)
    seed = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [x, *plain.parameters()], seed)
    names = list(dict(plain.named_parameters()))
    aligned = for_tensor_cores(nn.Sequential(plain))[0]
    assert isinstance(aligned, (AlignedConv2d, AlignedConvTranspose2d)) and list(dict(aligned.named_parameters())) == names
    again = aligned(x)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(torch.autograd.grad(again, [x, *aligned.parameters()], seed), wanted)


@pytest.mark.parametrize(("inputs", "outputs", "pads"), [(8, 3, 1), (3, 8, 2), (3, 5, 2), (16, 8, 0)])
def test_only_what_is_padded_is_copied_and_stays_channels_last(inputs: int, outputs: int, pads: int) -> None:
    """The weight is padded if either width is unaligned, x if its own is. Both stay channels last."""
    conv = for_tensor_cores(nn.Sequential(nn.Conv2d(inputs, outputs, 3)))[0]
    x = torch.randn(2, inputs, 8, 8).contiguous(memory_format=torch.channels_last)
    made = [(a, b) for a, b in zip(_padded(conv, x, conv.weight, outputs=0), (x, conv.weight), strict=True) if a is not b]
    assert len(made) == pads and all(a.is_contiguous(memory_format=torch.channels_last) for a, _ in made)


def test_a_gradient_comes_back_channels_last() -> None:
    seen = []
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    x.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))
    y = channels_last(x)
    y.backward(torch.ones(2, 8, 4, 4))
    assert y.is_contiguous(memory_format=torch.channels_last) and seen == [True]


def test_doubling_is_torchs_nearest_neighbour() -> None:
    """Integers below 2^8, whose sums of four are exact: values and gradients are equal, and channels stay last."""
    x = torch.randint(0, 255, (2, 3, 4, 5)).float().contiguous(memory_format=torch.channels_last).requires_grad_()
    y, wanted = doubled(x), F.interpolate(x, scale_factor=2.0, mode="nearest")
    seed = torch.randint(0, 255, wanted.shape).float()
    assert torch.equal(y, wanted) and y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(*(torch.autograd.grad(out, x, seed)[0] for out in (y, wanted)))


def test_other_kinds_of_padding_are_left_alone() -> None:
    net = for_tensor_cores(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Conv2d(3, 3, 3)))
    assert [type(m) for m in net] == [nn.Conv2d, AlignedConv2d]


NETS = {
    "convnext": ConvnextUnet(dim=8),
    "unet": Unet(widths=(32, 64), layers=1, attention=(4,)),
    "unet with heads and classes": Unet(widths=(32, 64), layers=1, attention=(4,), heads=16, conditional=True),
    "unet, pruned": Unet(widths=(32, 64), layers=1, attention=(4,), groups=4),
    "unet with heads, pruned": Unet(widths=(32, 64), layers=1, attention=(4,), groups=4, heads=16),  # of 16 features 11 stay
    "convnext, pruned": ConvnextUnet(dim=8),
    "unet with dropout": Unet(widths=(32, 64), layers=1, attention=(4,), dropout=0.1),
    "unet, times scale": Unet(widths=(32, 64), layers=1, attention=(), dropout=0.1, resnet_time_scale_shift="scale_shift"),
}


@pytest.mark.parametrize("name", NETS)
def test_a_fused_network_is_the_same_network(name: str) -> None:
    """The same names, outputs and gradients. With dropout, fused and plain masks of one seed are the same."""
    torch.manual_seed(0)
    arch = NETS[name].resolved(Shape(8, 1, 10))
    plain = (cut(arch, 0.3) if "pruned" in name else arch).build()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.02 * torch.randn_like(p))  # or the last convolution, which starts at zero, would hide the rest
    fused = for_tensor_cores(copy.deepcopy(plain), ("norm", "attention"))
    assert list(fused.state_dict()) == list(plain.state_dict())
    kinds = {type(m).__name__ for m in fused.modules()}
    if "convnext" in name:
        assert {"FusedUNet", "FusedBlock", "FusedLinearAttention"} <= kinds and "LinearAttention" not in kinds
    elif "times" in name:
        assert not {"FusedNetwork", "FusedResnetBlock", "FusedAttention"} & kinds  # scaling time embeddings are not fused
    else:
        assert {"FusedNetwork", "FusedResnetBlock", "FusedAttention"} <= kinds and "ResnetBlock2D" not in kinds
    assert not any(
        type(m) in (nn.GroupNorm, nn.Conv2d, Upsample2D) or type(m) is nn.Dropout and m.p > 0 for m in fused.modules()
    )
    if "dropout" in name or "times" in name:
        plain = for_tensor_cores(plain)
        seed_of(plain).fill_(11), seed_of(fused).fill_(11)
        before, after = (sum(isinstance(m, KeyedDropout) for m in net.modules()) for net in (plain, fused))
        assert before == after > 0
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 500, 999])
    found = [_passes(net, x, t) for net in (fused, plain)]
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-5  # some gradients are zero on paper


def test_zeros_align_every_part():
    """Six numbers in two parts of three become two of eight. An aligned tensor is not copied."""
    assert aligned(torch.arange(1, 7), 0, 2).tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6, 0, 0, 0, 0, 0]
    columns = aligned(torch.ones(2, 3, 9), -1)
    assert columns.sum(-1).tolist() == [[9.0] * 3] * 2 and columns.shape == (2, 3, 16)
    assert aligned(torch.ones(2, 12, 3), 1, 3).sum((0, 2)).tolist() == [6.0, 6.0, 6.0, 6.0, 0.0, 0.0, 0.0, 0.0] * 3
    x = torch.ones(16, 3)
    assert aligned(x, 0, 2) is x


def test_products_of_a_pruned_network_are_aligned(monkeypatch):
    """FedPhD's 44 %: attention's 256 features become 204, and the time embedding's 512 become 409.

    Every product over all positions, in both passes, has sides that are multiples of eight.
    """
    arch = cut(CifarUnet().resolved(Shape(32, 3, 10)), 0.2)
    assert ".to_q:192>204 " in arch.cut and "time_embedding.linear_2:409>409 " in arch.cut
    heads = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *r, **k: (heads.append(q.shape[-1]), attention(q, *r, **k))[1]
    )
    with torch.device("meta"), Products() as seen:
        net = for_tensor_cores(arch.build(), ("norm", "attention"))
        net(torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)).sum().backward()
    assert heads == [208] * 6
    wide = [sides for sides in seen.products if max(sides) > 1000]
    assert len(wide) > 30 and all(side % 8 == 0 for sides in wide for side in sides)


class Products(TorchDispatchMode):
    """Records the three sides of every matrix product."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm"):
            a, b = args[-2:]
            self.products.append((*a.shape, b.shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["convnext", "unet"])
def test_weights_that_features_do_not_use_have_no_gradient(name: str) -> None:
    """Also in the fused network, where blocks share a time product. With zeros, weight decay would change the decoder."""
    plain = NETS[name].resolved(Shape(8, 1, 10)).build()
    without = []
    for net in (for_tensor_cores(copy.deepcopy(plain), ("norm", "attention")), plain):
        net(torch.randn(2, 1, 8, 8), torch.tensor([1, 2]), give="features").sum().backward()
        without.append({k for k, p in net.named_parameters() if p.grad is None})
    assert without[0] == without[1] and len(without[0]) > 10


def test_blocks_of_other_networks_are_not_replaced() -> None:
    """Diffusers' modules are replaced only within our U-Net, whose settings are known."""
    NETS["unet"].resolved(Shape(8, 1, 10)).build()
    net = for_tensor_cores(nn.Sequential(Upsample2D(8, use_conv_transpose=True)), ("norm",))
    assert type(net[0]) is Upsample2D and net(torch.randn(1, 8, 4, 4)).shape == (1, 8, 8, 8)


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(RecipeError, match="model.dropout: 1.0 is wrong, input should be less than 1"):
        build_text("unet(dropout=1.0)", Arch, "model")


def _passes(net: nn.Module, x: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
    y = net(x, t)
    return [y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))]
