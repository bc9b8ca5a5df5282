"""Linear attention in plain torch against its definition. GPU tests compare the kernels with it."""

import pytest
import torch

from effuse.fast.ops.attention import linear_attention, linear_attention_backward

LAST = torch.channels_last


def defined(qkv, heads):
    """For every head: softmax of keys over positions, times values, weighted by a softmax of queries over features."""
    q, k, v = qkv.reshape(len(qkv), 3, heads, qkv.shape[1] // (3 * heads), -1).unbind(1)
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    out = torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2) * q.shape[2] ** -0.5)
    return out.reshape(len(qkv), -1, *qkv.shape[2:])


@pytest.mark.parametrize(("heads", "width", "places"), [(4, 32, (7, 7)), (1, 16, (1, 1)), (2, 4, (3, 5))])
def test_attention_and_its_gradient(heads, width, places):
    torch.manual_seed(0)
    qkv = (3 * torch.randn(2, 3 * heads * width, *places)).contiguous(memory_format=LAST).requires_grad_()
    out, wanted = linear_attention(qkv, heads)[0], defined(qkv, heads)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-6)
    assert out.is_contiguous(memory_format=LAST)
    dout = torch.randn_like(wanted)
    (found,), (right,) = (torch.autograd.grad(y, qkv, dout) for y in (out, wanted))
    assert found.is_contiguous(memory_format=LAST) and (found - right).norm() < 1e-5 * right.norm()


def test_two_positions_share_the_weight():
    """One head of width 1, keys 0 and log 3: weights 1/4 and 3/4 of the values 4 and 8 give 7 for any query."""
    qkv = torch.tensor([[5.0, -5.0], [0.0, torch.tensor(3.0).log()], [4.0, 8.0]])[None, :, :, None]
    out, context, norm = linear_attention(qkv, 1)
    torch.testing.assert_close(out.flatten(), torch.tensor([7.0, 7.0]))
    torch.testing.assert_close(context.flatten(), torch.tensor([7.0]))
    torch.testing.assert_close(norm.flatten(), torch.tensor([1.0986123, 4 / 3]))
    # dout 1 at the first position: the context's slope is 1, so dv = (1/4, 3/4), dk = w (v - 7) = (-3/4, 3/4) and dq = 0
    dqkv = linear_attention_backward(qkv, torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), context, norm)
    torch.testing.assert_close(dqkv.flatten(2)[0, :, :], torch.tensor([[0.0, 0.0], [-0.75, 0.75], [0.25, 0.75]]))


def test_large_keys_do_not_overflow():
    qkv = torch.zeros(1, 3, 2, 1)
    qkv[0, 1, :, 0], qkv[0, 2, :, 0] = torch.tensor([1000.0, 900.0]), torch.tensor([2.0, 7.0])
    torch.testing.assert_close(linear_attention(qkv, 1)[0].flatten(), torch.tensor([2.0, 2.0]))


def test_bf16_goes_in_and_out():
    qkv = torch.randn(2, 48, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    out = linear_attention(qkv, 1)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), defined(qkv.float(), 1), rtol=2e-2, atol=1e-2)
    assert torch.autograd.grad(out.float().sum(), qkv)[0].dtype == torch.bfloat16


def test_it_is_a_valid_operator():
    qkv = torch.randn(1, 12, 2, 2, requires_grad=True)
    torch.library.opcheck(
        linear_attention, (qkv, 1), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
