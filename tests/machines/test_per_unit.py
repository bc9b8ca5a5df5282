"""Attention and convolutions of private fits: the same functions as torch's, with the same gradients of each unit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from effuse.core.errors import RecipeError
from effuse.core.rng import Stream
from effuse.machines.per_unit import UNFOLDED, Convolution, PerUnit, TransposedConvolution, attention

WINDOWS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(0, 1), dilation=(2, 1)),
    nn.Conv2d(4, 6, 1),
    nn.Conv2d(4, 4, 3, padding=1, groups=4),
    nn.Conv2d(4, 6, 3, padding="same"),
    nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, bias=False),
    nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), dilation=(1, 2)),
    nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2),
]
OURS = [m for m in WINDOWS if m.groups == 1 and m.padding != "same"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("effuse.machines.per_unit.UNFOLDED", {"cpu"})


def pair(layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """Three units of two rows each, and a weight for each value, so that all gradients differ."""
    x, weight = torch.randn(2, 6, 4, 7, 9, generator=Stream((0,)).torch())
    return x.contiguous(memory_format=layout).unflatten(0, (3, 2)), weight


def gradients(window: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The gradient of each unit with respect to the parameters and to a factor of its images."""

    def loss(values: dict[str, Tensor], rows: Tensor) -> Tensor:
        own = {k: v for k, v in values.items() if k != "factor"}
        out = torch.func.functional_call(window, own, rows * values["factor"])
        return (out.float() * out.float().cos() * weight.mean()).sum()

    values = {**{k: p.detach() for k, p in window.named_parameters()}, "factor": torch.tensor(1.5)}
    return vmap(grad(loss), in_dims=(None, 0))(values, x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_gradients_of_units_are_torchs(window, layout):
    x, weight = pair(layout)
    wanted = gradients(window, x, weight)
    with PerUnit():
        found = gradients(window, x, weight)
    assert found.keys() == wanted.keys() and all(len(g) == 3 for g in found.values())
    for k, g in wanted.items():
        torch.testing.assert_close(found[k], g, rtol=1e-4, atol=1e-4 * g.abs().max().item())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_values_are_torchs_to_the_bit(window):
    x = pair(torch.contiguous_format)[0].flatten(0, 1)
    with PerUnit():
        ours = window(x)
    assert torch.equal(ours, window(x))


@pytest.mark.parametrize("window", OURS, ids=str)
def test_autocast_reaches_our_convolutions(window):
    """Values and gradients are those of bf16: within 2^-7 of fp32's, and not equal to them."""
    x, weight = pair(torch.contiguous_format)
    with PerUnit():
        exact = gradients(window, x, weight)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            assert window(x.flatten(0, 1)).dtype == torch.bfloat16
            found = gradients(window, x, weight)
    assert all(g.dtype == torch.float32 for g in found.values())
    error = (found["weight"] - exact["weight"]).norm() / exact["weight"].norm()
    assert 1e-5 < error < 2**-5


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_which_convolutions_are_ours(window, monkeypatch):
    """All but those with groups, and those whose padding is a word."""
    called = []
    for cls in (Convolution, TransposedConvolution):
        monkeypatch.setattr(cls, "apply", lambda *inputs, cls=cls: called.append(cls) or cls.forward(*inputs))
    with PerUnit():
        window(pair(torch.contiguous_format)[0].flatten(0, 1))
    transposed = isinstance(window, nn.ConvTranspose2d)
    assert called == ([TransposedConvolution if transposed else Convolution] if window in OURS else [])


def test_convolutions_are_ours_on_a_gpu_only():
    """On a CPU the rule of `vmap` takes about half the time for eight rows of each unit."""
    assert list(UNFOLDED) == ["cuda"]


def test_attention_without_torchs_kernel():
    """The same function as torch's own, in this thread alone; masks and dropout are refused."""
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=Stream((0,)).torch()).unbind()
    plain = F.scaled_dot_product_attention
    for options in ({}, {"scale": 0.3}, {"is_causal": False}):
        torch.testing.assert_close(attention(q, k, v, **options), plain(q, k, v, **options))
    with PerUnit():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), attention(q, k, v))
        with pytest.raises(RecipeError, match="a private fit has attention without mask and dropout only"):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
