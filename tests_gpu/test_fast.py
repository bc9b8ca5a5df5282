"""The captured machine against the eager one, for every algorithm."""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from recorded import assert_alike, noted_recordings, outcome, ragged_recipe
from toy import ALGORITHMS, ToyImages, toy_recipe

from effuse.algorithms.fedddpm import FedDDPM
from effuse.algorithms.feddifrc import unlabelled
from effuse.algorithms.fedema import byol
from effuse.algorithms.fedlid import contrasted
from effuse.algorithms.fedphd import FedPhD, sparsifying
from effuse.algorithms.moon import contrastive
from effuse.core.capabilities import Draws
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import Work
from effuse.core.params import Params
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, Adam
from effuse.core.task import Batch
from effuse.data.dirichlet import QuantitySkew
from effuse.diffusion.heun import Heun
from effuse.diffusion.samplers import Ancestral, DpmSolver
from effuse.fast import speed
from effuse.fast.graph.captured import Captured
from effuse.machines.eager import Eager
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.projected import Projected
from effuse.models.resnet import Resnet
from effuse.models.unet import Unet
from effuse.pruning.prune import cut, group_weights
from effuse.recipes import find_table
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.views import Views
from effuse.tools.reproduce import Reproduction
from effuse.transport.slots import in_slots

CUDA = torch.device("cuda")
TASK = Denoise()
NETS = {
    "convnext": ConvnextUnet(dim=16).resolved(Shape(16, 1, 10)),
    "unet": Unet(widths=(32, 64), layers=1, attention=(8,), conditional=True).resolved(Shape(16, 1, 10)),
    "unet with dropout": Unet(widths=(32, 64), layers=1, attention=(8,), dropout=0.1).resolved(Shape(16, 1, 10)),
}


@pytest.fixture(autouse=True)
def no_reused_machines():
    """Every test makes its own recordings."""
    speed.REUSABLE.clear()


def blobs(n: int = 600) -> Dataset:
    """Discs of one size per class, which a network can learn."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 10
    grid = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")).float()
    centre = 6 + 4 * torch.rand(n, 2, 1, 1, generator=generator)
    disc = ((grid[None] - centre).square().sum(1, keepdim=True) < (1 + labels / 2)[:, None, None, None].square()) * 255
    return Dataset(disc.to(torch.uint8), labels, tuple("0123456789")).to(CUDA)


def fits(machine, arch, solver, count=1, seed=0, data=None, task=TASK):
    """Fit one network several times in a row; the losses and the final weights."""
    machine.release(None)
    net = machine.load(arch.initial(Stream((0,))).to(CUDA), None)
    shard = Shard.whole(data or blobs())
    losses = []
    for i in range(count):
        work = Work(solver=solver, task=task, shard=shard, lr=solver.lr, stream=Stream((seed, i)), place=0, where="here")
        losses.append(machine.fit(net, work)[0].loss)
    return losses, torch.cat([p.detach().flatten().float() for p in net.params.values()])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_losses_agree_over_200_steps(name, compiled):
    """Ten fits of 20 steps with ragged batches and the same noise, bf16 against fp32.

    The total agrees within 2 %, each mean within 10 %. Losses of single steps vary between bf16 and fp32: torch's own
    autocast on a CPU differs from fp32 by 0.3 % in the total, and by up to 3.5 % in one fit of ten.
    """
    solver = Adam(lr=2e-4, batch=128, steps=20, clip=1.0)
    eager, _ = fits(Eager(CUDA), NETS[name], solver, 10)
    fast, _ = fits(Captured(CUDA, compiled=compiled), NETS[name], solver, 10)
    assert eager[-1] < 0.7 * eager[0], "nothing was learnt, so agreement would mean little"
    if "dropout" in name:
        # the masks come from other kernels, so only the statistics agree
        assert sum(fast[-3:]) == pytest.approx(sum(eager[-3:]), rel=0.15)
    else:
        assert fast == pytest.approx(eager, rel=0.1)
        assert sum(fast) == pytest.approx(sum(eager), rel=0.02)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("task", [Edm(), Edm(augment=0.5)], ids=str)
def test_losses_of_edm_agree(task, compiled):
    """The same for float time steps and told transformations, which bf16 must not touch."""
    solver = Adam(lr=2e-4, batch=128, steps=20, clip=1.0)
    eager, _ = fits(Eager(CUDA), NETS["unet"], solver, 10, task=task)
    fast, _ = fits(Captured(CUDA, compiled=compiled), NETS["unet"], solver, 10, task=task)
    assert eager[-1] < eager[0] and fast == pytest.approx(eager, rel=0.1)
    assert sum(fast) == pytest.approx(sum(eager), rel=0.02)


def test_the_same_key_repeats_the_same_noise():
    """Fit with key 0, with key 1, with key 0 again, on one recording: the first and the last agree, the middle does not."""
    for name in NETS:
        machine, solver = Captured(CUDA, compiled=False), SGD(lr=1e-3, batch=64, steps=4)
        (a,), _ = fits(machine, NETS[name], solver, seed=0)
        (b,), _ = fits(machine, NETS[name], solver, seed=1)
        (c,), _ = fits(machine, NETS[name], solver, seed=0)
        assert a == pytest.approx(c, rel=1e-4) and a != pytest.approx(b, rel=1e-4), name
        assert machine.captures == 1


@pytest.mark.parametrize("batch", [8, 128])
@pytest.mark.parametrize("kind", ["eager", "graph", "compile"])
@pytest.mark.parametrize("name", NETS)
def test_a_fit_repeats_to_the_bit(name, kind, batch):
    """On two machines of a process. cuDNN's default for small batches adds some gradients in any order."""
    _repeats(NETS[name], kind, batch)


@pytest.mark.parametrize("kind", ["graph", "compile"])
def test_attention_over_many_positions_repeats_to_the_bit(kind):
    """256 positions and one head of 256 channels, as in the DDPM paper; cuDNN's gradient adds four tiles in any order."""
    _repeats(Unet(widths=(256, 256), layers=1, attention=(16,)).resolved(Shape(16, 1, 10)), kind, 128)


def _repeats(arch, kind, batch):
    solver = Adam(lr=2e-4, batch=batch, steps=5)
    machines = [Eager(CUDA) if kind == "eager" else Captured(CUDA, kind == "compile") for _ in range(2)]
    first, second, third = (fits(machine, arch, solver) for machine in (machines[0], *machines))
    assert first[0] == second[0] == third[0]
    assert torch.equal(first[1], second[1]) and torch.equal(first[1], third[1])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_fast_and_eager(name, tmp_path, monkeypatch):
    """Three rounds of ragged batches: recorded in fp32 they end in the eager weights, in bf16 in nearly the same losses.

    In bf16, the change of the weights differs by 4 to 30 % from fp32, which hides an algorithm's own terms. Nothing is
    recorded twice.
    """
    recipe = ragged_recipe(ALGORITHMS[name])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager = outcome(recipe.changed(["speed=eager"]), tmp_path / "eager", "cuda")
    found = {}
    for precision in ("fp32", "bf16"):
        with monkeypatch.context() as patch:
            recorded = noted_recordings(patch)
            if precision == "fp32":
                patch.setattr(torch, "autocast", lambda *kind, **options: contextlib.nullcontext())
                patch.setattr(Captured, "__init__", functools.partialmethod(Captured.__init__, kernels=()))
            found[precision] = outcome(recipe.changed(["speed=graph"]), tmp_path / precision, "cuda")
        assert recorded and len(recorded) == len({*recorded})
        speed.REUSABLE.clear()
    assert_alike(found["fp32"], eager)
    assert found["bf16"][1] == eager[1]
    # a few images drawn from models of three steps differ more than the models
    auxiliary = isinstance(ALGORITHMS[name], Draws)
    assert found["bf16"][0] == pytest.approx(eager[0], rel=0.3 if auxiliary else 0.1)


def colourful() -> Dataset:
    """The discs in three channels, one of them darker."""
    data = blobs()
    images = torch.cat([data.images, data.images // 2, data.images], dim=1)
    return dataclasses.replace(data, images=images)


def two_view_fits(machine, loss, given, columns=False):
    """Three fits of two clients, the second smaller, by a loss of two views; their losses, and the last average."""
    arch = Projected(encoder=Resnet(widths=(32, 64), blocks=(1, 1), groups=8), hidden=128, width=64)
    arch, data = arch.resolved(Shape(16, 3, 10)), colourful()
    solver = SGD(lr=0.01, batch=64, epochs=2, ema=0.9, ragged="drop")
    net, losses = machine.load(arch.initial(Stream((0,))).to(CUDA), None), []
    for i, n in enumerate((600, 200, 600)):
        shard = Shard(data, torch.arange(n))
        if columns:
            generator = torch.Generator().manual_seed(1)
            seen = {"F": torch.randn(600, 1, 64, generator=generator), "H": torch.randn(600, 64, generator=generator)}
            shard = shard.with_columns(**{k: v[:n].half().to(CUDA) for k, v in seen.items()})
        work = Work(
            solver=solver,
            task=Views(),
            shard=shard,
            lr=0.01,
            stream=Stream((i,)),
            place=0,
            where="here",
            loss=loss,
            given=given,
        )
        fit = machine.fit(net, work)[0]
        losses.append(fit.loss)
    return losses, torch.cat([t.flatten() for t in fit.average.tensors])


TWO_VIEWS = {
    "byol": (byol, {}),
    "simclr": (contrasted, {"T": 0.2}),
    "feddifrc": (unlabelled, {"tdcl": 1.0, "tau": 0.2, "unit": 1.0}),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", TWO_VIEWS)
def test_two_views_agree_recorded_and_eager(name, compiled):
    """Crops, colours and losses between images are recorded once for all clients; losses agree as those of denoisers do.

    Weights agree less: a BatchNorm of small variance amplifies rounding, and a ReLU at zero then has another gradient.
    """
    loss, given = TWO_VIEWS[name]
    machine = Captured(CUDA, compiled=compiled)
    eager, average = two_view_fits(Eager(CUDA), loss, given, name == "feddifrc")
    fast, other = two_view_fits(machine, loss, given, name == "feddifrc")
    assert machine.captures == 1
    assert fast == pytest.approx(eager, rel=0.1) and eager[-1] < eager[0]
    assert torch.cosine_similarity(average, other, dim=0) > 0.95


def test_views_are_the_same_on_both_devices():
    """The same uniform numbers give the same crops and colours, to rounding."""
    data, task = colourful(), Views()
    x = data.floats(data.images[:64])
    drawn = task.draw(64, x.shape[1:], data.labels[:64], torch.Generator().manual_seed(0))
    ours, theirs = (
        task.seen(Batch(x.to(place), data.labels[:64].to(place), task, {k: v.to(place) for k, v in drawn.items()}))
        for place in (CUDA, torch.device("cpu"))
    )
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=0)


def gradient(machine, arch, rho, seed=0, direction=None):
    """The mean raw gradient of a fit of eight ragged steps, and the weights after it."""
    machine.release(None)
    net = machine.load(arch.initial(Stream((0,))).to(CUDA), None)
    solver = Adam(lr=2e-4, batch=128, steps=8)
    work = Work(
        solver=solver,
        task=TASK,
        shard=Shard.whole(blobs()),
        lr=solver.lr,
        stream=Stream((seed,)),
        place=0,
        where="here",
        uphill=rho,
        report_gradient=True,
        direction=direction,
    )
    fit = machine.fit(net, work)[0]
    assert all(g.is_contiguous() for g in fit.gradient.tensors)
    return torch.cat([g.flatten() for g in fit.gradient.tensors]), Params.of(net), fit.loss


def halved(grads, params, given):
    return {k: 0.5 * g for k, g in grads.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rho", [None, 0.05])
@pytest.mark.parametrize("name", ["convnext", "unet"])
def test_gradients_uphill_and_their_mean_agree(name, rho, compiled):
    """SAM's second pass and the sum of raw gradients, recorded against eager: the same direction, length and loss."""
    eager, _, loss = gradient(Eager(CUDA), NETS[name], rho)
    fast, _, fast_loss = gradient(Captured(CUDA, compiled=compiled), NETS[name], rho)
    assert torch.cosine_similarity(eager, fast, dim=0) > 0.99
    assert fast.norm().item() == pytest.approx(eager.norm().item(), rel=0.05)
    assert fast_loss == pytest.approx(loss, rel=0.05)


def test_one_recording_serves_every_rho_and_forgets_the_last_fit():
    """rho 0.1, 1 and 0.1 again: the first and the last agree, the middle does not; a sum not cleared would double."""
    machine = Captured(CUDA, compiled=False)
    (a, _, _), (b, _, _), (c, _, _) = (gradient(machine, NETS["unet"], rho) for rho in (0.1, 1.0, 0.1))
    assert machine.captures == 1
    assert (a - c).norm() < 1e-2 * a.norm() < (a - b).norm()


def test_the_mean_gradient_is_raw_in_a_recording_too():
    """Adam is invariant to a gradient's length, so halving it changes neither the weights nor the raw mean."""
    plain, weights, _ = gradient(Captured(CUDA, compiled=False), NETS["unet"], None)
    halves, other, _ = gradient(Captured(CUDA, compiled=False), NETS["unet"], None, direction=halved)
    assert (plain - halves).norm() < 2e-2 * plain.norm()
    assert (weights - other).norm() < 0.2 * (weights - NETS["unet"].initial(Stream((0,))).to(CUDA).params).norm()


def test_synthesis_reuses_one_recorded_sampler(tmp_path, monkeypatch):
    """Clients give different numbers of images, in whole batches of one size: one recording draws them all."""
    made = []
    monkeypatch.setattr(Captured, "__init__", _noting(Captured.__init__, made))
    solver = Adam(lr=1e-4, batch=16, steps=1)
    algorithm = FedDDPM(warmup=solver, local=solver, central=solver, sampler=Ancestral(batch=4, steps=5), group=6)
    recipe = toy_recipe(
        clients=6,
        rounds=1,
        speed="graph",
        model=NETS["convnext"],
        data=ToyImages(n=300, side=16),
        task=TASK,
        partition=QuantitySkew(beta=1.0),
        algorithm=algorithm,
    )
    run(recipe, tmp_path / "run", device="cuda")
    assert made[0].captures == 2, "a training step that warm-up, rounds and corrections share, and the sampler"
    assert all(machine.captures <= 1 for machine in made[1:])
    sizes = torch.bincount(RunFolder(tmp_path / "run").load_checkpoint().server.auxiliary.origin)
    assert len(set(sizes.tolist())) > 1


def test_parallel_warm_ups_start_from_their_own_weights(tmp_path, monkeypatch):
    """Five slots against one: initial weights use torch's default generator, which threads must not share."""
    drawn = {}
    for most in (1, 5):
        monkeypatch.setattr(speed, "MOST_SLOTS", most)
        solver = Adam(lr=1e-30, batch=16, steps=1)
        algorithm = FedDDPM(warmup=solver, local=solver, central=solver, sampler=Ancestral(batch=4, steps=5))
        recipe = toy_recipe(
            clients=8,
            rounds=1,
            speed="graph",
            model=NETS["convnext"],
            data=ToyImages(n=320, side=16),
            task=TASK,
            algorithm=algorithm,
        )
        run(recipe, tmp_path / str(most), device="cuda")
        drawn[most] = RunFolder(tmp_path / str(most)).load_checkpoint().server.auxiliary.pixels.float()
    assert (drawn[1] - drawn[5]).abs().mean() < 2.0, "of 255: rounding alone"


def test_one_recording_serves_every_client_and_round(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(Captured, "__init__", _noting(Captured.__init__, made))
    recipe = toy_recipe(
        rounds=3,
        speed="graph",
        model=NETS["convnext"],
        data=ToyImages(side=16),
        sampler=Ancestral(batch=2, steps=5),
        evaluate=Evaluate(grid=4, every=1),
        task=TASK,
    )
    run(recipe, tmp_path / "run", device="cuda")
    used = [m.captures for m in made if m.captures]
    assert used == [2, 1, 1], "three clients, so three slots: a training step on each, and the sampler on the server's"


def test_a_second_run_records_nothing(tmp_path, monkeypatch):
    """Two runs in one process, with other seeds and rates: the second has the weights of a separate process."""
    made = []
    monkeypatch.setattr(Captured, "__init__", _noting(Captured.__init__, made))
    recipe = toy_recipe(rounds=2, speed="graph", model=ConvnextUnet(dim=16), data=ToyImages(side=16), task=TASK)
    other = recipe.changed(["seed=5", "algorithm.local.lr=0.01"])
    run(recipe, tmp_path / "first", device="cuda")
    found = [m.captures for m in made]
    second = run(other, tmp_path / "second", device="cuda")
    assert [m.captures for m in made] == found, "no new machines, no new recordings"
    speed.REUSABLE.clear()
    assert run(other, tmp_path / "alone", device="cuda").weights_sha256 == second.weights_sha256


@pytest.mark.parametrize("compiled", [False, True])
def test_slots_do_not_disturb_each_other(compiled):
    """The same fit alone and five times in parallel, on the paper's network: all six give the same bits."""
    arch, solver = ConvnextUnet().resolved(Shape(28, 1, 10)), Adam(lr=1e-4, batch=128, steps=40)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2560, 1, 28, 28), dtype=torch.uint8, generator=generator)
    shard = Shard.whole(Dataset(images, torch.arange(2560) % 10, tuple("0123456789")).to(CUDA))
    start = arch.initial(Stream((0,))).to(CUDA)
    machines = [Captured(CUDA, compiled) for _ in range(5)]

    def fit(machine, owner):
        machine.release(owner)
        net = machine.load(start, owner)
        machine.fit(net, Work(solver=solver, task=TASK, shard=shard, lr=1e-4, stream=Stream((1,)), place=0, where="here"))
        return machine.values(net)[0].digest()

    alone = fit(machines[0], 0)
    assert fit(machines[0], 0) == alone, "one machine repeats itself"
    for _ in range(2):  # the first time they record in turn; the second time they run in parallel
        at_once = [digest for _, digest in in_slots(fit, range(5), machines, [m.stream for m in machines])]
    assert at_once == [alone] * 5


def test_an_answer_is_read_before_its_memory_is_reused():
    """The server's stream is slow, and answers are released before they are added: the sum is still 0 + ... + 39 = 780."""

    def job(worker, client):
        return torch.full((1 << 20,), float(client), device=CUDA)

    total = None
    for _, answer in in_slots(job, range(40), ["a", "b"], [torch.cuda.Stream(CUDA) for _ in range(2)]):
        torch.cuda._sleep(20_000_000)
        total = answer if total is None else total + answer
        del answer
    assert total.unique().tolist() == [780.0]


def test_messages_and_worker_processes_change_no_bit(tmp_path):
    """Two processes on one GPU give the bits of one process, if algorithms are not chosen by trial."""
    recipe = toy_recipe(
        clients=4,
        rounds=2,
        speed="graph",
        reproducible=True,
        model=ConvnextUnet(dim=16),
        data=ToyImages(n=300, side=16),
        task=TASK,
    )
    ways = ({}, {"engine": "loopback"}, {"workers": 2})
    runs = [run(recipe, tmp_path / str(i), device="cuda", **way).weights_sha256 for i, way in enumerate(ways)]
    assert runs[1:] == runs[:1] * 2


@pytest.mark.parametrize("name", ["convnext", "unet"])
def test_a_contrast_and_its_noted_value_agree(name):
    """MOON's loss, its two frozen networks included, recorded: the same mean loss and contrast but for rounding."""
    arch, solver = NETS[name], Adam(lr=2e-4, batch=128, steps=10)
    glob, prev = (arch.initial(Stream((seed,))).params.to(CUDA) for seed in (0, 1))
    given = {"glob": glob, "prev": prev, "mu": 1.0, "T": 0.5}
    found = []
    for machine in (Eager(CUDA), Captured(CUDA, compiled=False), Captured(CUDA, compiled=True)):
        net = machine.load(arch.initial(Stream((0,))).to(CUDA), None)
        work = Work(
            solver=solver,
            task=TASK,
            shard=Shard.whole(blobs()),
            lr=solver.lr,
            stream=Stream((0, 0)),
            place=0,
            where="here",
            loss=contrastive,
            given=given,
        )
        fit = machine.fit(net, work)[0]
        found.append((fit.loss, fit.noted))
    assert found[1] == pytest.approx(found[0], rel=0.03) and found[2] == pytest.approx(found[0], rel=0.03)


def test_sparse_training_agrees():
    """FedPhD's regulariser as a recorded direction: weights shrink as in eager steps."""
    arch, solver = NETS["unet"], SGD(lr=0.01, batch=128, steps=20)
    norms = []
    for machine in (Eager(CUDA), Captured(CUDA, compiled=False)):
        net = machine.load(arch.initial(Stream((0,))).to(CUDA), None)
        work = Work(
            solver=solver,
            task=TASK,
            shard=Shard.whole(blobs()),
            lr=solver.lr,
            stream=Stream((0, 0)),
            place=0,
            where="here",
            direction=sparsifying,
            given={"lambda_g": group_weights(arch, 1.0)},
        )
        machine.fit(net, work)
        norms.append(net.mid_block.resnets[0].conv1.weight.norm().item())
    whole = arch.initial(Stream((0,))).params["mid_block.resnets.0.conv1.weight"].norm().item()
    assert norms[1] == pytest.approx(norms[0], rel=0.02) and norms[0] < 0.8 * whole


def test_a_cut_in_the_middle_of_a_run_is_recorded_again(tmp_path, monkeypatch):
    """Two rounds, pruning, two more: recorded again, old recordings dropped, and losses near the eager run's."""
    made = []
    monkeypatch.setattr(Captured, "__init__", _noting(Captured.__init__, made))
    algorithm = FedPhD(local=Adam(lr=1e-4, batch=128, epochs=2), cohort=None, r_g=1, R_s=2, ratio=0.5, lambda_0=0.0)
    arch = Unet(widths=(32, 64), layers=1, attention=(8,), conditional=True)
    losses = {}
    for kind in ("eager", "graph"):
        recipe = toy_recipe(
            clients=2,
            rounds=4,
            speed=kind,
            model=arch,
            data=ToyImages(n=1000, side=16),
            task=TASK,
            algorithm=algorithm,
        )
        result = run(recipe, tmp_path / kind, device="cuda")
        lines = [json.loads(x) for x in (tmp_path / kind / "rounds.jsonl").read_text().splitlines()][1:]
        losses[kind] = [x["loss"] for x in lines]
    smaller = cut(arch.resolved(recipe.data.load("train").shape), 0.5)
    assert result.parameters == sum(t.numel() for t in smaller.initial(Stream((0,))).params.tensors)
    assert losses["graph"] == pytest.approx(losses["eager"], rel=0.1)
    used = [m for m in made if any(key[0] == smaller for key in m._steps)]
    assert used and all(key[0] == smaller for m in used for key in m._steps), "no recording of the wider network remains"
    assert lines[-1]["gpu_bytes"] < lines[1]["gpu_bytes"], "its memory is freed"
    assert {x["at_a_time"] for x in lines} == {2}, "both clients run in parallel"


def coloured(n: int = 320) -> Dataset:
    """Two and a half batches of noise in the shape of CIFAR-10."""
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Dataset(images, torch.arange(n) % 10, tuple("0123456789")).to(CUDA)


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.3, 0.4])
def test_the_comparisons_network_fits_after_every_cut(ratio, tmp_path):
    """Odd widths, such as 76, 115 or 153 channels: two fits of three recorded steps are near the eager ones."""
    scaled = Reproduction("comparison", find_table("fedphd.comparison")[1], tmp_path, "scaled")
    recipe = scaled.planned["fedphd-44-0"].recipe
    arch, solver = cut(recipe.model.resolved(Shape(32, 3, 10)), ratio), dataclasses.replace(recipe.algorithm.local, lr=1e-3)
    data, losses = coloured(), []
    for machine in (Eager(CUDA), fast := Captured(CUDA, compiled=False)):
        losses.append(fits(machine, arch, solver, 2, data=data)[0])
    assert losses[0][1] < 0.95 * losses[0][0], "nothing was learnt, so agreement would mean little"
    assert losses[1] == pytest.approx(losses[0], rel=0.1) and fast.captures == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("task", "sampler"),
    [(TASK, Ancestral(batch=4, steps=20)), (Edm(), Heun(batch=4, steps=10)), (Edm(), DpmSolver(batch=4))],
)
def test_fast_samples_are_the_eager_ones_but_for_rounding(task, sampler, compiled):
    """Ten images, four at a time: the last two are drawn on the recording of four."""
    arch = NETS["unet"]
    model = arch.initial(Stream((0,))).to(CUDA)
    drawn = []
    for machine in (Eager(CUDA), fast := Captured(CUDA, compiled=compiled)):
        images = machine.generate(machine.load(model, None), task, 10, sampler, torch.arange(10), Stream((5,)))
        drawn.append(images.pixels)
    assert (drawn[0] - drawn[1]).abs().mean() < 0.02 and fast.captures == 1


COMPILES = """
import json, torch
from torch._dynamo.utils import counters
from effuse.fast.graph.captured import Captured
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import Work
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.views import Views
from effuse.fast.graph.compiled import keep_compiled
from effuse.models.convnext_unet import ConvnextUnet

device, here = torch.device("cuda"), Stream((0,))
keep_compiled(device)
machine, arch = Captured(device), ConvnextUnet(dim=16).resolved(Shape(16, 1, 10))
data = Dataset(torch.zeros(64, 1, 16, 16, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64), tuple("0123456789"))
solver = Adam(lr=1e-4, batch=64, steps=1)
net = machine.load(arch.initial(here).to(device))
work = Work(
    solver=solver, task=Denoise(), shard=Shard.whole(data.to(device)), lr=1e-4, stream=here, place=0, where="here"
)
machine.fit(net, work)
print(json.dumps(dict(counters["inductor"])))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment |= {"EFFUSE_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    counted = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        counted.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = counted
    assert first.get("fxgraph_cache_miss", 0) > 0 and second.get("fxgraph_cache_miss", 0) == 0, counted
    assert second["fxgraph_cache_hit"] == first["fxgraph_cache_miss"], counted


def _noting(init, made):
    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    return noted
