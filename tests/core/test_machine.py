"""The reference machine, on networks of one weight whose training steps can be computed by hand."""

import dataclasses

import pytest
import torch
from one_weight import (
    HERE,
    ONE,
    WHERE,
    CoreNoise,
    CoreNormed,
    CoreTarget,
    OneWeight,
    bench,
    images,
    machine,
    model_of,
    only_w,
    work_of,
)
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.errors import FederationError, ModelError, TrainingError
from effuse.core.fit import kept_state, restore
from effuse.core.model import Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream, stream
from effuse.core.solvers import SGD, Adam, ExponentialDecay, Solver
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.machines.eager import batch_seeds


def run(solver: Solver, model: Model | None = None, task: Task | None = None, **rest):
    """(w after the fit, the fit's result, the optimiser's moments)."""
    eager = machine()
    net = eager.load(model or model_of())
    fit, moments = eager.fit(net, work_of(solver, task=task, **rest))
    return net.params["w"].item(), fit, moments


def test_two_steps_of_sgd_by_hand():
    """loss (w - 3)^2, gradient 2 (w - 3), lr 1/4: w = 0 -> 1.5 -> 2.25 with losses 9 and 2.25, their mean 5.625."""
    w, fit, moments = run(SGD(lr=0.25, steps=2, batch=1))
    assert w == 2.25 and fit == (2, 2, 5.625, None, None, None) and moments is None


def test_sam_takes_the_gradient_uphill_and_steps_from_the_original_weights():
    """loss (w x + v - 3)^2 at w = v = 0, x = 1: the gradient is (-6, -6), of norm 6 sqrt 2.

    rho = sqrt 2 uphill is (-1, -1), where the gradient is (-10, -10). A step of lr 0.1 from (0, 0) leads to (1, 1).
    The reported loss is that of the original weights: 9.
    """
    eager = machine()
    net = eager.load(model_of())
    fit, _ = eager.fit(net, work_of(SGD(lr=0.1, steps=1, batch=1), direction=None, uphill=2**0.5, report_gradient=True))
    assert (net.params["w"].item(), net.params["v"].item()) == pytest.approx((1.0, 1.0)) and fit.loss == 9.0
    assert {k: g.item() for k, g in fit.gradient.items()} == pytest.approx({"w": -10.0, "v": -10.0})


def test_sam_does_not_move_where_the_gradient_is_zero():
    w, fit, _ = run(SGD(lr=0.1, steps=1, batch=1), model_of(3.0), uphill=0.5)
    assert w == 3.0 and fit.loss == 0.0


def test_the_mean_gradient_is_before_direction_and_clipping():
    """Gradients -6 and, after a step of lr 1/4 to w = 1.5, -3: mean -4.5."""
    w, fit, _ = run(SGD(lr=0.25, steps=2, batch=1), report_gradient=True)
    assert fit.gradient["w"].item() == -4.5 and w == 2.25
    _, fit, _ = run(SGD(lr=1e-9, steps=2, batch=1, clip=0.1), report_gradient=True, direction=halved)
    assert fit.gradient["w"].item() == pytest.approx(-6.0)


def halved(grads, params, given):
    return {k: 0.5 * g for k, g in grads.items()}


def test_the_mean_loss_is_over_images_not_over_steps():
    """With w = 1, x = -1 has loss 16 and x = 1 has 4: (16 + 16 + 4) / 3 = 12. The last batch has one image."""
    w, fit, _ = run(SGD(lr=1e-12, epochs=1, batch=2), model_of(1.0), shard=images(0, 0, 255))
    assert fit.steps == 2 and fit.images == 3 and fit.loss == pytest.approx(12.0)


def test_steps_without_images_are_refused():
    """Otherwise the loop over batches would not end."""
    with pytest.raises(TrainingError, match="there are no images to learn from"):
        run(SGD(lr=0.1, batch=1, steps=1), shard=Shard(ONE.dataset, ONE.rows[:0]))


def test_momentum_by_hand():
    """v1 = -6, w1 = 1.5; gradient -3, v2 = 0.5 * -6 - 3 = -6, w2 = 1.5 + 1.5 = 3."""
    assert run(SGD(lr=0.25, steps=2, batch=1, momentum=0.5))[0] == 3.0


def test_the_learning_rate_of_the_round_is_used():
    assert run(SGD(lr=0.25, steps=1, batch=1), lr=0.5)[0] == 3.0


def test_a_direction_gets_the_raw_gradient_and_floats_as_tensors():
    """Gradient -6 plus c = 2 is -4, so w = 1. Numbers are passed as 0-d tensors so that a step can be captured."""
    seen = {}

    def corrected(grads, params, given):
        seen.update(given, grad=grads["w"].item(), params=set(params))
        return {k: grads[k] + given["c"][k] + given["zero"] for k in grads}

    c = Params({"w": torch.tensor(2.0), "v": torch.tensor(6.0)})
    w, _, _ = run(SGD(lr=0.25, steps=1, batch=1), direction=corrected, given={"c": c, "zero": 0.0})
    assert w == 1.0 and seen["grad"] == -6.0 and seen["params"] == {"w", "v"}
    assert isinstance(seen["zero"], Tensor) and seen["zero"].shape == () and isinstance(seen["c"], Params)


def test_the_direction_gets_zero_for_a_parameter_without_gradient():
    def frozen(net, batch, given):
        return (net.params["w"] - 3.0).square()

    def both(grads, params, given):
        assert grads["v"].item() == 0.0
        return grads

    assert run(SGD(lr=0.25, steps=1, batch=1), loss=frozen, direction=both)[0] == 1.5


def test_a_loss_may_run_other_weights():
    """loss = (f(x; w) - f(x; previous = 8))^2: gradient 2 (0 - 8) = -16, w = 4."""

    def near(net, batch, given):
        return batch.mean((net(batch.x) - net(batch.x, params=given["previous"])).square())

    previous = Params({"w": torch.tensor(8.0), "v": torch.tensor(0.0)})
    assert run(SGD(lr=0.25, steps=1, batch=1), loss=near, given={"previous": previous})[0] == 4.0


def test_clip_bounds_the_direction():
    """The gradient of 6 is clipped to 1, so w = 0.25, and so is a direction ten times as long; 6 is within a clip of 7."""

    def tenfold(grads, params, given):
        return {k: 10 * g for k, g in only_w(grads, params, given).items()}

    assert run(SGD(lr=0.25, steps=1, batch=1, clip=1.0))[0] == pytest.approx(0.25, rel=1e-5)
    assert run(SGD(lr=0.25, steps=1, batch=1, clip=1.0), direction=tenfold)[0] == pytest.approx(0.25, rel=1e-5)
    assert run(SGD(lr=0.25, steps=1, batch=1, clip=7.0))[0] == 1.5


def test_clip_is_on_the_norm_of_all_gradients_together():
    """w and v both have the gradient -6; their norm is 6 sqrt(2), so each is clipped to 1 / sqrt(2)."""
    assert run(SGD(lr=1.0, steps=1, batch=1, clip=1.0), direction=None)[0] == pytest.approx(0.5**0.5, rel=1e-5)


def test_the_average_over_steps_by_hand():
    """w = 0, 1.5, 2.25; a decay of 3/4 averages 0, 0.375, 0.84375; from 4: 3.375, 3.09375; and v = 0 from 8: 6, 4.5."""
    solver = SGD(lr=0.25, steps=2, batch=1, ema=0.75)
    w, fit, _ = run(solver)
    assert w == 2.25 and fit.average["w"].item() == 0.84375
    # in another order than the network's, as in a message
    before = Params({"v": torch.tensor(8.0), "w": torch.tensor(4.0)})
    after = run(solver, average=before)[1].average
    assert after["w"].item() == 3.09375 and after["v"].item() == 4.5 and list(after) == ["w", "v"]
    assert before["w"].item() == 4.0, "the argument does not change"


def test_kept_moments_make_two_fits_one_long_fit():
    whole, _, _ = run(Adam(lr=0.25, steps=6, batch=1, state="kept"))
    half = Adam(lr=0.25, steps=3, batch=1, state="kept")
    w, _, moments = run(half)
    assert set(moments) == {f"{m}/{p}" for m in ("step", "exp_avg", "exp_avg_sq") for p in "wv"}
    assert moments["step/w"].item() == 3
    snapshot = moments.digest()
    again, _, later = run(half, model_of(w), optimiser=moments)
    assert again == whole and later["step/w"].item() == 6
    assert moments.digest() == snapshot, "a snapshot is not written in place"
    assert run(half, model_of(w))[0] != whole, "new moments give another result"


def test_kept_momentum_makes_two_fits_one_long_fit():
    """By hand as above: one step to 1.5 with velocity -6, then the second to 3."""
    solver = SGD(lr=0.25, steps=1, batch=1, momentum=0.5, state="kept")
    w, _, moments = run(solver)
    assert moments["momentum_buffer/w"].item() == -6.0
    assert run(solver, model_of(w), optimiser=moments)[0] == 3.0


def test_a_solver_without_moments_keeps_none():
    assert len(run(SGD(lr=0.25, steps=1, batch=1, state="kept"))[2]) == 0


def test_restored_moments_are_on_the_device_of_the_parameters():
    """Fused optimisers need even the step count there. State is read from disk to the CPU."""
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimiser = torch.optim.Adam([weight], 0.1)
    restore(optimiser, {"w": weight}, Params({"step/w": torch.tensor(3.0), "exp_avg/w": torch.ones(2)}))
    assert all(t.is_meta for t in optimiser.state[weight].values())
    assert set(kept_state(optimiser, {"w": weight})) == {"step/w", "exp_avg/w"}


@pytest.mark.parametrize("full, n", [("exp_avg/w", 3), ("exp_avg/v", 2)])
def test_moments_of_another_network_are_refused(full, n):
    """Adam would broadcast their shapes."""
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ModelError, match=rf"moments '{full}', \({n},\), are of another network"):
        restore(torch.optim.Adam([weight], 0.1), {"w": weight}, Params({"step/w": torch.tensor(3.0), full: torch.ones(n)}))


def test_a_non_finite_loss_is_an_error_that_names_round_client_job_and_step():
    """The first step makes w huge, so the second loss is infinite."""

    def wild(grads, params, given):
        return {k: torch.full_like(g, -3e38) for k, g in grads.items()}

    with pytest.raises(TrainingError, match=WHERE + r": the loss became inf in step 2 of 3; lower .*\(0.5\) or set clip"):
        run(SGD(lr=0.5, steps=3, batch=1), direction=wild)


def test_an_epoch_has_every_image_once_and_each_epoch_has_another_order():
    eager, shard = machine(), Shard(images(*range(10)).dataset, torch.tensor([1, 3, 5, 7, 9]))
    batches = list(eager._batches(work_of(SGD(lr=1.0, epochs=4, batch=2), shard)))
    assert [len(b.x) for b in batches] == [2, 2, 1] * 4
    colours = torch.cat([((b.x + 1) * 127.5).round().flatten() for b in batches]).view(4, 5)
    assert [sorted(row.tolist()) for row in colours] == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 4
    assert len({tuple(row.tolist()) for row in colours}) > 1


def test_steps_continue_after_the_end_of_an_epoch():
    sizes = [len(b.x) for b in machine()._batches(work_of(SGD(lr=1.0, steps=5, batch=2), images(1, 2, 3)))]
    assert sizes == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("flip", [False, True])
def test_a_small_batch_has_the_first_random_numbers_of_a_full_one(flip, shift):
    """A batch of 17 images has the first 17 of the numbers drawn for 20."""
    solver, moves = SGD(lr=1.0, steps=3, batch=20), {"side": 2, "flip": flip, "shift": shift}
    full, ragged = (list(machine()._batches(work_of(solver, images(*[9] * n, **moves)))) for n in (20, 17))
    assert [len(b.labels) for b in ragged] == [17] * 3
    for whole, part in zip(full, ragged):
        assert torch.equal(whole.drawn["noise"][:17], part.drawn["noise"])
        assert torch.equal(whole.x[:17], part.x)


def test_about_half_of_the_images_are_mirrored_and_the_tasks_draws_do_not_change():
    """The left half of the images is black; that of mirrored ones is white."""
    shard = images(*[255] * 64, side=2, flip=True)
    shard.dataset.images[..., 0] = 0
    plain = Shard.whole(dataclasses.replace(shard.dataset, flip=False))
    flipped = next(machine()._batches(work_of(SGD(lr=1.0, steps=1, batch=64), shard)))
    straight = next(machine()._batches(work_of(SGD(lr=1.0, steps=1, batch=64), plain)))
    mirrored = flipped.x[:, 0, 0, 0] == 1
    assert 16 < int(mirrored.sum()) < 48 and not (straight.x[:, 0, 0, 0] == 1).any()
    assert torch.equal(flipped.x[mirrored], straight.x[mirrored].flip(-1))
    assert torch.equal(flipped.x[~mirrored], straight.x[~mirrored])
    assert torch.equal(flipped.drawn["noise"], straight.drawn["noise"])


def test_shifted_images_lose_what_leaves_the_frame_and_the_tasks_draws_do_not_change():
    """White images of two pixels a side move by one pixel or none: 4, 2 or 1 of the four pixels stay white."""
    shard = images(*[255] * 64, side=2, shift=1)
    plain = Shard.whole(dataclasses.replace(shard.dataset, shift=0))
    moved, straight = (next(machine()._batches(work_of(SGD(lr=1.0, steps=1, batch=64), s))) for s in (shard, plain))
    assert {int(n) for n in (moved.x == 1).flatten(1).sum(1)} == {1, 2, 4} and bool((straight.x == 1).all())
    assert torch.equal(moved.drawn["noise"], straight.drawn["noise"])


def noisy(seed: int, source: Stream, dropout: float = 0.5) -> float:
    """The weight after a fit with noise and dropout, with torch's default generator seeded by `seed` before it."""
    torch.manual_seed(seed)
    before = torch.random.get_rng_state()
    solver = SGD(lr=0.01, epochs=2, batch=4)
    shard = images(*range(0, 250, 25))
    w, _, _ = run(solver, model_of(1.0, dropout=dropout), CoreTarget(noisy=True), shard=shard, stream=source)
    assert torch.equal(torch.random.get_rng_state(), before), "a fit does not change torch's default generator"
    return w


def test_a_fit_depends_only_on_its_stream():
    assert noisy(1, HERE) == noisy(2, HERE) != noisy(1, HERE.child("other"))
    assert noisy(1, HERE, 0.0) == noisy(2, HERE, 0.0) != noisy(1, HERE.child("other"), 0.0)


def test_dropout_is_on_while_fitting_and_off_while_generating():
    assert noisy(1, HERE, 0.5) != noisy(1, HERE, 0.0)
    eager = machine()
    net = eager.load(model_of())
    assert net.module.training
    eager.generate(net, CoreTarget(), 1, CoreNoise(), None, HERE)
    assert not net.module.training
    eager.release()
    assert eager.load(model_of()) is net and net.module.training, "a reused network is like a new one"


def test_a_fit_updates_the_buffers():
    """All pixels are 1, BatchNorm's momentum is 0.1: the running mean goes from 0 to 0.1 to 0.19."""
    eager, built = machine(), CoreNormed(side=1, channels=1, classes=1).build()
    model = Model(CoreNormed(side=1, channels=1, classes=1), Params.of(built), Buffers.of(built))
    net = eager.load(model)
    eager.fit(net, work_of(SGD(lr=0.1, steps=2, batch=2), images(255, 255), direction=None))
    assert Buffers.of(net)["norm.running_mean"].item() == pytest.approx(0.19)
    assert Buffers.of(net)["norm.num_batches_tracked"].item() == 2
    assert model.buffers["norm.running_mean"].item() == 0.0
    eager.release()
    again = Buffers.of(eager.load(model))
    assert again["norm.running_mean"].item() == 0.0, "the next client starts from the model it was sent"


def test_networks_are_reused_but_never_lent_twice():
    eager = machine()
    first, second = eager.load(model_of(1.0)), eager.load(model_of(2.0))
    assert first is not second and (first.params["w"].item(), second.params["w"].item()) == (1.0, 2.0)
    other = eager.load(model_of(3.0, dropout=0.5))
    assert other is not first and other.module.dropout.p == 0.5
    eager.release()
    again = eager.load(model_of(4.0))
    assert again in (first, second) and again.params["w"].item() == 4.0


def test_a_fit_frees_its_gradients():
    eager = machine()
    net = eager.load(model_of())
    eager.fit(net, work_of(SGD(lr=0.1, steps=1, batch=1)))
    assert all(p.grad is None for p in net.params.values())


def test_work_is_counted_while_it_is_done():
    eager, seen = machine(), []
    eager.meter.watcher = lambda: seen.append((eager.meter.images, eager.meter.evaluations))
    eager.fit(eager.load(model_of()), work_of(SGD(lr=0.1, epochs=1, batch=2), images(1, 2, 3)))
    eager.generate(eager.load(model_of()), CoreTarget(), 3, CoreNoise(), None, HERE)
    assert seen == [(2, 0), (3, 0), (3, 2), (3, 4), (3, 5), (3, 6)], "batches of 2 and 1, each evaluated twice"


def test_every_batch_of_a_draw_has_a_seed():
    seeds = batch_seeds(HERE, 5, 2)
    assert [(first, size) for _, first, size in seeds] == [(0, 2), (2, 2), (4, 1)]
    assert [seed for seed, _, _ in seeds] == [HERE.child("batch", first).seed for first in (0, 2, 4)], "a stream for each"
    assert [s for s, _, _ in batch_seeds(HERE, 4, 2)] == [s for s, _, _ in seeds[:2]], (
        "a longer draw begins with the same images"
    )
    assert batch_seeds(HERE.child("other"), 5, 2)[0][0] != seeds[0][0]


def test_a_draw_can_be_repeated_from_its_seeds():
    before = torch.random.get_rng_state()
    drawn = machine().generate(Net(OneWeight(), arch=model_of().arch), CoreTarget(), 5, CoreNoise(), None, HERE)
    assert torch.equal(torch.random.get_rng_state(), before)
    seeds = [(torch.Generator().manual_seed(seed), n) for seed, _, n in batch_seeds(HERE, 5, 2)]
    by_hand = [torch.randn(n, 1, 1, 1, generator=generator) for generator, n in seeds]
    assert torch.equal(drawn.pixels, torch.cat(by_hand)) and drawn.labels is None and not drawn.pixels.requires_grad


def test_a_conditional_model_draws_its_classes_in_turn():
    """Two classes, five images: 0, 1, 0, 1, 0. The sampler gets the labels of each batch."""
    drawn = bench().generate(model_of(conditional=True), 5, CoreNoise(), stream=HERE)
    plain = bench().generate(model_of(), 5, CoreNoise(), stream=HERE)
    assert drawn.labels.tolist() == [0, 1, 0, 1, 0] and plain.labels is None
    assert torch.equal(drawn.pixels.flatten(), plain.pixels.flatten() + torch.tensor([0.0, 100.0, 0.0, 100.0, 0.0]))
    chosen = bench().generate(model_of(conditional=True), 3, CoreNoise(), labels=torch.tensor([1, 1, 0]), stream=HERE)
    assert chosen.labels.tolist() == [1, 1, 0] and (chosen.pixels.flatten() > 50).tolist() == [True, True, False]


def test_every_call_of_a_job_has_its_own_repeatable_random_numbers():
    def two() -> list[Tensor]:
        client = bench()
        return [client.generate(model_of(), 2, CoreNoise()).pixels for _ in range(2)]

    (a, b), (c, d) = two(), two()
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
    assert not torch.equal(a, bench(8).generate(model_of(), 2, CoreNoise()).pixels)


def test_a_workbench_uses_the_learning_rate_of_its_federated_round():
    """A rate of 1/4 halved every round is 1/16 in round 2: w = 0 + 6 / 16."""
    client = bench()
    solver = SGD(lr=0.25, steps=1, batch=1, schedule=ExponentialDecay(rate=0.5))
    net = client.load(model_of())
    client.fit(net, solver, client.data, direction=only_w)
    assert client.rate(solver) == 0.0625 and net.params["w"].item() == 0.375 and client.size == 1
    assert client.unload(net).params["w"].item() == 0.375 and client.unload(net).arch == model_of().arch


def test_a_client_keeps_its_moments_while_the_architecture_is_the_same():
    client, solver = bench(), SGD(lr=0.25, steps=1, batch=1, momentum=0.5, state="kept")
    net = client.load(model_of())
    client.fit(net, solver, client.data, direction=only_w)
    client.fit(net, solver, client.data, direction=only_w)
    assert net.params["w"].item() == 3.0, "as two steps with momentum, computed above"
    cut = client.load(model_of(dropout=1e-9))
    client.fit(cut, solver, client.data, direction=only_w)
    assert cut.params["w"].item() == pytest.approx(1.5), "the moments of another network are not used"


def test_a_solver_without_kept_state_writes_no_state():
    client = bench()
    client.fit(client.load(model_of()), SGD(lr=0.25, steps=1, batch=1, momentum=0.5), client.data)
    assert client.state == {}


def test_a_fit_without_data_is_an_error_that_names_the_place():
    client = bench()
    with pytest.raises(FederationError, match="round 4, client 7, job 'train': there is no data to fit"):
        client.fit(client.load(model_of()), SGD(lr=0.25, steps=1), Shard(ONE.dataset, ONE.rows[:0]))
    server = Workbench(machine(), CoreTarget(), 10)
    server.begin(stream(0, 3, "round", 0, -1, ""), 2)
    assert server.where == "round 4, the server, job 'round'"


def test_a_model_that_does_not_fit_is_refused_when_loaded():
    with pytest.raises(ModelError, match="got no value for 'v'"):
        machine().load(dataclasses.replace(model_of(), params=Params({"w": torch.tensor(1.0)})))
