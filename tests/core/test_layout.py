import pytest
import torch
from torch import nn

from effuse.core.layout import AlignedConv2d, AlignedConvTranspose2d, channels_last, for_tensor_cores

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


def test_a_gradient_comes_back_channels_last() -> None:
    seen = []
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    x.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))
    y = channels_last(x)
    y.backward(torch.ones(2, 8, 4, 4))
    assert y.is_contiguous(memory_format=torch.channels_last) and seen == [True]


def test_other_kinds_of_padding_are_left_alone() -> None:
    net = for_tensor_cores(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Conv2d(3, 3, 3)))
    assert [type(m) for m in net] == [nn.Conv2d, AlignedConv2d]
