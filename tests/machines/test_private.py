"""DP-SGD by hand: what is clipped, added up, noised and divided, and by which networks it can be done."""

import math
import warnings

import pytest
import torch
from one_weight import CoreTarget, images, machine, model_of, only_w
from private_fits import CPU, Chosen, private_work
from torch import Tensor, nn

from effuse.core.build import build_text
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.errors import RecipeError
from effuse.core.fit import deal_units
from effuse.core.model import Arch, Net
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import DpSgd
from effuse.core.registry import registry
from effuse.core.rng import Stream, keyed
from effuse.core.solvers import SGD
from effuse.core.task import Batch
from effuse.core.units import held
from effuse.machines.eager import Step
from effuse.machines.private import PrivateStep, by_unit, clipped_sum
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.reconstruct import Reconstruct

FOUR = images(255, 255, 204, 0)  # x = 1, 1, 0.6 and -1


def weight_after(*batches, value=0.0, sigma=2.0, shard=FOUR, groups=None, batch=2, **dp):
    """w of f(x) = w x after the steps of a private fit with clip 5 and lr 1/4, which began at 0; v is not trained.

    The loss is (w x - 3)^2, so that at w = 0 an image has the gradient -6 x: here -6, -6, -3.6 and 6.
    """
    solver = SGD(lr=0.25, batch=batch, steps=len(batches), privacy=DpSgd(clip=5.0, **dp))
    eager = machine()
    net = eager.load(model_of())
    net.params["v"].requires_grad_(False)
    work = private_work(
        solver, shard, CoreTarget(), noise=Chosen(*batches, value=value), groups=groups, sigma=sigma, direction=only_w
    )
    fit, _ = eager.fit(net, work)
    assert fit.loss is None and fit.steps == len(batches)
    return net.params["w"].item()


@pytest.mark.parametrize("physical", [None, 1, 2, 3])
def test_a_step_by_hand(physical):
    """q = 1/2 of 4 units: the divisor is 2, though the batch has 3. Clipped: -5, -3.6, 5, together -3.6.

    Noise 0.5 times sigma * clip = 2 * 5 adds 5. The gradient is (-3.6 + 5) / 2 = 0.7 and w = -0.7 / 4.
    """
    assert weight_after([0, 2, 3], value=0.5, physical=physical) == pytest.approx(-0.7 / 4)


def test_an_empty_batch_is_only_noised():
    """(0 + 10 * 0.5) / 2 = 2.5 after the step above: w = -0.175 - 0.625. An empty batch has no parts."""
    assert weight_after([0, 2, 3], [], value=0.5) == pytest.approx(-0.8)
    assert weight_after([], value=0.0) == 0.0


def test_the_sum_of_one_step_is_not_in_the_next():
    """Image 0 alone, twice: -5 / 2 leads to w = 0.625; there the gradient is 2 (0.625 - 3) = -4.75, which is not clipped."""
    assert weight_after([0], [0]) == pytest.approx(0.625 + 4.75 / 8, rel=1e-5)


def test_a_group_is_clipped_once():
    """Images 0 and 2 of one patient average to -4.8, below the clip of 5; of image 3 alone both rows are 6, clipped to 5.

    q = 1 of two units, so the divisor is 2 and w = -(0.2 / 2) / 4. Images clipped before averaging would give -4.3.
    """
    groups = [torch.tensor([0, 2]), torch.tensor([3])]
    assert weight_after([0, 1], groups=groups, repeats=2) == pytest.approx(-0.025, rel=1e-4)
    assert weight_after([1], groups=groups, repeats=2) == pytest.approx(-5 / 8, rel=1e-5)


def test_more_rows_than_images_repeat_the_images():
    """Three rows of the group {0, 2} hold one image twice: -6, -6, -3.6 or -6, -3.6, -3.6, whose means are -5.2 and -4.4."""
    groups = [torch.tensor([0, 2]), torch.tensor([3])]
    found = weight_after([0], groups=groups, repeats=3)
    assert min(abs(found - 5 / 8), abs(found - 4.4 / 8)) < 1e-5


def test_the_length_of_a_gradient_is_over_all_parameters():
    """(3, 4) in two tensors has length 5 and becomes (0.6, 0.8); (0.3, 0.4) stays; the last row is padding."""
    grads = {"a": torch.tensor([[[3.0]], [[0.3]], [[7.0]]]), "b": torch.tensor([4.0, 0.4, 7.0])}
    total = clipped_sum(grads, torch.tensor([1.0, 1.0, 0.0]), 1.0)
    assert total["a"].shape == (1, 1) and total["b"].shape == ()
    assert (total["a"].item(), total["b"].item()) == pytest.approx((0.9, 1.2), rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3e38])
def test_a_unit_whose_gradient_is_not_finite_adds_nothing(wrong):
    """The last value is finite, but its square is not. One such unit must not spoil the step of all."""
    grads = {"a": torch.tensor([[wrong, 1.0], [0.3, 0.4]])}
    assert clipped_sum(grads, torch.ones(2), 1.0)["a"].tolist() == pytest.approx([0.3, 0.4])


def test_a_weight_that_no_unit_uses_has_no_gradient():
    """Its zeros may be one row in memory for all units."""
    grads = {"a": torch.tensor([[0.3], [0.4]]), "unused": torch.zeros(3).expand(2, 3)}
    total = clipped_sum(grads, torch.ones(2), 1.0)
    assert total["a"].item() == pytest.approx(0.7) and total["unused"].tolist() == [0.0] * 3


def test_a_clipped_gradient_is_never_longer_than_the_clip():
    """A thousand directions in fp32, where a product may round up."""
    for seed in range(5):
        g = torch.randn(200, 50, generator=Stream((seed,)).torch()) * 10
        own = torch.stack([clipped_sum({"a": g}, row, 1.0)["a"] for row in torch.eye(200)])
        assert own.double().norm(dim=1).max() <= 1.0 and own.double().norm(dim=1).min() > 1 - 1e-5


def test_rates_steps_and_divisor():
    """290 images in batches of 64: q = 1/5, five steps an epoch, and 58 units expected in each."""
    solver = SGD(lr=0.1, batch=64, epochs=3, privacy=DpSgd(repeats=2))
    work = private_work(solver, images(*[0] * 290), CoreTarget())
    assert (work.private.rate, solver.steps_on(290), work.private.expected) == (1 / 5, 15, pytest.approx(58))
    assert solver.images_on(290) == 15 * 58 * 2


def test_batches_are_poisson():
    """100 units at q = 1/4, 400 steps: the mean size has a standard error of sqrt(18.75 / 400) = 0.22.

    The sizes' variance is 18.75 with a standard error of about 18.75 sqrt(2 / 400) = 1.3; shuffled batches would have none.
    Each unit is taken about 100 times, with a standard deviation of 8.7.
    """
    solver = SGD(lr=0.1, batch=25, steps=400, privacy=DpSgd(physical=16))
    parts = [list(p) for p in deal_units(private_work(solver, images(*[0] * 100), CoreTarget()))]
    sizes = torch.tensor([float(sum(p.real for p in step)) for step in parts])
    assert abs(sizes.mean() - 25) < 4 * 0.22 and abs(sizes.var() - 18.75) < 4 * 1.3
    taken = torch.cat([p.positions[: p.real] for step in parts for p in step]).bincount(minlength=100)
    assert taken.min() > 100 - 4.5 * 8.7 and taken.max() < 100 + 4.5 * 8.7
    assert all(len(p.positions) == 16 for step in parts for p in step)


@pytest.mark.parametrize(
    "n, batch, repeats, physical",
    [
        (6000, 128, 1, 144),  # 127.7 + 1.4 * 11.2 = 143.3
        (5000, 128, 1, 144),  # 125 + 1.4 * 11.0 = 140.5
        (6000, 128, 8, 18),  # 1147 rows in 8 parts of 18 units
        (6000, 128, 3, 50),  # 430 rows in 3 parts of 48 units, in steps of 5
        (6000, 128, 32, 5),
        (290, 290, 1, 160),  # all 290 units in 2 parts of 145
        (13, 8, 1, 16),
        (16, 8, 1, 16),
    ],
)
def test_clients_of_similar_sizes_hold_equally_many_units(n, batch, repeats, physical):
    dp = DpSgd(repeats=repeats)
    assert held(dp, n, SGD(lr=1.0, batch=batch, steps=1, privacy=dp).rate_on(n)) == physical


def test_at_most_a_few_recordings_serve_all_clients():
    solver = SGD(lr=1.0, batch=128, steps=1, privacy=DpSgd())
    assert {held(solver.privacy, n, solver.rate_on(n)) for n in range(1000, 10_000)} <= {128, 144, 160}
    assert len({held(solver.privacy, n, solver.rate_on(n)) for n in range(1, 1000)}) <= 10


def test_unsettled_noise_is_refused():
    with pytest.raises(RecipeError, match="round 3, client 7, job train: the noise of this private fit is not settled"):
        weight_after([0], sigma=None)


# every architecture of the project, small, and what it is trained for
SMALL = {
    "unet": ("unet(widths=[8, 16], layers=1, attention=[4], groups=4, conditional=True)", Denoise()),
    "digits_unet": ("digits_unet(widths=[8, 16], groups=4)", Edm(augment=0.5)),
    "cifar_unet": ("cifar_unet(widths=[8, 16], layers=1, attention=[4], groups=4, dropout=0.0)", Denoise(target="v")),
    "mnist_unet": ("mnist_unet(widths=[8, 16], attention=[4], groups=4)", Denoise(target="x0", min_snr=5.0)),
    "convnext_unet": ("convnext_unet(dim=8)", Denoise(distance="huber")),
    "resnet": ("resnet(widths=[8, 16], blocks=[2, 1], groups=4)", Classify()),
    "cnn": ("cnn(widths=[8, 16], groups=4, projection=8)", Classify()),
    "mobilenet_v2": ("mobilenet_v2(stride=1)", Classify()),
    "linear_classifier": ("linear_classifier()", Classify()),
    "ensemble_of": ("ensemble_of(members=[cnn(widths=[8], groups=4), cnn(widths=[4], groups=2)])", Classify()),
    "cvae": ("cvae(widths=[8, 16], z=3, groups=2)", Reconstruct()),
}
# the first reads one of the above from a folder; the second draws images at the server and sees none; the third has batch
# statistics, which are refused; the others are frozen
ELSEWHERE = {"from_pretrained", "dense_generator", "projected", "headed", "sd", "vision", "unclip", "embedded"}


def test_every_network_is_tried():
    ours = {cls.name for cls in registry(Arch).values() if cls.__module__.startswith("effuse.models")}
    assert ours == SMALL.keys() | ELSEWHERE


def small(name: str) -> tuple[nn.Module, object]:
    """A network without zeros, which would hide gradients, and its task."""
    text, task = SMALL[name]
    with keyed(Stream((name,))):
        net = build_text(text, Arch, "model").resolved(Shape(8, 1, 4)).build()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return net, task


def drawn_batch(task, units: int, repeats: int, seed: int = 0) -> Batch:
    generator = Stream((seed,)).torch()
    rows = units * repeats
    x = torch.rand(rows, 1, 8, 8, generator=generator) * 2 - 1
    labels = torch.arange(rows) % 4
    return Batch(x, labels, task, task.draw(rows, x.shape[1:], labels, generator))


def step_of(net: nn.Module, task, clip: float, around=None) -> PrivateStep:
    solver = SGD(lr=0.1, batch=4, steps=1, privacy=DpSgd(clip=clip))
    work = private_work(
        solver, Shard.whole(Dataset(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), ("a",))), task
    )
    own = Net(net)
    options = {} if around is None else {"around": around}
    return PrivateStep(
        Step(own, solver.optimiser(list(own.params.values()), 0.1), work, {}, None, None, None, **options), work
    )


def summed(step: PrivateStep, batch: Batch, weight: Tensor) -> dict[str, Tensor]:
    """The clipped sum of one part."""
    step.accumulate(batch, weight)
    total = {k: t.clone() for k, t in step.summed.items()}
    for t in step.summed.values():
        t.zero_()
    return total


# layouts, and whether convolutions are unfolded, as on a GPU
WAYS = [(torch.contiguous_format, False), (torch.channels_last, False), (torch.channels_last, True)]


def unfold(monkeypatch, unfolded: bool) -> None:
    monkeypatch.setattr("effuse.machines.per_unit.UNFOLDED", {"cpu"} if unfolded else set())


@pytest.mark.parametrize("layout, unfolded", WAYS)
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_units_are_those_of_a_loop(name, repeats, layout, unfolded, monkeypatch):
    """Without a bound that matters, the sum with one unit's weight is the gradient of that unit's mean loss alone."""
    unfold(monkeypatch, unfolded)
    net, task = small(name)
    net.to(memory_format=layout)
    batch = drawn_batch(task, 3, repeats)
    batch.x = batch.x.contiguous(memory_format=layout)
    step, split = step_of(net, task, 1e6), by_unit(batch, repeats)
    params = dict(net.named_parameters())
    for unit in range(3):
        found = summed(step, split, torch.eye(3)[unit])
        rows = slice(unit * repeats, (unit + 1) * repeats)
        single = Batch(batch.x[rows], batch.labels[rows], task, {k: v[rows] for k, v in batch.drawn.items()})
        wanted = torch.autograd.grad(task.loss(Net(net), single), list(params.values()))
        scale = max(g.norm() for g in wanted)
        for (key, own), g in zip(found.items(), wanted, strict=True):
            assert (own - g).norm() <= 1e-4 * g.norm() + 1e-6 * scale, (unit, key)


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_no_operation_loops_over_units(name, unfolded, monkeypatch):
    """Torch warns where an operation has no rule for `vmap`. Its fused attention has none."""
    unfold(monkeypatch, unfolded)
    net, task = small(name)
    before = torch._C._debug_only_are_vmap_fallback_warnings_enabled()
    torch._C._debug_only_display_vmap_fallback_warnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            summed(step_of(net, task, 1.0), by_unit(drawn_batch(task, 3, 2), 2), torch.ones(3))
    finally:
        torch._C._debug_only_display_vmap_fallback_warnings(before)


def in_bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("layout, unfolded, around", [*((*way, None) for way in WAYS), (*WAYS[-1], in_bf16)])
@pytest.mark.parametrize("name", SMALL)
def test_one_unit_changes_the_sum_by_at_most_the_clip(name, layout, unfolded, around, monkeypatch):
    """With and without each of four units, also in bf16; units are clipped, so they change it by nearly that."""
    unfold(monkeypatch, unfolded)
    net, task = small(name)
    net.to(memory_format=layout)
    clip = 1e-3
    batch = drawn_batch(task, 4, 2)
    batch.x = batch.x.contiguous(memory_format=layout)
    step, split = step_of(net, task, clip, around), by_unit(batch, 2)
    whole = summed(step, split, torch.ones(4))
    for unit in range(4):
        less = summed(step, split, 1 - torch.eye(4)[unit])
        change = math.sqrt(sum((whole[k].double() - less[k].double()).square().sum().item() for k in whole))
        assert 0.98 * clip < change < clip * (1 + 1e-5)


@pytest.mark.parametrize("values", [63, 64, 1000, 2_300_000])
def test_a_long_gradient_is_clipped_to_the_bound_in_spite_of_rounding(values):
    """One value of 1 and many of 2e-4: added in turn in fp32, their squares of 4e-8 are lost beside the 1.

    Of 2.3 million the norm is sqrt(1 + 0.092) = 1.045, and torch's own is 0.5 % too small.
    """
    gradient = torch.full((1, values), 2e-4)
    gradient[0, 0] = 1.0
    total = clipped_sum({"a": gradient, "b": torch.ones(1, 1)}, torch.ones(1), 1.0)
    norm = math.sqrt(sum(t.double().square().sum().item() for t in total.values()))
    assert 1 - 1e-5 < norm <= 1


def test_gradients_whose_squares_are_zero_pass_only_below_the_least_clip():
    """1e-23 squared is zero in fp32. A thousand of these values have a norm of 3e-22: of no account beside 1e-6."""
    gradient = torch.full((1, 1000), 1e-23)
    total = clipped_sum({"a": gradient}, torch.ones(1), 1e-6)["a"]
    assert total.double().norm() < 1e-21
    for clip in ("1e-30", "1e30", "inf"):
        with pytest.raises(RecipeError, match="clip"):
            build_text(f"dp_sgd(clip={clip})", DpSgd, "privacy")


@pytest.mark.parametrize("around, unfolded", [(None, False), (in_bf16, False), (in_bf16, True)])
@pytest.mark.parametrize("name", SMALL)
def test_padding_and_its_content_change_no_bit(name, around, unfolded, monkeypatch):
    """Five units in a part of eight: the rows of padding hold other images in turn. A part of padding alone adds zero."""
    unfold(monkeypatch, unfolded)
    net, task = small(name)
    step, weight = step_of(net, task, 1e-3, around), (torch.arange(8) < 5).float()
    sums = []
    for seed in (1, 2):
        batch, other = drawn_batch(task, 8, 1), drawn_batch(task, 8, 1, seed)
        batch.x[5:], batch.labels[5:] = other.x[5:], other.labels[5:].flip(0)
        for k, v in batch.drawn.items():
            v[5:] = other.drawn[k][5:]
        sums.append(summed(step, by_unit(batch, 1), weight))
        nothing = summed(step, by_unit(batch, 1), torch.zeros(8))
        assert not any(t.any() for t in nothing.values())
    assert all(torch.equal(sums[0][k], sums[1][k]) for k in sums[0])
    assert any(t.any() for t in sums[0].values())


def test_keyed_noise_is_scaled_by_sigma_and_clip():
    """An empty batch at lr 1: the step is the noise alone, N(0, (sigma clip / qn)^2) = N(0, (1.5 * 2 / 4)^2).

    10,000 weights have a standard deviation of 0.75 with a standard error of 0.0053.
    """

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(10_000))

        def forward(self, x):
            return x * self.w.sum()

    net = Net(Wide())
    solver = SGD(lr=1.0, batch=4, steps=1, privacy=DpSgd(clip=2.0))
    work = private_work(solver, images(*[255] * 8), CoreTarget(), sigma=1.5)
    step = PrivateStep(Step(net, solver.optimiser([net.params["w"]], 1.0), work, {}, None, None, None), work)
    noise = KeyedNoise(Stream(("noise",)), CPU)
    step.finish(noise.normal(step.numbers, CPU), 1.5 * 2.0, work.private.expected)
    w = net.params["w"].detach()
    assert work.private.expected == 4 and abs(w.std() - 0.75) < 4 * 0.0053 and abs(w.mean()) < 4 * 0.0075
