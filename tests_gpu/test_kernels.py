"""Our kernels against torch's own functions, at the shapes of both networks.

Without a GPU, where triton is installed, `TRITON_INTERPRET=1 pytest tests_gpu/test_kernels.py -k "not recorded"` runs them
on a CPU, one image at a time.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import Work
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.fast.graph.captured import KERNELS, Captured
from effuse.fast.layout import for_tensor_cores
from effuse.fast.ops.attention import linear_attention
from effuse.fast.ops.bias import channel_sums, plus_kernel
from effuse.fast.ops.dropout import dropped, kept, places
from effuse.fast.ops.norm import norm
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import CifarUnet, Unet
from effuse.pruning.prune import cut
from effuse.tasks.denoise import Denoise
from effuse.transport.slots import in_slots

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BATCH = 128 if GPU else 1
TASK = Denoise()
CHANNELS = {32: (128, 256, 384), 16: (128, 256, 384, 512), 8: (256, 512), 4: (256, 512)}
# as FedPhD cuts them: groups of two to seven, nine, ten, twelve and fourteen channels
CUT_CHANNELS = {32: (64, 96, 192, 288), 16: (160, 192, 224, 288, 320, 384, 448), 8: (128, 192, 384), 4: (384,)}
PLANES, CUT_PLANES = ([(c, side) for side, row in table.items() for c in row] for table in (CHANNELS, CUT_CHANNELS))
# channels, side, groups, shift, gelu, SiLU, rate
NORMS = [(c, s, 32, shift, False, True, rate) for c, s in PLANES + CUT_PLANES for shift, rate in ((False, 0.0), (True, 0.1))]
IMAGES = [(18, 28), (28, 28), (56, 28), (28, 14), (56, 14), (112, 14), (56, 7), (112, 7), (224, 7)]
NORMS += [(c, s, 1, shift, gelu, False, 0.0) for c, s in IMAGES for shift, gelu in ((False, False), (True, True))]
NORMS += [(c, s, 16, True, False, True, 0.0) for c, s in ((48, 32), (144, 32), (80, 16), (112, 16))]  # of the scaled network
NORMS += [(256, 16, 32, False, False, False, 0.0), (36, 9, 6, True, True, True, 0.5), (40, 5, 4, True, False, True, 0.3)]


def normal(*shape, seed=0, dtype=torch.float32, row=None):
    """Channels last, with rows of `row` elements for each position."""
    B, C, *rest = shape
    drawn = torch.randn((B, *rest, row or C), generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return drawn.movedim(-1, 1)[:, :C]


def off(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def arguments(C, side, groups, shift, gelu, silu, rate, dtype=torch.bfloat16, row=None):
    x = normal(BATCH, C, side, side, dtype=dtype, row=row).mul_(2).add_(1).requires_grad_()
    assert x.stride(-1) == (row or C)
    learnt = [torch.randn(*s, device=DEVICE, requires_grad=True) for s in ((BATCH, C), (C,), (C,))]
    seed = torch.tensor(2**40 + 3, device=DEVICE) if rate else None
    return (x, learnt[0] if shift else None, *learnt[1:], seed, groups, 1e-6, gelu, silu, rate, 5)


def plain(x, shift, weight, bias, seed, groups, eps, gelu, silu, rate, layer):
    u = x.float() if shift is None else x.float() + shift[:, :, None, None]
    z = F.group_norm(F.gelu(u) if gelu else u, groups, weight, bias, eps)
    z = F.silu(z) if silu else z
    return dropped(z, seed, layer, rate) if rate else z


def passes(function, given, dy):
    y = function(*given)
    learnt = [t for t in given[:4] if t is not None and t.is_floating_point()]
    return [y.detach(), *torch.autograd.grad(y, learnt, dy.to(y.dtype))]


def fused(*given):
    return norm(*given)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_normalisation_and_its_gradients(case, dtype):
    """Against fp32 on the same numbers: rounding of bf16 (2^-9 at most) in y and dx, of fp32 elsewhere."""
    given = arguments(*case, dtype=dtype)
    dy = normal(BATCH, *case[:2], case[1], seed=1, dtype=dtype)
    found, wanted = passes(fused, given, dy), passes(plain, given, dy)
    rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
    if not GPU and dtype == torch.bfloat16:
        rounding = 8e-3  # the interpreter truncates to bf16
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert off(a, b) < (rounding if i < 2 else 1e-3 if given[1] is not None and i == 2 else 2e-4), i
    for a, b in zip(found, passes(fused, given, dy), strict=True):
        assert torch.equal(a, b), "kernels repeat to the bit"


def test_padded_rows_are_read_in_place():
    for row in (32, None):
        given = arguments(28, 14, 1, True, True, False, 0.0, torch.float32, row=row)
        dy = normal(BATCH, 28, 14, 14, seed=1, row=row)
        for a, b in zip(passes(fused, given, dy), passes(plain, given, dy.contiguous()), strict=True):
            assert off(a, b) < 1e-4


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("side", [28, 7])
def test_a_shift_may_be_common_or_part_of_wider_rows(side, gelu):
    """A bias of 56 channels, a part of rows of 200 in bf16, and one with strided channels, for three or more images."""
    B, (weight, bias) = max(BATCH, 3), torch.randn(2, 56, device=DEVICE)
    x, dy = normal(B, 56, side, side).requires_grad_(), normal(B, 56, side, side, seed=1)
    options = (None, 1, 1e-6, gelu, False, 0.0, 0)
    one, crossed = torch.randn(56, device=DEVICE), torch.randn(56, B, device=DEVICE).t()
    parts = torch.randn(B, 200, device=DEVICE).bfloat16()[:, 100:156]
    for shift, full in ((one, one.expand(B, 56)), (parts, parts.float()), (crossed, crossed.contiguous())):
        learnt = (weight.requires_grad_(), bias.requires_grad_())
        found, wanted = (
            passes(f, (x, s.detach().requires_grad_(), *learnt, *options), dy) for f, s in ((fused, shift), (plain, full))
        )
        if shift.ndim == 1:
            wanted[2] = wanted[2].sum(0)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.shape == b.shape and off(a, b) < (8e-3 if i == 2 and shift is parts else 2e-4), i


@pytest.mark.parametrize("side", [32, 8])
def test_a_kernels_mask_is_that_of_plain_torch(side):
    """Weight 0 and bias 1: every element is silu(1) / 0.9 or 0, by the hash. Another seed drops another tenth."""
    C = 128
    x = normal(BATCH, C, side, side, dtype=torch.bfloat16)
    weight, bias = torch.zeros(C, device=DEVICE), torch.ones(C, device=DEVICE)
    masks = []
    for seed in (0, 1, 0):
        key = torch.tensor(seed, device=DEVICE)
        masks.append(norm(x, None, weight, bias, key, 32, 1e-6, False, True, 0.1, 2)[0] != 0)
        assert torch.equal(masks[-1], kept(key, 2, 0.1, places(x)))
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    n = x.numel()
    assert abs(masks[0].double().mean().item() - 0.9) < 5 * (0.09 / n) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(
    ("C", "side", "row"), [(64, 32, None), (96, 32, None), (204, 16, 208), (3, 32, 8), (256, 4, None), (28, 14, 32)]
)
def test_a_bias_and_its_gradient(C, side, row, more, dtype):
    """Against fp32 on the same numbers, also from rows with gaps."""
    x, dy = (normal(BATCH, C, side, side, seed=k, dtype=dtype, row=row) for k in (0, 1))
    beside = normal(BATCH, C, side, side, seed=2, dtype=dtype, row=row)
    bias = torch.randn(C, device=DEVICE, requires_grad=True)
    y = plus_kernel(x, bias, beside if more else None)
    wanted = x.float() + (beside.float() if more else 0) + bias.detach()[:, None, None]
    rounding = (4e-3 if GPU else 8e-3) if dtype == torch.bfloat16 else 1e-6  # the interpreter truncates to bf16
    assert off(y.detach(), wanted) < rounding
    (found,) = torch.autograd.grad(y, bias, dy, retain_graph=True)
    assert off(found, dy.double().sum((0, 2, 3))) < 1e-5
    assert torch.equal(found, torch.autograd.grad(y, bias, dy)[0]), "kernels repeat to the bit"
    assert torch.equal(channel_sums(dy), found)


# the interpreter cannot multiply matrices of bf16
@pytest.mark.parametrize("dtype", [torch.bfloat16 if GPU else torch.float16, torch.float32])
@pytest.mark.parametrize("side", [28, 14, 7, 12])
def test_linear_attention_and_its_gradient(side, dtype):
    """Against fp32 on the same numbers. 784 positions are thirteen tiles, the last ragged; 49 are less than one."""
    qkv = normal(BATCH, 384, side, side, dtype=dtype).mul_(2).requires_grad_()
    dout = normal(BATCH, 128, side, side, seed=1, dtype=dtype)

    def ours():
        out = linear_attention(qkv, 4)[0]
        return out.detach(), *torch.autograd.grad(out, qkv, dout)

    q, k, v = qkv.float().reshape(BATCH, 3, 4, 32, -1).unbind(1)
    wanted = (k.softmax(-1) @ v.mT).mT @ (q.softmax(-2) * 32**-0.5)
    (right,) = torch.autograd.grad(wanted, qkv, dout.float().reshape(wanted.shape))
    out, found = ours()
    rounding = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert off(out, wanted.reshape(out.shape)) < rounding and off(found, right) < 2 * rounding
    for a, b in zip((out, found), ours(), strict=True):
        assert torch.equal(a, b), "kernels repeat to the bit"


@pytest.mark.parametrize("width", [8, 24, 64])
def test_linear_attention_of_other_widths(width):
    """A tensor core takes 64 features without padding; plain torch computes 8 and 24."""
    qkv = normal(2, 6 * width, 5, 5).requires_grad_()
    q, k, v = qkv.reshape(2, 3, 2, width, -1).unbind(1)
    wanted = (k.softmax(-1) @ v.mT).mT @ (q.softmax(-2) * width**-0.5)
    out = linear_attention(qkv, 2)[0]
    assert off(out.flatten(2), wanted.flatten(1, 2)) < 1e-4
    (found,), (right,) = (torch.autograd.grad(y.square().sum(), qkv) for y in (out, wanted))
    assert off(found, right) < 1e-4


def test_linear_attention_survives_large_keys():
    """Keys up to hundreds, growing from tile to tile: without rescaling, exponentials would be infinite."""
    qkv = normal(1, 384, 28, 28)
    qkv[:, 128:256] *= torch.linspace(1, 300, 784, device=DEVICE).view(28, 28)
    q, k, v = qkv.reshape(1, 3, 4, 32, -1).unbind(1)
    wanted = (k.softmax(-1) @ v.mT).mT @ (q.softmax(-2) * 32**-0.5)
    assert off(linear_attention(qkv, 4)[0].flatten(2), wanted.flatten(1, 2)) < 1e-4


NETS = {
    "convnext": ConvnextUnet(dim=16).resolved(Shape(16, 1, 10)),
    "unet": Unet(widths=(32, 64), layers=1, attention=(8,), dropout=0.1).resolved(Shape(16, 1, 10)),
    # of a head's 16 features 11 stay
    "unet, cut": cut(Unet(widths=(32, 64), layers=1, attention=(8,), groups=4, heads=16).resolved(Shape(16, 1, 10)), 0.3),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_recorded_networks_with_kernels_and_without(name, compiled):
    """One pass under autocast: the error of outputs and gradients is at most 1.5 times that of torch's own kernels."""
    torch.manual_seed(0)
    arch = NETS[name]
    start = arch.build().state_dict()
    x, t = torch.randn(16, 1, 16, 16, device=DEVICE), torch.arange(16, device=DEVICE) * 60
    found = {}
    for kind, kernels, half in (("fp32", (), False), ("torch", (), True), ("ours", KERNELS, True)):
        net = for_tensor_cores(arch.build().to(DEVICE), kernels)
        net.load_state_dict(start)
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(DEVICE))
        run = torch.compile(net, dynamic=False) if compiled and half else net
        with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
            y = run(x.contiguous(memory_format=torch.channels_last), t)
        grads = torch.autograd.grad(y.float().square().sum(), list(net.parameters()))
        found[kind] = y.detach(), torch.cat([g.flatten() for g in grads])
    for ours, theirs, right in zip(found["ours"], found["torch"], found["fp32"]):
        assert off(ours, right) < 1.5 * off(theirs, right) + 1e-3


def fit(machine, arch, steps, owner=0, seed=1):
    generator = torch.Generator().manual_seed(0)
    shape = arch.shape
    images = torch.randint(0, 256, (512, shape.channels, shape.side, shape.side), dtype=torch.uint8, generator=generator)
    shard = Shard.whole(Dataset(images, torch.arange(512) % 10, tuple("0123456789")).to(DEVICE))
    machine.release(owner)
    net = machine.load(arch.initial(Stream((0,))).to(DEVICE), owner)
    solver = Adam(lr=1e-4, batch=128, steps=steps)
    done = machine.fit(
        net, Work(solver=solver, task=TASK, shard=shard, lr=1e-4, stream=Stream((seed,)), place=0, where="here")
    )[0]
    return done.loss, machine.values(net)[0].digest()


@pytest.mark.parametrize("name", NETS)
def test_recorded_casts_change_no_bit(name):
    """One cast of all weights, or autocast for each: the same weights after twenty steps."""
    kinds = [tuple(k for k in KERNELS if k != "cast"), KERNELS]
    one, both = (fit(Captured(DEVICE, compiled=False, reproducible=True, kernels=k), NETS[name], 20) for k in kinds)
    assert one == both


@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_dropout_belongs_to_the_client(compiled):
    """Keys 1, 2 and 1 on one recording, key 1 on another machine: the same key gives the same bits."""
    one, two = Captured(DEVICE, compiled), Captured(DEVICE, compiled)
    a, b, c = (fit(one, NETS["unet"], 8, seed=s) for s in (1, 2, 1))
    assert a == c != b and one.captures == 1
    torch.manual_seed(12345)
    assert fit(two, NETS["unet"], 8) == a


@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_slots_of_the_large_network_do_not_disturb_each_other(compiled):
    """The DDPM paper's network with dropout: two in parallel give the bits of one alone."""
    arch = CifarUnet().resolved(Shape(32, 3, 10))
    machines = [Captured(DEVICE, compiled) for _ in range(2)]
    assert all(machine.kernels == set(KERNELS) for machine in machines)

    def one(machine, owner):
        return fit(machine, arch, 10, owner)

    alone = one(machines[0], 0)
    assert one(machines[0], 0) == alone
    for _ in range(2):  # the first time they record in turn; the second time they run in parallel
        at_once = [found for _, found in in_slots(one, range(2), machines, [m.stream for m in machines])]
    assert at_once == [alone] * 2
    assert not any(
        isinstance(m, nn.Dropout) and m.p > 0 for step in machines[0]._steps.values() for m in step.module.modules()
    )
