"""The reference machine, on networks of one weight whose every step can be worked out by hand."""

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
    """(w after the fit, what the fit says, kept optimiser state)."""
    eager = machine()
    net = eager.load(model or model_of())
    fit, kept = eager.fit(net, work_of(solver, task=task, **rest))
    return net.params["w"].item(), fit, kept


def test_two_steps_of_sgd_by_hand():
    """loss (w - 3)^2, gradient 2 (w - 3), lr 1/4: w = 0 -> 1.5 -> 2.25 with losses 9 and 2.25, their mean 5.625."""
    w, fit, kept = run(SGD(lr=0.25, steps=2, batch=1))
    assert w == 2.25 and fit == (2, 2, 5.625, None, None, None) and kept is None


def test_sam_takes_the_gradient_uphill_and_steps_from_where_it_was():
    """loss (w x + v - 3)^2 at w = v = 0, x = 1: gradient (-6, -6), of length 6 sqrt 2. Uphill by rho = sqrt 2 is (-1, -1), where
    the gradient is -10 for both; lr .1 leads from (0, 0), not from there, to (1, 1). The loss is that of the weights: 9.
    """
    eager = machine()
    net = eager.load(model_of())
    fit, _ = eager.fit(net, work_of(SGD(lr=0.1, steps=1, batch=1), direction=None, uphill=2**0.5, report_gradient=True))
    assert (net.params["w"].item(), net.params["v"].item()) == pytest.approx((1.0, 1.0)) and fit.loss == 9.0
    assert {k: g.item() for k, g in fit.gradient.items()} == pytest.approx({"w": -10.0, "v": -10.0})


def test_sam_where_the_gradient_is_nought_stays_there():
    w, fit, _ = run(SGD(lr=0.1, steps=1, batch=1), model_of(3.0), uphill=0.5)
    assert w == 3.0 and fit.loss == 0.0


def test_the_mean_gradient_is_raw():
    """Gradients -6 and, after a step of lr 1/4 to w = 1.5, -3: mean -4.5, whatever direction and clip make of them."""
    w, fit, _ = run(SGD(lr=0.25, steps=2, batch=1), report_gradient=True)
    assert fit.gradient["w"].item() == -4.5 and w == 2.25
    _, fit, _ = run(SGD(lr=1e-9, steps=2, batch=1, clip=0.1), report_gradient=True, direction=halved)
    assert fit.gradient["w"].item() == pytest.approx(-6.0)


def halved(grads, params, given):
    return {k: 0.5 * g for k, g in grads.items()}


def test_the_mean_loss_is_over_images_not_over_steps():
    """With w = 1, x = -1 costs 16 and x = 1 costs 4: (16 + 16 + 4) / 3 = 12, whichever is alone in the last batch."""
    w, fit, _ = run(SGD(lr=1e-12, epochs=1, batch=2), model_of(1.0), shard=images(0, 0, 255))
    assert fit.steps == 2 and fit.images == 3 and fit.loss == pytest.approx(12.0)


def test_steps_without_images_are_refused():
    """They would look for a batch for ever."""
    with pytest.raises(TrainingError, match="there are no images to learn from"):
        run(SGD(lr=0.1, batch=1, steps=1), shard=Shard(ONE.dataset, ONE.rows[:0]))


def test_momentum_by_hand():
    """v1 = -6, w1 = 1.5; gradient -3, v2 = 0.5 * -6 - 3 = -6, w2 = 1.5 + 1.5 = 3."""
    assert run(SGD(lr=0.25, steps=2, batch=1, momentum=0.5))[0] == 3.0


def test_the_rate_of_the_round_is_used_not_the_solvers_own():
    assert run(SGD(lr=0.25, steps=1, batch=1), lr=0.5)[0] == 3.0


def test_direction_sees_the_raw_gradient_and_floats_as_tensors():
    """Gradient -6 plus c = 2 is -4: w = 1; numbers arrive as 0-d tensors so that a step can be captured."""
    seen = {}

    def corrected(grads, params, given):
        seen.update(given, grad=grads["w"].item(), params=set(params))
        return {k: grads[k] + given["c"][k] + given["nought"] for k in grads}

    c = Params({"w": torch.tensor(2.0), "v": torch.tensor(6.0)})
    w, _, _ = run(SGD(lr=0.25, steps=1, batch=1), direction=corrected, given={"c": c, "nought": 0.0})
    assert w == 1.0 and seen["grad"] == -6.0 and seen["params"] == {"w", "v"}
    assert isinstance(seen["nought"], Tensor) and seen["nought"].shape == () and isinstance(seen["c"], Params)


def test_a_parameter_without_gradient_has_a_zero_for_its_direction():
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


def test_clip_bounds_what_the_optimiser_sees():
    """The gradient of 6 is cut to 1, so w = 0.25; a direction ten times as long is cut to the same; a short one stays."""

    def tenfold(grads, params, given):
        return {k: 10 * g for k, g in only_w(grads, params, given).items()}

    assert run(SGD(lr=0.25, steps=1, batch=1, clip=1.0))[0] == pytest.approx(0.25, rel=1e-5)
    assert run(SGD(lr=0.25, steps=1, batch=1, clip=1.0), direction=tenfold)[0] == pytest.approx(0.25, rel=1e-5)
    assert run(SGD(lr=0.25, steps=1, batch=1, clip=7.0))[0] == 1.5


def test_clip_is_on_the_norm_of_all_gradients_together():
    """w and v both have the gradient -6; their norm is 6 sqrt(2), so each is cut to 1 / sqrt(2)."""
    assert run(SGD(lr=1.0, steps=1, batch=1, clip=1.0), direction=None)[0] == pytest.approx(0.5**0.5, rel=1e-5)


def test_the_average_over_steps_by_hand():
    """w = 0, 1.5, 2.25; a decay of 3/4 averages 0, 0.375, 0.84375; from 4: 3.375, 3.09375; and v = 0 from 8: 6, 4.5."""
    solver = SGD(lr=0.25, steps=2, batch=1, ema=0.75)
    w, fit, _ = run(solver)
    assert w == 2.25 and fit.average["w"].item() == 0.84375
    # in another order than the network's, as a message might bring it
    before = Params({"v": torch.tensor(8.0), "w": torch.tensor(4.0)})
    after = run(solver, average=before)[1].average
    assert after["w"].item() == 3.09375 and after["v"].item() == 4.5 and list(after) == ["w", "v"]
    assert before["w"].item() == 4.0, "what was given is not written on"


def test_kept_moments_make_two_fits_one_long_fit():
    whole, _, _ = run(Adam(lr=0.25, steps=6, batch=1, state="kept"))
    half = Adam(lr=0.25, steps=3, batch=1, state="kept")
    w, _, kept = run(half)
    assert set(kept) == {f"{m}/{p}" for m in ("step", "exp_avg", "exp_avg_sq") for p in "wv"} and kept["step/w"].item() == 3
    snapshot = kept.digest()
    again, _, later = run(half, model_of(w), optimiser=kept)
    assert again == whole and later["step/w"].item() == 6
    assert kept.digest() == snapshot, "an accepted snapshot is never written on"
    assert run(half, model_of(w))[0] != whole, "fresh moments take another way"


def test_kept_momentum_makes_two_fits_one_long_fit():
    """By hand as above: one step to 1.5 with velocity -6, then the second to 3."""
    solver = SGD(lr=0.25, steps=1, batch=1, momentum=0.5, state="kept")
    w, _, kept = run(solver)
    assert kept["momentum_buffer/w"].item() == -6.0
    assert run(solver, model_of(w), optimiser=kept)[0] == 3.0


def test_a_solver_without_moments_keeps_none():
    assert len(run(SGD(lr=0.25, steps=1, batch=1, state="kept"))[2]) == 0


def test_restored_moments_live_where_the_parameters_do():
    """Fused optimisers want even their step count there; state arrives from disk on the CPU."""
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimiser = torch.optim.Adam([weight], 0.1)
    restore(optimiser, {"w": weight}, Params({"step/w": torch.tensor(3.0), "exp_avg/w": torch.ones(2)}))
    assert all(t.is_meta for t in optimiser.state[weight].values())
    assert set(kept_state(optimiser, {"w": weight})) == {"step/w", "exp_avg/w"}


@pytest.mark.parametrize("full, n", [("exp_avg/w", 3), ("exp_avg/v", 2)])
def test_moments_of_another_network_are_refused(full, n):
    """Shapes Adam would take; only where they lie in a client's state keeps a network that was cut from the wider one's."""
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ModelError, match=rf"kept moments '{full}', \({n},\), are of another network"):
        restore(torch.optim.Adam([weight], 0.1), {"w": weight}, Params({"step/w": torch.tensor(3.0), full: torch.ones(n)}))


def test_a_loss_that_is_no_number_names_round_client_job_and_step():
    """The first step throws w out of all bounds, the second sees it."""

    def wild(grads, params, given):
        return {k: torch.full_like(g, -3e38) for k, g in grads.items()}

    with pytest.raises(TrainingError, match=WHERE + r": the loss became inf in step 2 of 3; lower .*\(0.5\) or set clip"):
        run(SGD(lr=0.5, steps=3, batch=1), direction=wild)


def test_an_epoch_sees_every_image_once_and_each_epoch_in_another_order():
    eager, shard = machine(), Shard(images(*range(10)).dataset, torch.tensor([1, 3, 5, 7, 9]))
    batches = list(eager._batches(work_of(SGD(lr=1.0, epochs=4, batch=2), shard)))
    assert [len(b.x) for b in batches] == [2, 2, 1] * 4
    colours = torch.cat([((b.x + 1) * 127.5).round().flatten() for b in batches]).view(4, 5)
    assert [sorted(row.tolist()) for row in colours] == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 4
    assert len({tuple(row.tolist()) for row in colours}) > 1


def test_steps_go_over_the_end_of_an_epoch():
    sizes = [len(b.x) for b in machine()._batches(work_of(SGD(lr=1.0, steps=5, batch=2), images(1, 2, 3)))]
    assert sizes == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("flip", [False, True])
def test_a_ragged_batch_sees_the_beginning_of_a_full_batchs_randomness(flip):
    """20 images in batches of 20 or of 17 + 3: randomness is drawn for full batches, so padding could change nothing."""
    full = list(machine()._batches(work_of(SGD(lr=1.0, steps=3, batch=20), images(*[9] * 20, flip=flip))))
    ragged = list(machine()._batches(work_of(SGD(lr=1.0, steps=3, batch=20), images(*[9] * 17, flip=flip))))
    assert [len(b.labels) for b in ragged] == [17] * 3
    for whole, part in zip(full, ragged):
        assert torch.equal(whole.drawn["noise"][:17], part.drawn["noise"])


def test_mirroring_keeps_what_the_task_draws_and_mirrors_about_half():
    """Images whose left half is black: mirrored ones have it on the right."""
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


def noisy(seed: int, source: Stream, dropout: float = 0.5) -> float:
    """The weight after a fit with noise and dropout, with torch's own generator at `seed` before it."""
    torch.manual_seed(seed)
    before = torch.random.get_rng_state()
    solver = SGD(lr=0.01, epochs=2, batch=4)
    shard = images(*range(0, 250, 25))
    w, _, _ = run(solver, model_of(1.0, dropout=dropout), CoreTarget(noisy=True), shard=shard, stream=source)
    assert torch.equal(torch.random.get_rng_state(), before), "a fit leaves torch's generator as it was"
    return w


def test_a_fit_depends_on_its_stream_and_on_nothing_else():
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
    assert eager.load(model_of()) is net and net.module.training, "a pooled network is handed out as a new one would be"


def test_buffers_follow_the_data_of_a_fit():
    """All pixels are 1, BatchNorm's momentum is 0.1: the running mean goes from 0 to 0.1 to 0.19."""
    eager, fresh = machine(), CoreNormed(side=1, channels=1, classes=1).build()
    model = Model(CoreNormed(side=1, channels=1, classes=1), Params.of(fresh), Buffers.of(fresh))
    net = eager.load(model)
    eager.fit(net, work_of(SGD(lr=0.1, steps=2, batch=2), images(255, 255), direction=None))
    assert Buffers.of(net)["norm.running_mean"].item() == pytest.approx(0.19)
    assert Buffers.of(net)["norm.num_batches_tracked"].item() == 2
    assert model.buffers["norm.running_mean"].item() == 0.0
    eager.release()
    again = Buffers.of(eager.load(model))
    assert again["norm.running_mean"].item() == 0.0, "the next client starts from the model it was sent"


def test_networks_are_pooled_but_never_lent_twice():
    eager = machine()
    first, second = eager.load(model_of(1.0)), eager.load(model_of(2.0))
    assert first is not second and (first.params["w"].item(), second.params["w"].item()) == (1.0, 2.0)
    other = eager.load(model_of(3.0, dropout=0.5))
    assert other is not first and other.module.dropout.p == 0.5
    eager.release()
    again = eager.load(model_of(4.0))
    assert again in (first, second) and again.params["w"].item() == 4.0


def test_a_fit_leaves_no_gradients_behind():
    eager = machine()
    net = eager.load(model_of())
    eager.fit(net, work_of(SGD(lr=0.1, steps=1, batch=1)))
    assert all(p.grad is None for p in net.params.values())


def test_work_is_metered_as_it_is_done():
    eager, seen = machine(), []
    eager.meter.watcher = lambda: seen.append((eager.meter.images, eager.meter.evaluations))
    eager.fit(eager.load(model_of()), work_of(SGD(lr=0.1, epochs=1, batch=2), images(1, 2, 3)))
    eager.generate(eager.load(model_of()), CoreTarget(), 3, CoreNoise(), None, HERE)
    assert seen == [(2, 0), (3, 0), (3, 2), (3, 4), (3, 5), (3, 6)], "batches of 2 and 1, each evaluated twice"


def test_batch_seeds_cover_the_draw():
    seeds = batch_seeds(HERE, 5, 2)
    assert [(first, size) for _, first, size in seeds] == [(0, 2), (2, 2), (4, 1)]
    assert [seed for seed, _, _ in seeds] == [HERE.child("batch", first).seed for first in (0, 2, 4)], "a stream for each"
    assert [s for s, _, _ in batch_seeds(HERE, 4, 2)] == [s for s, _, _ in seeds[:2]], "more images begin with the same ones"
    assert batch_seeds(HERE.child("other"), 5, 2)[0][0] != seeds[0][0]


def test_anybody_can_repeat_a_draw_from_its_seeds():
    before = torch.random.get_rng_state()
    drawn = machine().generate(Net(OneWeight(), arch=model_of().arch), CoreTarget(), 5, CoreNoise(), None, HERE)
    assert torch.equal(torch.random.get_rng_state(), before)
    seeds = [(torch.Generator().manual_seed(seed), n) for seed, _, n in batch_seeds(HERE, 5, 2)]
    by_hand = [torch.randn(n, 1, 1, 1, generator=generator) for generator, n in seeds]
    assert torch.equal(drawn.pixels, torch.cat(by_hand)) and drawn.labels is None and not drawn.pixels.requires_grad


def test_a_conditional_model_draws_its_classes_in_turn():
    """Two classes, five images: 0, 1, 0, 1, 0; the labels go to the sampler batch by batch."""
    drawn = bench().generate(model_of(conditional=True), 5, CoreNoise(), stream=HERE)
    plain = bench().generate(model_of(), 5, CoreNoise(), stream=HERE)
    assert drawn.labels.tolist() == [0, 1, 0, 1, 0] and plain.labels is None
    assert torch.equal(drawn.pixels.flatten(), plain.pixels.flatten() + torch.tensor([0.0, 100.0, 0.0, 100.0, 0.0]))
    wanted = bench().generate(model_of(conditional=True), 3, CoreNoise(), labels=torch.tensor([1, 1, 0]), stream=HERE)
    assert wanted.labels.tolist() == [1, 1, 0] and (wanted.pixels.flatten() > 50).tolist() == [True, True, False]


def test_every_call_of_a_job_has_randomness_of_its_own_and_repeats():
    def two() -> list[Tensor]:
        client = bench()
        return [client.generate(model_of(), 2, CoreNoise()).pixels for _ in range(2)]

    (a, b), (c, d) = two(), two()
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
    assert not torch.equal(a, bench(8).generate(model_of(), 2, CoreNoise()).pixels)


def test_a_workbench_uses_the_rate_of_its_federated_round():
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
    assert net.params["w"].item() == 3.0, "as two steps with momentum, worked out above"
    cut = client.load(model_of(dropout=1e-9))
    client.fit(cut, solver, client.data, direction=only_w)
    assert cut.params["w"].item() == pytest.approx(1.5), "the moments of another network are dropped"


def test_a_fresh_solver_touches_no_state():
    client = bench()
    client.fit(client.load(model_of()), SGD(lr=0.25, steps=1, batch=1, momentum=0.5), client.data)
    assert client.state == {}


def test_no_data_is_an_error_that_says_where():
    client = bench()
    with pytest.raises(FederationError, match="round 3, client 7, job 'train': there is no data to fit"):
        client.fit(client.load(model_of()), SGD(lr=0.25, steps=1), Shard(ONE.dataset, ONE.rows[:0]))
    server = Workbench(machine(), CoreTarget(), 10)
    server.begin(stream(0, 3, "round", 0, -1, ""), 2)
    assert server.where == "round 3, the server, job 'round'"


def test_a_model_that_does_not_fit_is_refused_when_loaded():
    with pytest.raises(ModelError, match="got no value for 'v'"):
        machine().load(dataclasses.replace(model_of(), params=Params({"w": torch.tensor(1.0)})))
