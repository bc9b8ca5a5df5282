"""The recorded step's static buffers, on a CPU: a replay calls the recorded function again."""

import dataclasses
import functools
import gc
import weakref

import pytest
import torch
from recorded import play_on_a_cpu, taken
from torch._dynamo.utils import counters
from toy import ToyImages, ToyUnet

from effuse.core.data import Shape, Shard
from effuse.core.fit import Work
from effuse.core.model import Arch
from effuse.core.params import Buffers, Params
from effuse.core.rng import SETTINGS, Stream
from effuse.core.solvers import SGD, Adam, AdamW, CosineDecay
from effuse.core.spec import spec
from effuse.diffusion.decode import Decode
from effuse.diffusion.heun import Heun
from effuse.diffusion.samplers import Ddim, DpmSolver
from effuse.fast.graph import captured
from effuse.fast.graph.captured import Captured
from effuse.fast.graph.recording import WARM_UP
from effuse.fast.ops.dropout import KeyedNet
from effuse.machines.eager import Eager
from effuse.models.cvae import Cvae
from effuse.models.resnet import Resnet
from effuse.models.unet import Unet
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.reconstruct import Reconstruct

CPU, TASK = torch.device("cpu"), Denoise()
ARCH = Unet(widths=(8, 16), layers=1, attention=(), middle_attention=False, groups=8).resolved(Shape(8, 1, 2))
DROPPING = dataclasses.replace(ARCH, dropout=0.3)
MODEL = ARCH.initial(Stream((0,)))
SHARD = Shard.whole(ToyImages(n=50, side=8).load("train"))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    play_on_a_cpu(monkeypatch)


def blended(grads, params, given):
    return {k: given["alpha"] * g + (1 - given["alpha"]) * given["delta"][k] for k, g in grads.items()}


def fit(machine, seed, rho, alpha):
    """Seven steps, every fourth with a smaller batch: the fit's result, and the weights after it."""
    machine.release(None)
    net = machine.load(MODEL)
    work = Work(
        solver=SGD(lr=0.05, batch=16, steps=7),
        task=TASK,
        shard=SHARD,
        lr=0.05,
        stream=Stream((seed,)),
        place=0,
        where="here",
        uphill=rho,
        report_gradient=True,
        direction=blended,
        given={"alpha": alpha, "delta": MODEL.params * 0.01},
    )
    return machine.fit(net, work)[0], Params.of(net)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_fits_one_after_another_are_the_eager_ones():
    """Fits with different seeds, rho and coefficients share two recordings; sums and coefficients are reset for each."""
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    for seed, (rho, alpha) in enumerate([(0.1, 0.1), (1.0, 0.5), (None, 0.5), (0.1, 0.1), (None, 0.9)]):
        (a, y), (b, z) = fit(eager, seed, rho, alpha), fit(fast, seed, rho, alpha)
        assert b.loss == pytest.approx(a.loss, rel=1e-5) and (a.steps, a.images) == (b.steps, b.images)
        assert (a.gradient - b.gradient).norm() < 1e-4 * a.gradient.norm()
        assert (y - z).norm() < 1e-4 * (y - MODEL.params).norm()
        assert all(t.is_contiguous() for t in b.gradient.tensors)
    assert fast.captures == 2, "with and without a second pass"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_frozen_layers_stay_frozen():
    """All layers trained, then all but the last, then all: the same as eager, on one machine."""
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    for frozen in (False, True, False):
        found = []
        for machine in (eager, fast):
            machine.release(None)
            net = machine.load(MODEL)
            net.module.conv_out.requires_grad_(not frozen)
            work = Work(
                solver=SGD(lr=0.05, batch=16, steps=4),
                task=TASK,
                shard=SHARD,
                lr=0.05,
                stream=Stream((0,)),
                place=0,
                where="here",
            )
            machine.fit(net, work)
            found.append(Params.of(net))
            assert torch.equal(net.module.conv_out.weight, MODEL.params["conv_out.weight"]) == frozen
        assert (found[0] - found[1]).norm() < 1e-4 * (found[0] - MODEL.params).norm()
    assert fast.captures == 2


# each differs from the first in one property of a recording
SOLVERS = [
    Adam(lr=1e-2, batch=16, steps=4),
    Adam(lr=1e-2, batch=16, steps=4, betas=(0.5, 0.9)),
    Adam(lr=1e-2, batch=16, steps=4, eps=1e-2),
    Adam(lr=1e-2, batch=16, steps=4, weight_decay=0.1),
    AdamW(lr=1e-2, batch=16, steps=4, weight_decay=5.0),
    SGD(lr=1e-2, batch=16, steps=4),
    SGD(lr=1e-2, batch=16, steps=4, clip=0.01),
    SGD(lr=1e-2, batch=16, steps=4, momentum=0.9),
    SGD(lr=1e-2, batch=16, steps=4, weight_decay=0.5),
]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_solvers_do_not_share_recordings():
    """Nine solvers, twice, on one machine. The second time rates and numbers of steps differ, and nothing is recorded."""
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    for again, solver in [(again, solver) for again in (False, True) for solver in SOLVERS]:
        solver = dataclasses.replace(solver, steps=6 if again else 4, state="kept", schedule=CosineDecay())
        found = []
        for machine in (eager, fast):
            machine.release(None)
            net = machine.load(MODEL)
            work = Work(
                solver=solver,
                task=TASK,
                shard=SHARD,
                lr=solver.lr / (1 + again),
                stream=Stream((again,)),
                place=0,
                where="here",
            )
            found.append((machine.fit(net, work), Params.of(net)))
        (((a, m), y), ((b, n), z)) = found
        assert b.loss == pytest.approx(a.loss, rel=1e-4) and (y - z).norm() < 0.05 * (y - MODEL.params).norm(), solver
        assert (
            m - n
        ).norm() <= 0.05 * m.norm()  # where a gradient is zero but for rounding, Adam makes steps of full length
    assert fast.captures == len(SOLVERS)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("sampler", [Ddim(steps=4, batch=4), DpmSolver(steps=6, batch=4)], ids=str)
@pytest.mark.parametrize("target", ["epsilon", "x0"])
def test_draws_are_the_eager_ones_and_a_last_batch_needs_no_recording(sampler, target):
    """Ten images, four at a time, of two networks in turn.

    With target x0, a two-step sampler keeps the last output itself.
    """
    task = Denoise(target=target)
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    for seed in (0, 1, 0):
        model = ARCH.initial(Stream((seed,)))
        a, b = (m.generate(m.load(model), task, 10, sampler, None, Stream((seed, 5))).pixels for m in (eager, fast))
        assert torch.allclose(a, b, atol=1e-4)
    assert fast.captures == 1


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("sampler", [Heun(steps=3, batch=4), DpmSolver(steps=4, batch=4)], ids=str)
def test_noise_levels_and_time_steps_have_recordings_of_their_own(sampler):
    """EDM's ln(sigma) / 4 would be cut to 0 or -1 in a buffer of integers. Drawn before and after by time steps."""
    fast, eager, model = Captured(CPU, compiled=False), Eager(CPU), ARCH.initial(Stream((0,)))
    for task, chosen in ((TASK, Ddim(steps=4, batch=4)), (Edm(), sampler), (TASK, Ddim(steps=4, batch=4))):
        a, b = (m.generate(m.load(model), task, 10, chosen, None, Stream((5,))).pixels for m in (eager, fast))
        assert torch.allclose(a, b, atol=1e-4)
    assert fast.captures == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_classes_and_guidance_are_drawn_as_eagerly(guidance):
    """Ten images of classes 0 and 1 in turn. With guidance each step evaluates with the class and without."""
    arch = dataclasses.replace(ARCH, conditional=True)
    model, labels = arch.initial(Stream((0,))), torch.arange(10) % 2
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    sampler = Ddim(steps=4, batch=4, guidance=guidance)
    drawn = [m.generate(m.load(model), TASK, 10, sampler, labels, Stream((5,))).pixels for m in (eager, fast)]
    assert torch.allclose(*drawn, atol=1e-4) and fast.captures == 1
    other = fast.generate(fast.load(model), TASK, 10, sampler, 1 - labels, Stream((5,))).pixels
    assert not torch.allclose(other, drawn[1], atol=1e-3), "the class has an effect"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autoencoders_are_trained_and_decoded_as_eagerly():
    """Four steps and ten images, four at a time: one recording to train, and one to draw from whole and last batches."""
    arch, task = Cvae(widths=(4, 8), z=3, groups=2).resolved(Shape(8, 1, 2)), Reconstruct()
    model, labels, found = arch.initial(Stream((0,))), torch.arange(10) % 2, []
    fast = Captured(CPU, compiled=False)
    for machine in (Eager(CPU), fast):
        net = machine.load(model)
        loss = machine.fit(net, plain_work(SGD(lr=1e-3, batch=16, steps=4), task=task))[0].loss
        drawn = machine.generate(net, task, 10, Decode(batch=4), labels, Stream((5,))).pixels
        found.append((loss, Params.of(net), drawn))
    (a, y, images), (b, z, ours) = found
    assert b == pytest.approx(a, rel=1e-5) and (y - z).norm() < 1e-4 * (y - model.params).norm()
    assert torch.allclose(images, ours, atol=1e-4) and fast.captures == 2
    other = fast.generate(fast.load(model), task, 10, Decode(batch=4), 1 - labels, Stream((5,))).pixels
    assert not torch.allclose(other, ours, atol=1e-3), "the class has an effect"


NORMED = Resnet(widths=(4, 8), blocks=(1, 1), norm="batch").resolved(Shape(8, 1, 2))


def normed(machine, solver, model, seed=0, n=50, **rest):
    """A fit of a classifier with BatchNorm: the result, and all values after it, running statistics among them."""
    machine.release(None)
    net = machine.load(model)
    shard = Shard(SHARD.dataset, torch.arange(n))
    values = {"task": Classify(), "shard": shard, "stream": Stream((seed,))}
    return machine.fit(net, plain_work(solver, **values | rest))[0], {
        k: v.clone() for k, v in net.module.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    "solver, captures",
    [
        (SGD(lr=0.1, batch=16, epochs=1), 0),  # the last batch has two images; padded to 16, one would count 15 times
        (SGD(lr=0.1, batch=16, steps=3), 1),
        (SGD(lr=0.1, batch=16, epochs=2, ragged="drop"), 1),
        (SGD(lr=0.1, batch=25, epochs=2), 1),
        (SGD(lr=0.1, batch=64, epochs=2, ragged="drop"), 0),  # the only batch is smaller
    ],
)
def test_batch_norm_is_recorded_where_no_batch_is_padded(solver, captures):
    """Two fits in turn, the second of another model: weights, running statistics and counters are the eager ones."""
    fast, eager = Captured(CPU, compiled=False), Eager(CPU)
    for seed in (0, 1):
        model = NORMED.initial(Stream((seed,)))
        (a, y), (b, z) = (normed(m, solver, model, seed) for m in (eager, fast))
        assert (a.steps, a.images) == (b.steps, b.images) and b.loss == pytest.approx(a.loss, rel=1e-4)
        for k, v in y.items():
            torch.testing.assert_close(z[k], v, rtol=1e-3, atol=1e-5)
        counters = [v.item() for k, v in z.items() if k.endswith("num_batches_tracked")]
        assert counters and set(counters) == {a.steps}
        assert any((z[k] - model.buffers[k]).abs().max() > 0.01 for k in model.buffers if k.endswith("running_mean"))
    assert fast.captures == captures


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_eager_work_and_recordings_of_other_slots_take_turns():
    """A recording changes settings of the whole process: nothing eager may run beside it. Replays need no settings."""
    machine, seen = Captured(CPU, compiled=False), []

    def watched(net, batch, given):
        seen.append(taken(SETTINGS))
        return batch.task.loss(net, batch)

    model = NORMED.initial(Stream((0,)))
    normed(machine, SGD(lr=0.1, batch=16, epochs=1), model, loss=watched)  # its last batch is smaller
    assert seen == [True] * 4
    seen.clear()
    normed(machine, SGD(lr=0.1, batch=16, steps=3), model, loss=watched)
    assert seen == [True] * WARM_UP + [False] * 3
    net = machine.load(model)
    machine.apply(net, lambda net, batch, given: watched(net, batch, given).expand(50), Classify(), SHARD, {}, Stream((0,)))
    assert seen[-1] and not taken(SETTINGS)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_one_recording_of_batch_norm_serves_clients_of_other_sizes():
    """50, 33 and 20 images in batches of 16, and a gradient without an update, which has a recording of its own."""
    fast, eager, model = Captured(CPU, compiled=False), Eager(CPU), NORMED.initial(Stream((0,)))
    solver = SGD(lr=0.1, batch=16, epochs=2, ragged="drop")
    for n in (50, 33, 20):
        (a, y), (b, z) = (normed(m, solver, model, n, n) for m in (eager, fast))
        assert (a.steps, a.images) == (b.steps, b.images) == (2 * (n // 16), 32 * (n // 16))
        for k, v in y.items():
            torch.testing.assert_close(z[k], v, rtol=1e-3, atol=1e-5)
    assert fast.captures == 1
    (a, y), (b, z) = (normed(m, solver, model, report_gradient=True, updates=False) for m in (eager, fast))
    assert (a.gradient - b.gradient).norm() < 1e-4 * a.gradient.norm() and fast.captures == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_recording_does_not_hold_the_data_it_was_made_on():
    machine, train = Captured(CPU, compiled=False), ToyImages(n=50, side=8).load("train")
    images, given = weakref.ref(train.images), MODEL.params * 0.01
    work = Work(
        solver=SGD(lr=0.05, batch=16, steps=1),
        task=TASK,
        shard=Shard.whole(train),
        lr=0.05,
        stream=Stream((0,)),
        place=0,
        where="here",
        direction=blended,
        given={"alpha": 0.5, "delta": given},
    )
    machine.fit(machine.load(MODEL), work)
    delta = weakref.ref(given.tensors[0])
    del train, work, given
    gc.collect()
    assert images() is None and delta() is None and machine.captures == 1


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_recordings_unused_in_a_whole_run_are_dropped():
    """Runs of methods A, B, B and A: A's recording exists until the second run ends, and is made again in the fourth."""
    machine, made = Captured(CPU, compiled=False), []
    for rho in (None, 0.1, 0.1, None):
        machine.reset_for([ARCH])
        fit(machine, 0, rho, 0.5)
        made.append((machine.captures, len(machine._steps)))
    assert made == [(1, 1), (2, 2), (2, 1), (3, 2)]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_many_networks_of_a_process_are_all_compiled(monkeypatch):
    """Five widths, each to train and to sample: ten variants of one forward pass; torch's default limit is eight."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    machine = Captured(CPU)
    machine.recorder.submit(torch._dynamo.reset).result()
    before = counters["frames"]["ok"]
    for width in range(4, 9):
        arch = ToyUnet(width=width).resolved(Shape(4, 1, 2))
        net = machine.load(arch.initial(Stream((0,))))
        work = Work(
            solver=Adam(lr=1e-3, batch=4, steps=1),
            task=TASK,
            shard=Shard.whole(ToyImages(n=8).load("train")),
            lr=1e-3,
            stream=Stream((0,)),
            place=0,
            where="here",
        )
        machine.fit(net, work)
        machine.generate(net, TASK, 2, Ddim(steps=4, batch=2), None, Stream((1,)))
    assert counters["frames"]["ok"] - before == 10


def losses(machine, seed, rho=None):
    """The loss of three steps of a network with dropout, and the digest of the weights after them."""
    machine.release(None)
    net = machine.load(DROPPING.initial(Stream((0,))))
    shard = Shard.whole(ToyImages(n=50, side=8).load("train"))
    work = Work(
        solver=SGD(lr=0.05, batch=16, steps=3),
        task=TASK,
        shard=shard,
        lr=0.05,
        stream=Stream((seed,)),
        place=0,
        where="here",
        uphill=rho,
    )
    return machine.fit(net, work)[0].loss, Params.of(net).digest()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_dropout_belongs_to_the_client():
    """Keys 0, 1 and 0 on one recording, and 0 on another machine: order, machine and torch's generator do not matter."""
    one, two = Captured(CPU, compiled=False), Captured(CPU, compiled=False)
    torch.manual_seed(1)
    a, b, c = (losses(one, seed) for seed in (0, 1, 0))
    torch.manual_seed(2)
    assert losses(two, 0) == a == c != b
    assert one.captures == 1 and not any(step.draws for step in one._steps.values())


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_every_pass_has_a_mask_of_its_own():
    """Three steps advance the seed three times; SAM steps, with two passes, six times."""
    for rho, passes in ((None, 3), (0.1, 6)):
        machine = Captured(CPU, compiled=False)
        losses(machine, 0, rho)
        (step,) = machine._steps.values()
        assert step.seed.item() == Stream((0,)).child("dropout").seed + passes


def test_other_weights_have_other_masks():
    """MOON's three networks see one batch. As in plain torch, each must have its own mask."""
    module = captured.for_tensor_cores(DROPPING.build())
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.02 * torch.randn_like(p))
    net, inputs = KeyedNet(module), (torch.randn(2, 1, 8, 8), torch.tensor([1, 2]))
    first, second, third = net(*inputs), net(*inputs, params=net.params), net(*inputs, params=net.params)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    module.eval()
    assert torch.equal(net(*inputs), net(*inputs, params=net.params))


def beside_other_weights(net, batch, given):
    t = torch.zeros(len(batch.labels), dtype=torch.int64)
    return (net(batch.x, t) - net(batch.x, t, params=given["start"])).square().mean()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_masks_of_other_weights_do_not_depend_on_earlier_fits():
    """Two fits of one key on one recording: the second repeats the first."""
    machine, model, found = Captured(CPU, compiled=False), DROPPING.initial(Stream((0,))), []
    model = dataclasses.replace(model, params=model.params.map(lambda p: p + 0.02))  # the last layer starts at zero
    for _ in range(2):
        machine.release(None)
        work = Work(
            solver=SGD(lr=0.05, batch=16, steps=3),
            task=TASK,
            shard=SHARD,
            lr=0.05,
            stream=Stream((0,)),
            place=0,
            where="here",
            loss=beside_other_weights,
            given={"start": model.params},
        )
        found.append(machine.fit(machine.load(model), work)[0].loss)
    assert found[0] == found[1] > 0


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_fused_fits_are_the_plain_ones(monkeypatch):
    """The fused operations in plain torch: the same losses up to rounding; the machine's `kernels` select them."""
    monkeypatch.setattr(captured, "available", lambda device: True)
    fused, plain = (Captured(CPU, compiled=False, kernels=k) for k in (("norm",), ()))
    assert losses(fused, 0)[0] == pytest.approx(losses(plain, 0)[0], rel=1e-5)
    kinds = [
        {type(m).__name__ for step in machine._steps.values() for m in step.module.modules()} for machine in (fused, plain)
    ]
    assert "FusedResnetBlock" in kinds[0] and "FusedResnetBlock" not in kinds[1]
    assert Captured(CPU).kernels == set(captured.KERNELS)


def test_without_a_gpu_there_are_no_kernels():
    assert Captured(CPU).kernels == frozenset()


def test_the_compiler_has_the_options_that_are_set():
    """A torch without one would silently compile slower steps, or steps that another process does not repeat."""
    assert hasattr(torch._inductor.config, captured.TRIES_TILINGS) and hasattr(torch._inductor.config, "deterministic")


class Scaled(torch.nn.Module):
    """A layer behind a number that is saved and not trained."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(1, 1, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, t, labels=None):
        return self.down(x) * self.scale


@spec
class ScaledArch(Arch):
    def build(self):
        return Scaled()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_saved_buffers_reach_the_recording():
    """At a scale of 3, and of 1 again on the same recording, the losses are the eager ones."""
    arch = ScaledArch(side=8, channels=1, classes=2)
    start, losses = arch.initial(Stream((0,))), {}
    for machine in (Eager(CPU), Captured(CPU, compiled=False)):
        for scale in (3.0, 1.0):
            model = dataclasses.replace(start, buffers=Buffers({"scale": torch.tensor(scale)}))
            machine.release(None)
            work = plain_work(SGD(lr=0.01, batch=16, steps=3))
            losses[type(machine), scale] = machine.fit(machine.load(model), work)[0].loss
    for scale in (3.0, 1.0):
        assert losses[Captured, scale] == pytest.approx(losses[Eager, scale], rel=1e-5)
    assert losses[Eager, 3.0] != pytest.approx(losses[Eager, 1.0], rel=1e-2)


def plain_work(solver, **rest):
    values = {"task": TASK, "shard": SHARD, "lr": solver.lr, "stream": Stream((0,)), "place": 0, "where": "here"}
    return Work(solver=solver, **values | rest)


def times(net, batch, given):
    return batch.task.loss(net, batch) * given["by"].float().mean()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_what_a_fit_is_handed_has_its_type_in_the_recording():
    """Twice the loss by a whole number, half of it by a float of the same shape: two recordings."""
    fast, losses = Captured(CPU, compiled=False), []
    for by in (torch.tensor([2]), torch.tensor([0.5])):
        fast.release(None)
        work = plain_work(SGD(lr=1e-9, batch=16, steps=3), loss=times, given={"by": by})
        losses.append(fast.fit(fast.load(MODEL), work)[0].loss)
    assert losses[0] == pytest.approx(4 * losses[1], rel=1e-4) and fast.captures == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_moments_of_a_layer_that_is_frozen_later_are_kept():
    """All layers, all but the last, all again, with moments handed on: weights and moments are the eager ones."""
    solver, ends = Adam(lr=1e-2, batch=16, steps=3, state="kept"), []
    for machine in (Eager(CPU), Captured(CPU, compiled=False)):
        model, moments = MODEL, None
        for frozen in (False, True, False):
            machine.release(None)
            net = machine.load(model)
            net.module.conv_out.requires_grad_(not frozen)
            moments = machine.fit(net, plain_work(solver, optimiser=moments))[1]
            model = dataclasses.replace(model, params=Params.of(net))
        ends.append((model.params, moments))
    (y, m), (z, n) = ends
    assert m.keys() == n.keys() and m["step/conv_out.weight"].item() == n["step/conv_out.weight"].item() == 6
    assert (y - z).norm() < 0.05 * (y - MODEL.params).norm()


def scored(net, batch, given):
    return batch.task.loss(net, batch) + 0.0 * sum(c.float().mean() for c in batch.columns.values())


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_tasks_columns_and_gradients_have_recordings_of_their_own():
    """One network by two tasks, with columns of two layouts, and looked at without an update: five recordings, as eager."""
    fast, eager, solver = Captured(CPU, compiled=False), Eager(CPU), SGD(lr=0.01, batch=16, steps=3)
    vectors, numbers = SHARD.with_columns(a=torch.ones(50, 3)), SHARD.with_columns(a=torch.ones(50, dtype=torch.int64))
    fits = [
        {},
        {"task": Denoise(target="x0")},
        {"loss": scored, "shard": vectors},
        {"loss": scored, "shard": numbers},
        {"report_gradient": True, "updates": False},
    ]
    for rest in fits:
        found = []
        for machine in (eager, fast):
            machine.release(None)
            net = machine.load(MODEL)
            found.append((machine.fit(net, plain_work(solver, **rest))[0].loss, Params.of(net)))
        (a, y), (b, z) = found
        assert b == pytest.approx(a, rel=1e-5) and (y - z).norm() <= 1e-4 * (y - MODEL.params).norm()
    assert fast.captures == len(fits)
