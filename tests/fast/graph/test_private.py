"""Recorded private fits, replayed on a CPU, against eager ones."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from memoriser import Memoriser
from private_fits import CPU, Chosen, private_work
from recorded import play_on_a_cpu
from torch import nn

from effuse.algorithms.fedprox import proximal
from effuse.algorithms.scaffold import corrected
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.errors import RecipeError
from effuse.core.fit import UnitRows
from effuse.core.params import Params
from effuse.core.privacy import DpSgd
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, Adam, AdamW
from effuse.fast.graph import captured, private
from effuse.fast.graph.captured import Captured
from effuse.fast.graph.private import PrivateSteps
from effuse.fast.ops.conv import AlignedConv2d
from effuse.machines import private as of_machines
from effuse.machines.eager import Eager
from effuse.models.unet import Unet
from effuse.tasks.denoise import Denoise

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")
TASK = Denoise()
# dense layers: a memory layout with channels last would add in another order
ARCH = Memoriser(width=16).resolved(Shape(4, 1, 2))
MODEL = ARCH.initial(Stream((0,)))
CONVOLUTIONS = Unet(widths=(8, 16), layers=1, attention=(4,), groups=8, conditional=True).resolved(Shape(4, 1, 2))
RATE = 2.0**-6  # exact in fp32, in which a recording has it


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    play_on_a_cpu(monkeypatch)


def speckled(n: int, seed: int = 0, flip: bool = False) -> Shard:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=Stream((seed,)).torch(), dtype=torch.uint8)
    return Shard.whole(Dataset(pixels, torch.arange(n) % 2, ("a", "b"), flip=flip, shift=int(flip), private=True))


def adam(steps=6, batch=8, **rest):
    dp = {k: rest.pop(k) for k in ("clip", "repeats", "physical", "sigma") if k in rest}
    return Adam(lr=RATE, batch=batch, steps=steps, privacy=DpSgd(**{"clip": 0.5} | dp), **rest)


def fit(machine, solver, shard, model=MODEL, noise=None, **rest):
    """The result of a private fit, its moments, and the weights after it."""
    machine.release(None)
    net = machine.load(model)
    done, moments = machine.fit(net, private_work(solver, shard, TASK, noise=noise and noise(), **rest))
    return done, moments, Params.of(net)


def weighted(net, batch, given):
    """A loss with a column, and with a frozen network's output."""
    apart = (net(*batch.task.inputs(batch)) - given["frozen"](*batch.task.inputs(batch))).square().flatten(1).mean(1)
    return batch.mean(batch.task.error(net(*batch.task.inputs(batch)), batch) * batch.columns["c"] + given["pull"] * apart)


GROUPS = [torch.arange(30)[i : i + 3] for i in range(0, 29, 3)]  # ten patients with three images
CASES = {
    "images": (adam(), {}),
    "images, three draws of each": (adam(repeats=3), {}),
    "groups": (adam(batch=4), {"groups": GROUPS}),
    "groups, three images of each": (adam(batch=4, repeats=3), {"groups": GROUPS}),
    "empty and long batches": (
        adam(physical=4, steps=4),
        {"noise": lambda: Chosen([], list(range(11)), [3], [], value=0.7)},
    ),
    "only empty batches": (adam(steps=2), {"noise": lambda: Chosen([], [], value=0.7)}),
    "fedprox": (
        SGD(lr=RATE, batch=8, steps=5, momentum=0.5, privacy=DpSgd(clip=0.5)),
        {"direction": proximal, "given": {"x": MODEL.params * 0.5, "mu": 0.25}},
    ),
    "scaffold": (
        adam(),
        {"direction": corrected, "given": {"c": MODEL.params * 0.1, "c_i": MODEL.params * 0.2}, "report_gradient": True},
    ),
    "a companion and a column": (adam(), {"loss": weighted, "given": {"frozen": MODEL, "pull": 0.5}}),
    "a moving average": (adam(ema=0.5), {}),
    "a moving average that continues": (adam(ema=0.5), {"average": MODEL.params * 0.5}),
    "moments that are kept": (adam(state="kept"), {}),
    "clipped after the noise": (dataclasses.replace(adam(), clip=0.125), {}),
    "adamw": (AdamW(lr=RATE, batch=8, steps=5, weight_decay=0.25, privacy=DpSgd(clip=0.5)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_fit_is_the_eager_one_to_the_bit(name):
    """Two fits in turn on one recording, the second on other images and with moments handed on, if they are kept."""
    solver, rest = CASES[name]
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    moments = [None, None]
    for seed in (0, 1):
        shard = speckled(30, seed, flip=True).with_columns(c=torch.linspace(0, 1, 30))
        found = [fit(m, solver, shard, seed=seed, optimiser=o, **rest) for m, o in zip((eager, fast), moments)]
        (a, m, y), (b, n, z) = found
        assert (a.steps, a.images, a.loss, a.noted) == (b.steps, b.images, None, None)
        pairs = ((m, n), (y, z), (a.average, b.average), (a.gradient, b.gradient))
        assert all(p.keys() == q.keys() and p.digest() == q.digest() for p, q in pairs if p is not None)
        assert all((p is None) == (q is None) for p, q in pairs)
        assert y.digest() != MODEL.params.digest()
        moments = [m, n]
    assert fast.captures == 1 and eager.meter.images == fast.meter.images


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_recorded_fit_of_convolutions_is_the_eager_one_up_to_rounding(repeats):
    """With channels last a convolution adds in another order. Attention and class embeddings are in it."""
    model, solver = CONVOLUTIONS.initial(Stream((0,))), adam(repeats=repeats)
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    (_, _, y), (_, _, z) = (fit(m, solver, speckled(20), model) for m in (eager, fast))
    assert (y - z).norm() < 1e-3 * (y - model.params).norm() and fast.captures == 1


def test_clients_of_other_sizes_rates_and_noise_share_a_recording():
    """9 to 40 images: q from 1/2 to 1/5, sigma from 0.5 to 2. All hold 16 units, and each has its own eager weights."""
    fast, eager, ends = Captured(CPU, compiled=False), Eager(CPU), []
    for i, (n, sigma, lr) in enumerate([(9, 0.5, RATE), (40, 2.0, RATE), (24, 1.0, RATE / 2), (9, 0.5, RATE)]):
        solver = dataclasses.replace(adam(steps=3 + i % 3, sigma=sigma), lr=lr)
        (_, _, y), (_, _, z) = (fit(m, solver, speckled(n, n), sigma=sigma, seed=n) for m in (eager, fast))
        assert y.digest() == z.digest()
        ends.append(z.digest())
    assert fast.captures == 1 and ends[3] == ends[0] and len(set(ends)) == 3


def test_clips_repeats_and_parts_have_recordings_of_their_own():
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    solvers = [adam(), adam(clip=0.25), adam(repeats=2), adam(physical=4), adam(sigma=3.0), adam(steps=2), adam(batch=9)]
    for solver in solvers:
        (_, _, y), (_, _, z) = (fit(m, solver, speckled(20)) for m in (eager, fast))
        assert y.digest() == z.digest()
    plain = dataclasses.replace(adam(), privacy=None)
    fast.fit(fast.load(MODEL), dataclasses.replace(private_work(adam(), speckled(20), TASK), solver=plain, private=None))
    assert fast.captures == 6, "the first four, another batch (of the solver's key), and a plain step"


def test_an_interrupted_fit_leaves_nothing_to_the_next():
    """Stopped after the first of two parts: their sum must not enter another client's first step."""
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    solver, batches = adam(physical=4, steps=2), [list(range(8)), [1]]
    fast.meter.stopped = True
    with pytest.raises(KeyboardInterrupt):
        fit(fast, solver, speckled(20), noise=lambda: Chosen(*batches))
    (step,) = fast._steps.values()
    assert any(t.any() for t in step.summed)
    fast.meter.stopped = False
    ends = [fit(m, solver, speckled(20), noise=lambda: Chosen(*batches))[2] for m in (eager, fast)]
    assert ends[0].digest() == ends[1].digest()


@pytest.mark.parametrize("machine", [Eager, lambda device: Captured(device, compiled=False)])
@pytest.mark.parametrize("bf16", [False, True])
def test_padding_and_its_content_change_no_bit(machine, bf16, monkeypatch):
    """Parts of 16 are padded with the first image of the shard, and here with others."""
    if bf16:
        monkeypatch.setattr(private, "in_bf16", lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    dealt, ends, padded = of_machines.deal_units, [], 0
    model = CONVOLUTIONS.initial(Stream((0,)))

    def otherwise(work):
        nonlocal padded
        for parts in dealt(work):
            for part in parts:
                padded += len(part.positions) - part.real
            yield [
                UnitRows(torch.cat([p.positions[: p.real], torch.arange(len(p.positions) - p.real)]), p.real) for p in parts
            ]

    for deal in (dealt, otherwise):
        monkeypatch.setattr(of_machines, "deal_units", deal)
        ends.append(fit(machine(CPU), adam(), speckled(20), model)[2].digest())
    assert ends[0] == ends[1] and padded > 20


@pytest.mark.parametrize("groups", [None, [torch.tensor([0, 4, 5]), torch.tensor([1]), torch.tensor([2, 3])]])
@pytest.mark.parametrize("bf16", [False, True])
def test_one_unit_changes_a_recorded_sum_by_at_most_the_clip(bf16, groups, monkeypatch):
    """One step of lr q n without noise moves the weights by minus the clipped sum, with and without the last unit.

    Weights below 1 are rounded by at most 2^-25 each, together less than 1e-5.
    """
    if bf16:
        monkeypatch.setattr(private, "in_bf16", lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    model, fast, clip = CONVOLUTIONS.initial(Stream((0,))), Captured(CPU, compiled=False), 0.125
    for repeats, last in itertools.product((1, 3), (1, 2)):
        solver = SGD(lr=3.0 if groups else 6.0, batch=6, steps=1, privacy=DpSgd(clip=clip, repeats=repeats))
        ends = [
            fit(fast, solver, speckled(6), model, noise=lambda chosen=chosen: Chosen(chosen), groups=groups)[2]
            for chosen in (list(range(last)), list(range(last + 1)))
        ]
        change = (ends[1] - ends[0]).norm()
        assert 0.9 * clip < change <= clip + 1e-5
    assert fast.captures == 2, "one for each number of repeats"


def test_networks_with_dropout_train_eagerly():
    """The units of a batch would share masks that are keyed by place."""
    arch = dataclasses.replace(CONVOLUTIONS, dropout=0.5)
    model, fast, eager = arch.initial(Stream((0,))), Captured(CPU, compiled=False), Eager(CPU)
    ends = [fit(m, adam(), speckled(20), model)[2].digest() for m in (eager, fast)]
    assert ends[0] == ends[1] and fast.captures == 0


def test_networks_of_private_fits_have_torchs_own_operations(monkeypatch):
    """Where our kernels run, too, and in a network that the loss calls: they have no rules for `vmap`."""
    monkeypatch.setattr(captured, "available", lambda device: True)
    made = []
    monkeypatch.setattr(Captured, "faster", lambda self, module: pytest.fail("compiled"))
    monkeypatch.setattr(PrivateSteps, "begin", lambda self, *rest: made.append(self))
    fast, model = Captured(CPU), CONVOLUTIONS.initial(Stream((0,)))
    shard = speckled(20).with_columns(c=torch.ones(20))
    fit(fast, adam(), shard, model, loss=weighted, given={"frozen": model, "pull": 0.5})
    for net in (made[0].net.module, made[0].given["frozen"].module):
        kinds = {type(m) for m in net.modules()}
        assert nn.Conv2d in kinds and AlignedConv2d not in kinds and not any("Fused" in k.__name__ for k in kinds)
        assert net.mid_block.resnets[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_private_recording_does_not_hold_the_data_it_was_made_on():
    machine, shard, noise = Captured(CPU, compiled=False), speckled(20), Chosen([1], [2])
    images, batches = weakref.ref(shard.dataset.images), weakref.ref(noise)
    fit(machine, adam(steps=2), shard, noise=lambda noise=noise: noise)
    assert machine.captures == 1
    del shard, noise
    gc.collect()
    assert images() is None and batches() is None


def test_unsettled_noise_is_refused():
    with pytest.raises(RecipeError, match="the noise of this private fit is not settled"):
        fit(Captured(CPU, compiled=False), adam(), speckled(20), sigma=None)
