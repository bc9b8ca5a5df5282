"""The fused operations in plain torch against torch's own functions. GPU tests compare the kernels with them."""

import pytest
import torch
import torch.nn.functional as F

from effuse.fast.ops.bias import channel_sums, plus, plus_kernel
from effuse.fast.ops.dropout import dropped
from effuse.fast.ops.kernels import available
from effuse.fast.ops.norm import norm
from effuse.fast.ops.products import linear, side_by_side
from effuse.fast.ops.rows import empty_rows, rows

LAST = torch.channels_last
# channels, side, groups; shift, gelu before, SiLU after, rate
SHAPES = [(128, 4, 32), (18, 7, 1), (30, 3, 5), (384, 2, 32)]
PARTS = [(True, False, True, 0.1), (False, False, True, 0.0), (True, True, False, 0.0), (False, False, False, 0.0)]


def plain(x, shift, weight, bias, seed, groups, eps, before, after, rate, layer):
    u = x.float() if shift is None else x.float() + shift.view(*shift.shape, *[1] * (x.ndim - 2))
    z = F.group_norm(F.gelu(u) if before else u, groups, weight, bias, eps)
    z = F.silu(z) if after else z
    return dropped(z, seed, layer, rate) if rate else z


def arguments(C, side, groups, parts, dtype=torch.float32):
    torch.manual_seed(C)
    shift, before, after, rate = parts
    x = (2 * torch.randn(2, C, side, side) + 3).to(dtype).contiguous(memory_format=LAST).requires_grad_()
    learnt = [torch.randn(*size, requires_grad=True) for size in ((2, C), (C,), (C,))]
    seed = torch.tensor(2**40 + 7) if rate else None
    return (x, learnt[0] if shift else None, *learnt[1:], seed, groups, 1e-5, before, after, rate, 3)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_normalisation_and_its_gradients(shape, parts):
    given = arguments(*shape, parts)
    y, wanted = norm(*given)[0], plain(*given)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    assert y.is_contiguous(memory_format=LAST)
    learnt = [t for t in given[:4] if t is not None]
    seed = torch.randn_like(wanted)
    found, right = torch.autograd.grad(y, learnt, seed), torch.autograd.grad(wanted, learnt, seed)
    for a, b in zip(found, right, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_bf16_goes_in_and_out():
    given = arguments(64, 4, 8, PARTS[0], torch.bfloat16)
    y = norm(*given)[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain(*given), rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(y.float().sum(), given[0])[0].dtype == torch.bfloat16


def test_sequences_are_planes_of_one_row():
    """The input of attention's normalisation: B x C x L, with channels last in memory."""
    x = torch.randn(2, 9, 16).transpose(1, 2).requires_grad_()
    weight, bias = torch.randn(16), torch.randn(16)
    y = norm(x, None, weight, bias, None, 4, 1e-6, False, False, 0.0, 0)[0]
    torch.testing.assert_close(y, F.group_norm(x, 4, weight, bias, 1e-6))
    assert y.stride() == x.stride()


def test_rows_are_copied_only_if_necessary():
    whole = torch.randn(2, 32, 4, 6).contiguous(memory_format=LAST)
    some = whole[:, :28]
    assert rows(whole)[0] is whole and rows(whole)[1] == 32
    assert rows(some)[0] is some and rows(some)[1] == 32
    for awkward in (
        whole.contiguous(),
        whole[..., :3],
        whole[:, :, 1:],
        whole.expand(2, 32, 4, 6)[:, :1].expand(2, 32, 4, 6),
    ):
        made, row = rows(awkward)
        assert row == 32 and torch.equal(made, awkward) and made.stride() == empty_rows(awkward).stride()


def test_the_operators_are_valid():
    """Torch's own check of schemas, fake tensors, and gradients through a compiler's tracing."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(norm, arguments(8, 4, 2, PARTS[0]), test_utils=checks)


def test_a_bias_and_more_are_added_at_once():
    """Two images of two channels and one position, 1, 2 and 3, 4; a bias of 10, 20; 100 to all, where there is more. The
    gradient of a bias is the sum of its channel's: 1 + 3 and 2 + 4; those of what is added are the sum's own.
    """
    x, more = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 2, 1, 1).requires_grad_(), torch.full((2, 2, 1, 1), 100.0)
    bias = torch.tensor([10.0, 20.0], requires_grad=True)
    assert plus(x, bias).flatten().tolist() == [11.0, 22.0, 13.0, 24.0]
    y = plus(x, bias, more.requires_grad_())
    assert y.flatten().tolist() == [111.0, 122.0, 113.0, 124.0]
    y.backward(x.detach())
    assert bias.grad.tolist() == [4.0, 6.0] and torch.equal(x.grad, x) and torch.equal(more.grad, x)


def test_a_sum_is_rounded_once_and_its_bias_not_at_all():
    """256 + 1 + 1 in bf16, whose numbers there are two apart: two additions stay at 256, one sum gives 258.

    A gradient of 1/512 from each of 3 x 512 positions is 3; repeated addition in bf16 would stop at 0.5.
    """
    x = torch.full((3, 1, 16, 32), 256.0, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(1, requires_grad=True)
    y = plus(x, bias, torch.ones_like(x))
    assert y.dtype == torch.bfloat16 and (y == 258).all()
    y.backward(torch.full_like(y, 1 / 512))
    assert bias.grad.dtype == torch.float32 and bias.grad.item() == 3


def test_a_frozen_bias_is_not_summed(monkeypatch):
    monkeypatch.setattr("effuse.fast.ops.bias.channel_sums", None)
    x = torch.ones(2, 3, 2, 2, requires_grad=True)
    plus(x, torch.zeros(3)).sum().backward()
    linear(x, torch.eye(2), torch.zeros(2)).sum().backward()
    assert (x.grad == 2).all()


def test_wrong_shapes_are_refused():
    """A kernel would read out of bounds."""
    x = torch.zeros(2, 8, 4, 4)
    for bias, more in (
        (torch.zeros(8), torch.zeros(2, 8, 1, 1)),
        (torch.zeros(8), torch.zeros(2, 8, 2, 2)),
        (torch.zeros(4), None),
    ):
        with pytest.raises(ValueError, match=r"where \(2, 8, 4, 4\) needs"):
            plus(x, bias, more)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (2, 2, 2, 3)])
def test_a_product_with_a_summed_bias_is_the_plain_one(shape):
    """Rows in any number of axes."""
    learnt = [torch.randn(s, requires_grad=True) for s in (shape, (4, 3), (4,))]
    found, wanted = (run(*learnt) for run in (linear, F.linear))
    dy = torch.randn_like(wanted)
    for a, b in zip(
        (found, *torch.autograd.grad(found, learnt, dy)), (wanted, *torch.autograd.grad(wanted, learnt, dy)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_normalisation_without_an_incoming_gradient_has_none():
    class Stopped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    Stopped.apply(norm(x, None, torch.ones(8), torch.zeros(8), None, 2, 1e-5, False, False, 0.0, 0)[0]).sum().backward()
    assert x.grad is None


def test_sums_of_sequences_and_of_parts_of_rows():
    whole = torch.randn(2, 5, 7).transpose(1, 2)  # B x C x L, channels next to each other
    for x in (whole, whole[:, :3], torch.randn(4, 3, 2, 2)):
        torch.testing.assert_close(channel_sums(x), x.transpose(0, 1).flatten(1).sum(1))


@pytest.mark.parametrize("more", [False, True])
def test_compiled_a_sum_is_the_same(more):
    x, bias = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16, requires_grad=True), torch.randn(8, requires_grad=True)
    given = (x, bias, torch.randn_like(x, requires_grad=True) if more else None)
    learnt, found = [t for t in given if t is not None], []
    for run in (plus, torch.compile(plus, backend="aot_eager")):
        y = run(*given)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), learnt)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(plus_kernel, given, test_utils=checks)


def test_without_working_kernels_torchs_own_are_used(monkeypatch):
    """Triton is installed without a GPU, which fails like a missing C compiler: a warning, and no error."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
    with pytest.warns(UserWarning, match="our GPU kernels do not run here, so torch's own do, which are slower: "):
        assert not available(torch.device("cuda", 7))
    assert not available(torch.device("cpu"))


def test_layers_side_by_side_are_the_layers():
    """Two layers of one input, 2 x + 1 and (x, -x), plus 10 and (0, 20): values and all gradients."""
    layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)]
    with torch.no_grad():
        for layer, weight, bias in zip(layers, ([[2.0]], [[1.0], [-1.0]]), ([1.0], [0.0, 0.0])):
            layer.weight.copy_(torch.tensor(weight)), layer.bias.copy_(torch.tensor(bias))
    x = torch.tensor([[3.0], [4.0]], requires_grad=True)
    more = [torch.tensor([10.0], requires_grad=True), torch.tensor([0.0, 20.0], requires_grad=True)]
    first, second = side_by_side(layers, x, more)
    assert first.tolist() == [[17.0], [19.0]] and second.tolist() == [[3.0, 17.0], [4.0, 16.0]]
    (first.sum() + 10 * second[:, 0].sum()).backward()
    assert x.grad.tolist() == [[12.0], [12.0]]
    assert layers[0].weight.grad.tolist() == [[7.0]] and layers[1].weight.grad.tolist() == [[70.0], [0.0]]
    assert layers[1].bias.grad.tolist() == more[1].grad.tolist() == [20.0, 0.0] and more[0].grad.tolist() == [2.0]


def test_a_shift_may_be_common_or_part_of_wider_rows():
    """A number per channel is common to all images. A part of wider rows, in bf16, is read in place."""
    x, weight, bias, one, wide = (torch.randn(s) for s in ((3, 8, 2, 2), (8,), (8,), (8,), (3, 20)))
    rest = (weight, bias, None, 2, 1e-5, True, False, 0.0, 0)
    for learnt, part in ((one, lambda t: t), (wide.bfloat16(), lambda t: t[:, 5:13])):
        learnt.requires_grad_()
        y, wanted = norm(x, part(learnt), *rest)[0], plain(x, part(learnt.float()).expand(3, 8), *rest)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
        dy = torch.randn_like(wanted)
        (found,), (right,) = (torch.autograd.grad(out, learnt, dy) for out in (y, wanted))
        assert found.dtype == learnt.dtype
        torch.testing.assert_close(found.float(), right.float(), rtol=1e-2, atol=1e-2)
