"""One cast of all weights gives the bits of autocast."""

import copy

import pytest
import torch
from torch import nn

from effuse.core.data import Shape
from effuse.core.model import Arch
from effuse.fast.layout import for_tensor_cores
from effuse.fast.ops.bf16 import Bf16Weights, autocast_weights, to_bf16
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import Unet
from effuse.pruning.prune import cut


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 7, padding=3, groups=8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 5, 4, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
        nn.Linear(4, 2, bias=False),
    )
    return for_tensor_cores(net, ("norm",))


def unets(channels: int) -> dict[str, Arch]:
    shape = Shape(8, channels, 10)
    return {
        "convnext": ConvnextUnet(dim=8).resolved(shape),
        "unet": Unet(widths=(32, 64), layers=1, attention=(4,)).resolved(shape),
        # of a head's 16 features 11 stay, zero-padded before the product
        "unet, pruned": cut(Unet(widths=(32, 64), layers=1, attention=(4,), groups=4, heads=16).resolved(shape), 0.3),
    }


UNETS = unets(1)


@pytest.mark.parametrize("name", UNETS)
def test_the_bits_of_fused_networks_are_autocasts(name: str) -> None:
    """Also where weights and biases of several layers are concatenated first, and where a network keeps them rounded."""
    torch.manual_seed(0)
    net = for_tensor_cores(UNETS[name].build(), ("norm", "attention"))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 700])
    found = []
    for run in (net, Bf16Weights(net, lambda run: run)):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = run(x, t)
        found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), list(net.parameters()))])
    to_bf16(net)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(net(x, t), found[0][0])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", UNETS)
def test_gradients_have_the_layout_of_their_weights(name: str, monkeypatch) -> None:
    """Padded ones, too: if one layout differs, torch copies the tensors of the list one by one."""
    net, lists, copy_all = for_tensor_cores(unets(3)[name].build(), ("norm", "attention")), [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (lists.append((to, of)), copy_all(to, of)))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        Bf16Weights(net, lambda run: run)(torch.randn(2, 3, 8, 8), torch.tensor([3, 700])).float().square().sum().backward()

    def strides(t: torch.Tensor) -> list[int]:
        return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]

    for to, of in lists:
        assert [strides(t) for t in to] == [strides(t) for t in of]
    assert len(lists) == 2


def gradients(run, net: nn.Module, prox: bool) -> list[torch.Tensor]:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = run(x).float().square().sum()
    if prox:  # like FedProx, use the fp32 weights
        loss = loss + sum(p.square().sum() for p in net.parameters())
    return list(torch.autograd.grad(loss, list(net.parameters())))


def test_the_bits_are_autocasts() -> None:
    for prox in (False, True):
        net = network()
        other = copy.deepcopy(net)
        found = gradients(Bf16Weights(other, lambda run: run), other, prox)
        for a, b in zip(found, gradients(net, net, prox), strict=True):
            assert a.dtype == torch.float32 and torch.equal(a, b)


def test_compiled_it_is_the_same() -> None:
    """Both passes, traced ahead and run by torch's own kernels: the bits of the uncompiled network."""
    net = network()
    compiled = Bf16Weights(net, lambda run: torch.compile(run, backend="aot_eager", dynamic=False))
    for a, b in zip(gradients(compiled, net, False), gradients(Bf16Weights(net, lambda run: run), net, False), strict=True):
        assert torch.equal(a, b)


def test_unused_weights_have_no_gradient() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net.forward = net[0].forward
    with torch.autocast("cpu", torch.bfloat16):
        Bf16Weights(net, lambda run: run)(torch.ones(1, 2)).float().sum().backward()
    assert net[0].weight.grad is not None and net[1].weight.grad is None


def test_frozen_layers_have_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        Bf16Weights(net, lambda run: run)(torch.ones(1, 2)).float().sum().backward()
    assert net[0].weight.grad is None and net[1].weight.grad is not None


def test_only_what_autocast_rounds_is_rounded() -> None:
    """Not the weights of normalisations, nor biases that are added in fp32."""
    assert list(autocast_weights(network())) == ["0.weight", "1.weight", "3.weight", "6.weight", "6.bias", "7.weight"]


def test_a_network_that_only_draws_keeps_rounded_weights() -> None:
    """The same bits under autocast, also after filling it with other fp32 weights."""
    torch.manual_seed(0)
    net, other = network().eval(), network().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    to_bf16(other)
    torch._foreach_copy_([p.data for p in other.parameters()], [p.data for p in net.parameters()])
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(x), other(x))
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16, torch.float32}
