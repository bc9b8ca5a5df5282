"""Private steps recorded on a GPU, in bf16 and with channels last, against eager ones."""

import contextlib

import pytest
import torch
from private_fits import Chosen, private, private_work
from toy import ALGORITHMS, ToyImages, toy_recipe

from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import UnitRows, Work
from effuse.core.noise import KeyedNoise
from effuse.core.params import Params
from effuse.core.privacy import Budget, DpSgd
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, Adam
from effuse.core.task import Batch
from effuse.fast import speed
from effuse.fast.graph.captured import Captured
from effuse.machines import private as of_machines
from effuse.machines.eager import Eager, Step
from effuse.machines.private import PrivateStep, by_unit
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.resnet import Resnet
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.transport.slots import in_slots

CUDA = torch.device("cuda")
SHAPE = Shape(16, 1, 10)
ARCHS = {
    "convnext": (ConvnextUnet(dim=16).resolved(SHAPE), Denoise()),
    "unet": (Unet(widths=(32, 64), layers=1, attention=(8,), groups=8, conditional=True).resolved(SHAPE), Denoise()),
    "odd unet": (Unet(widths=(24, 48), layers=1, attention=(16,), groups=8, heads=8).resolved(SHAPE), Denoise()),
    "resnet": (Resnet(widths=(16, 32), blocks=(1, 1), groups=8).resolved(SHAPE), Classify()),
}
GROUPS = [torch.arange(i, i + 3) for i in range(0, 297, 3)]


@pytest.fixture(autouse=True)
def no_reused_machines():
    """Every test makes its own recordings."""
    speed.REUSABLE.clear()


def speckled(n: int = 300, flip: bool = False) -> Shard:
    pixels = torch.randint(0, 256, (n, 1, 16, 16), generator=Stream((n,)).torch(), dtype=torch.uint8)
    return Shard.whole(Dataset(pixels, torch.arange(n) % 10, tuple("0123456789"), flip=flip, shift=2 * flip).to(CUDA))


def fit(machine, name, solver, shard=None, noise=None, owner=None, start=0, **rest):
    """A private fit from the same initial weights, and the change of the weights."""
    arch, task = ARCHS[name]
    model = arch.initial(Stream((start,))).to(CUDA)
    machine.release(owner)
    net = machine.load(model, owner)
    done, _ = machine.fit(net, private_work(solver, shard or speckled(), task, noise=noise, **rest))
    assert done.loss is None
    return Params.of(net) - model.params


def recorded() -> Captured:
    return Captured(CUDA, compiled=False)


@pytest.fixture
def in_fp32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch, "autocast", lambda *kind, **options: contextlib.nullcontext())


WORK = {
    "images": ({}, {}),
    "three draws of each image": ({"repeats": 3}, {}),
    "groups": ({"repeats": 3}, {"groups": GROUPS}),
    "parts": ({"physical": 16}, {}),
}


@pytest.mark.parametrize("kind", WORK)
@pytest.mark.parametrize("name", ARCHS)
def test_a_recorded_fit_in_fp32_is_the_eager_one(name, kind, in_fp32):
    """Three steps of about 64 units, mirrored at random, with momentum and a moving average."""
    dp, rest = WORK[kind]
    solver = SGD(lr=0.05, batch=64, steps=3, momentum=0.5, ema=0.5, privacy=DpSgd(clip=0.5, **dp))
    machines = Eager(CUDA), recorded()
    eager, fast = (fit(machine, name, solver, speckled(flip=True), **rest) for machine in machines)
    assert machines[1].captures == 1
    assert (eager - fast).norm() < 1e-3 * eager.norm() > 0


@pytest.mark.parametrize("name", ARCHS)
def test_clipped_sums_in_bf16_have_the_eager_direction_and_length(name):
    """One step without noise. bf16 has eight bits, and clipping keeps the lengths of units."""
    solver = SGD(lr=1.0, batch=64, steps=1, privacy=DpSgd(clip=0.1))
    eager, fast = (fit(m, name, solver, noise=Chosen(list(range(50)))) for m in (Eager(CUDA), recorded()))
    a, b = (torch.cat([t.flatten() for t in change.tensors]) for change in (eager, fast))
    assert torch.cosine_similarity(a, b, dim=0) > 0.98 and b.norm().item() == pytest.approx(a.norm().item(), rel=0.05)


def test_fused_optimisers_take_the_noisy_gradient():
    """Adam in a recording, channels last: a gradient with other strides would move the wrong weights."""
    solver = Adam(lr=1e-3, batch=64, steps=3, state="kept", privacy=DpSgd(clip=0.5))
    eager, fast = (fit(m, "unet", solver, sigma=0.1) for m in (Eager(CUDA), recorded()))
    a, b = (torch.cat([t.flatten() for t in change.tensors]) for change in (eager, fast))
    assert torch.cosine_similarity(a, b, dim=0) > 0.9


@pytest.mark.parametrize("name", ARCHS)
def test_a_private_fit_repeats_to_the_bit(name):
    """Twice on one machine and once on another."""
    solver, one = Adam(lr=1e-3, batch=64, steps=3, privacy=DpSgd(clip=0.5)), recorded()
    ends = [fit(machine, name, solver).digest() for machine in (one, one, recorded())]
    assert ends[1:] == ends[:1] * 2 and one.captures == 1


def test_clients_of_other_sizes_and_noise_share_a_recording():
    """1,000 to 6,000 images in batches of 128 hold 144 units: q, sigma, lr and data are no part of the recording."""
    machine, ends = recorded(), []
    for n, sigma in ((1000, 1.0), (6000, 0.5), (1000, 1.0)):
        solver = SGD(lr=0.1, batch=128, steps=2, privacy=DpSgd(clip=0.5))
        ends.append(fit(machine, "resnet", solver, speckled(n), sigma=sigma, seed=n).digest())
    assert machine.captures == 1 and ends[0] == ends[2] != ends[1]


def test_an_empty_batch_is_only_noised():
    """lr 1, sigma 2, clip 0.5 and q n = 60: every weight moves by N(0, 1/60). There are more than 100,000."""
    solver = SGD(lr=1.0, batch=64, steps=1, privacy=DpSgd(clip=0.5))
    noise = KeyedNoise(Stream(("noise",)), CUDA)
    noise.included = lambda units, rate: torch.zeros(units, dtype=torch.bool)
    change = torch.cat([t.flatten() for t in fit(recorded(), "unet", solver, noise=noise, sigma=2.0).tensors])
    assert len(change) > 100_000 and change.std().item() == pytest.approx(1 / 60, rel=0.01)
    assert abs(change.mean().item()) < 5 / 60 / len(change) ** 0.5


@pytest.mark.parametrize("name", ARCHS)
def test_padding_and_its_content_change_no_bit(name, monkeypatch):
    """Parts are padded with the first image of the shard, and here with others."""
    dealt, ends = of_machines.deal_units, []

    def otherwise(work):
        for parts in dealt(work):
            own = [p.positions[: p.real] for p in parts]
            yield [UnitRows(torch.cat([t, torch.arange(len(p.positions) - p.real)]), p.real) for t, p in zip(own, parts)]

    for deal in (dealt, otherwise):
        monkeypatch.setattr(of_machines, "deal_units", deal)
        ends.append(fit(recorded(), name, Adam(lr=1e-3, batch=64, steps=3, privacy=DpSgd(clip=0.5))).digest())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("groups", [None, GROUPS[:6]])
@pytest.mark.parametrize("name", ARCHS)
def test_one_unit_changes_a_recorded_sum_by_at_most_the_clip(name, groups):
    """In bf16: a step of lr q n without noise moves the weights by minus the clipped sum. Rounding adds less than 1e-4."""
    machine, clip = recorded(), 0.125
    for repeats in (1, 3):
        n = 6 if groups else 18
        solver = SGD(lr=float(n), batch=n, steps=1, privacy=DpSgd(clip=clip, repeats=repeats))
        for last in range(1, 5):
            a, b = (
                fit(machine, name, solver, speckled(18), noise=Chosen(list(range(k))), groups=groups)
                for k in (last, last + 1)
            )
            assert (b - a).norm() <= clip + 1e-4


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ARCHS)
def test_gradients_of_units_are_those_of_a_loop(name, layout, in_fp32):
    """Per-unit gradients by `vmap` on a GPU, two rows each, against a loop over single units."""
    (arch, task), machine, generator = ARCHS[name], Eager(CUDA), torch.Generator(CUDA).manual_seed(0)
    net = machine.load(arch.initial(Stream((0,))).to(CUDA))
    net.module.to(memory_format=layout)
    x = (torch.rand(8, 1, 16, 16, device=CUDA, generator=generator) * 2 - 1).contiguous(memory_format=layout)
    labels = torch.arange(8, device=CUDA)
    batch = Batch(x, labels, task, task.draw(8, x.shape[1:], labels, generator))
    solver = SGD(lr=0.1, batch=4, steps=1, privacy=DpSgd(clip=1e6))
    work = private_work(solver, speckled(8), task)
    step = PrivateStep(Step(net, solver.optimiser(list(net.params.values()), 0.1), work, {}, None, None, None), work)
    for unit in range(4):
        step.accumulate(by_unit(batch, 2), torch.eye(4, device=CUDA)[unit])
        rows = slice(2 * unit, 2 * unit + 2)
        single = Batch(x[rows], labels[rows], task, {k: v[rows] for k, v in batch.drawn.items()})
        wanted = torch.autograd.grad(task.loss(net, single), list(net.params.values()))
        scale = max(g.norm() for g in wanted)
        for (key, found), g in zip(step.summed.items(), wanted, strict=True):
            assert (found - g).norm() <= 1e-3 * g.norm() + 1e-5 * scale, (unit, key)
            found.zero_()


def test_private_slots_do_not_disturb_each_other():
    """The same fit alone, and three times in parallel: the same bits."""
    solver, machines = Adam(lr=1e-3, batch=64, steps=10, privacy=DpSgd(clip=0.5)), [recorded() for _ in range(3)]

    def one(machine, owner):
        return fit(machine, "unet", solver, owner=owner).digest()

    alone = one(machines[0], 0)
    for _ in range(2):  # the first time they record in turn; the second time they run in parallel
        assert [d for _, d in in_slots(one, range(3), machines, [m.stream for m in machines])] == [alone] * 3


@pytest.mark.parametrize("name", ["fedavg", "moon", "scaffold, adam", "a frozen network and columns"])
def test_messages_change_no_bit_of_a_private_run(name, tmp_path):
    """Simulator and loopback of a private federation, both recorded."""
    budget = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
    arch = ARCHS["unet"][0]
    recipe = toy_recipe(
        algorithm=private(ALGORITHMS[name]),
        budget=budget,
        model=arch,
        speed="graph",
        reproducible=True,
        data=ToyImages(n=120, side=16),
    )
    ends = [run(recipe, tmp_path / way, device="cuda", engine=way).weights_sha256 for way in ("simulator", "loopback")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("bf16", [False, True])
def test_batch_norm_is_recorded_where_ragged_batches_are_dropped(bf16, request):
    """300 images in batches of 64, two epochs of four: weights and running statistics against eager ones."""
    if not bf16:
        request.getfixturevalue("in_fp32")
    arch = Resnet(widths=(16, 32), blocks=(1, 1), norm="batch").resolved(SHAPE)
    model, ends = arch.initial(Stream((0,))).to(CUDA), []
    solver = SGD(lr=0.05, batch=64, epochs=2, ragged="drop")
    for machine in (Eager(CUDA), fast := recorded()):
        net = machine.load(model)
        work = Work(solver=solver, task=Classify(), shard=speckled(), lr=0.05, stream=Stream((0,)), place=0, where="here")
        machine.fit(net, work)
        ends.append({k: v.clone() for k, v in net.module.state_dict().items()})
    assert fast.captures == 1
    for key, value in ends[0].items():
        if key.endswith("num_batches_tracked"):
            assert ends[1][key] == value == 8
        else:
            assert (ends[1][key] - value).norm() <= (0.1 if bf16 else 1e-3) * value.norm() + 1e-4, key
