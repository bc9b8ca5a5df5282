"""Fits of networks of one weight: batches, tasks, columns, frozen networks and moving averages."""

import dataclasses

import pytest
import torch
from one_weight import (
    HERE,
    ONE,
    CoreNoise,
    CoreNormed,
    CoreOneWeight,
    CoreTarget,
    bench,
    images,
    machine,
    model_of,
    only_w,
    work_of,
)
from torch import nn
from toy import ADAM, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.algorithm import on_client
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.errors import DataError, FederationError
from effuse.core.fit import deal
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.solvers import SGD, AdamW
from effuse.core.spec import spec
from effuse.core.wire import decode, encode
from effuse.core.workbench import Client
from effuse.diffusion.samplers import Ancestral
from effuse.machines.hollow import Hollow
from effuse.runs.driver import resume, run
from effuse.runs.save import load


def test_an_epoch_has_every_image_once_and_a_small_batch_is_padded_with_its_first_image():
    """Five images in batches of two, two epochs: 2, 2 and 1 real images, twice."""
    dealt = list(deal(work_of(SGD(lr=1.0, epochs=2, batch=2), images(1, 2, 3, 4, 5))))
    assert [d.real for d in dealt] == [2, 2, 1] * 2 and all(len(d.positions) == 2 for d in dealt)
    assert all(d.positions[d.real :].tolist() == [int(d.positions[0])] * (2 - d.real) for d in dealt)
    for epoch in (dealt[:3], dealt[3:]):
        assert sorted(torch.cat([d.positions[: d.real] for d in epoch]).tolist()) == [0, 1, 2, 3, 4]


def test_steps_truncate_the_epochs_without_changing_their_batches():
    """Four steps are the first four of the six batches of two epochs."""
    truncated = list(deal(work_of(SGD(lr=1.0, steps=4, batch=2), images(1, 2, 3, 4, 5))))
    whole = list(deal(work_of(SGD(lr=1.0, epochs=2, batch=2), images(1, 2, 3, 4, 5))))
    assert len(truncated) == 4
    assert all(torch.equal(a.positions, b.positions) and a.real == b.real for a, b in zip(truncated, whole))


def test_dropping_a_ragged_batch_leaves_the_others_as_they_were():
    """Five images in batches of two: the first two batches of each epoch. One image alone is a batch of its own."""
    whole = list(deal(work_of(SGD(lr=1.0, epochs=2, batch=2), images(1, 2, 3, 4, 5))))
    dropped = list(deal(work_of(SGD(lr=1.0, epochs=2, batch=2, ragged="drop"), images(1, 2, 3, 4, 5))))
    assert [d.real for d in dropped] == [2] * 4
    assert [d.positions.tolist() for d in dropped] == [whole[i].positions.tolist() for i in (0, 1, 3, 4)]
    assert [d.real for d in deal(work_of(SGD(lr=1.0, steps=3, batch=2, ragged="drop"), images(1)))] == [1] * 3


def test_a_rehearsal_counts_what_is_dropped():
    """Two epochs of five images in batches of two, on every machine: four steps and eight images."""
    work = work_of(SGD(lr=1.0, epochs=2, batch=2, ragged="drop"), images(1, 2, 3, 4, 5))
    hollow, eager = Hollow(), machine()
    nets = {hollow: hollow.load(hollow.initial(model_of().arch, HERE)), eager: eager.load(model_of())}
    counted = [each.fit(net, work)[0] for each, net in nets.items()]
    assert [(fit.steps, fit.images) for fit in counted] == [(4, 8)] * 2


@spec
class CoreOther(CoreTarget):
    """The target output is 5."""

    def loss(self, net, batch):
        return batch.mean((net(batch.x) - 5.0).square())


def test_a_fit_may_have_another_task_than_the_recipe():
    """lr 1/4, loss (w - c)^2: one step from 0 leads to 1.5 for the recipe's c = 3, and to 2.5 for c = 5."""
    client, solver = bench(), SGD(lr=0.25, steps=1, batch=1)
    ends = []
    for task in (None, CoreOther()):
        net = client.load(model_of())
        client.fit(net, solver, client.data, direction=only_w, task=task)
        ends.append(net.params["w"].item())
    assert ends == [1.5, 2.5]


def test_networks_trained_by_one_solver_have_separate_moments():
    """Momentum 1/2 leads from 0 to 1.5 and to 3 (see test_machine.py), also when other networks are trained in between."""
    client, solver = bench(), SGD(lr=0.25, steps=1, batch=1, momentum=0.5, state="kept")
    net, other, twin = client.load(model_of()), client.load(model_of(dropout=1e-9)), client.load(model_of())
    for _ in range(2):
        client.fit(net, solver, client.data, direction=only_w)
        client.fit(other, solver, client.data, direction=only_w)
        client.fit(twin, solver, client.data, direction=only_w, slot="twin")
    assert [n.params["w"].item() for n in (net, twin)] == [3.0, 3.0] and other.params["w"].item() == pytest.approx(3.0)
    assert len(client.state) == 3


def test_the_moments_of_a_pruned_network_replace_those_of_the_whole_one():
    """A toy U-Net of four channels, then of two. The moments start anew and have the same place in the state."""
    solver = dataclasses.replace(ADAM, state="kept")
    data = Shard.whole(ToyImages().load("train"))
    recipe = toy_recipe()
    client = Client(machine(), recipe.task, 2, 0, data)
    whole = ToyUnet().resolved(Shape(4, 1, 2))
    cut = dataclasses.replace(whole, cut="down:1>2 middle:2>2 up:2>1")
    assert cut.whole() == whole != cut
    for arch in (whole, cut, cut):
        client.begin(Stream((0,)), 0)
        client.fit(client.load(arch.initial(Stream((1,)))), solver, data)
    (moments,) = client.state.values()
    assert moments["exp_avg/down.weight"].shape == (2, 1, 3, 3)
    assert moments["step/down.weight"].item() == 10, "two fits of five steps"


def test_computing_a_gradient_changes_nothing():
    """At w = 1 and x = 1, the gradient of (w x + v - 3)^2 is -4 for both w and v, for any number of batches."""
    client = bench()
    net = client.load(model_of(1.0))
    found = client.gradient(net, images(255, 255, 255), batch=2)
    assert {k: t.item() for k, t in found.items()} == {"w": -4.0, "v": -4.0}
    assert client.unload(net).params.digest() == model_of(1.0).params.digest() and client.state == {}


def outputs(net, batch, given):
    assert not torch.is_grad_enabled() and not net.module.training
    return net(batch.x).flatten(1) + given["more"]


def test_a_function_is_applied_to_the_rows_in_their_order():
    """The shard has the pixels 5, 3 and 1 in rows 2, 1 and 0. With w = 2 the results are 2 x + 1, x = 2 p / 255 - 1."""
    shard = Shard(images(1, 3, 5).dataset, torch.tensor([2, 1, 0]))
    client = bench()
    found = client.apply(client.load(model_of(2.0)), outputs, shard, given={"more": 1.0})
    expected = torch.tensor([[2 * (2 * p / 255 - 1) + 1] for p in (5, 3, 1)])
    torch.testing.assert_close(found, expected)


def test_a_function_of_many_images_is_applied_in_batches():
    """600 images are more than one batch."""
    shard = images(*[i % 256 for i in range(600)])
    client = bench()
    found = client.apply(client.load(model_of(1.0)), outputs, shard, given={"more": 0.0})
    torch.testing.assert_close(found, shard.dataset.floats(shard.dataset.images).flatten(1))


def test_a_rehearsal_applies_functions_to_shapes():
    hollow = Hollow()
    client = Client(hollow, CoreTarget(), 1, 0, images(1, 2, 3))
    model = hollow.initial(CoreOneWeight(side=1, channels=1, classes=2), HERE)
    net = client.load(model)
    found = client.apply(net, lambda_free_outputs, client.data, given={"teacher": model})
    assert found.is_meta and found.shape == (3, 1)
    assert client.gradient(net, client.data, batch=2).keys() == {"w", "v"}


def lambda_free_outputs(net, batch, given):
    return net(batch.x).flatten(1) + given["teacher"](batch.x).flatten(1)


def distilled(net, batch, given):
    """(w x - u x)^2, where u is the frozen network's weight."""
    return batch.mean((net(batch.x) - given["teacher"](batch.x)).square())


def test_a_loss_may_call_a_frozen_network():
    """From 0 towards u = 4 on x = 1: gradient 2 (w - 4), lr 1/4, so w = 2 and then 3. The frozen network does not change."""
    client, solver, teacher = bench(), SGD(lr=0.25, steps=2, batch=1), model_of(4.0)
    net = client.load(model_of())
    client.fit(net, solver, client.data, loss=distilled, given={"teacher": teacher}, direction=only_w)
    assert net.params["w"].item() == 3.0 and teacher.params["w"].item() == 4.0
    reused = client.load(model_of(1.0))
    assert all(p.requires_grad for p in reused.params.values()) and reused.module.training


def held(net, batch, given):
    """(w - a)^2 / 2 - w on x = 1, where a is the moving average: dw = w - a - 1."""
    w = net(batch.x).mean()
    return 0.5 * (w - given["average"]["w"]).square() - w


def test_a_loss_is_given_the_moving_average_of_the_weights():
    """lr 1, average a <- a/2 + w/2. w = a = 0: w = 1, a = 1/2. Then dw = 1 - 1/2 - 1 = -1/2: w = 3/2, a = 1."""
    client, solver = bench(), SGD(lr=1.0, steps=2, batch=1, ema=0.5)
    net = client.load(model_of())
    fit = client.fit(net, solver, client.data, loss=held, direction=only_w)
    assert net.params["w"].item() == 1.5 and fit.average["w"].item() == 1.0
    with pytest.raises(FederationError, match="'average' of `given` is filled in by the fit"):
        client.fit(net, solver, client.data, loss=held, given={"average": 1.0})


def test_columns_belong_to_the_rows_of_a_shard():
    shard = Shard(images(1, 3, 5).dataset, torch.tensor([2, 0])).with_columns(F=torch.tensor([[20.0], [0.0]]))
    assert shard.columns["F"].tolist() == [[20.0], [0.0]] and shard.dataset is not None and len(shard) == 2
    assert shard.with_columns(G=torch.zeros(2)).columns.keys() == {"F", "G"}
    with pytest.raises(DataError, match="column 'F' has 3 entries for 2 images"):
        shard.with_columns(F=torch.zeros(3))


def to_column(net, batch, given):
    """Check that each image comes with its own column entry, here its brightness."""
    assert torch.equal(batch.columns["brightness"], batch.x.flatten(1).mean(1))
    return batch.task.loss(net, batch)


def test_columns_arrive_with_their_images():
    data = images(*range(0, 250, 10)).dataset
    shard = Shard(data, torch.tensor([5, 3, 20, 7, 11]))
    shard = shard.with_columns(brightness=data.floats(data.images[shard.rows]).flatten(1).mean(1))
    client = bench()
    client.fit(client.load(model_of()), SGD(lr=1e-3, epochs=3, batch=2), shard, loss=to_column)


def weighted_by_pull(net, batch, given):
    """The task's loss, and `pull` times the distance of the features from a column."""
    features = net(*batch.task.inputs(batch), give="features")
    return batch.task.loss(net, batch) + given["pull"] * batch.mean((features - batch.columns["F"]).square().mean(1))


@spec
class CoreColumned(FedAvg):
    """FedAvg with a column in addition to the images."""

    pull: float = 0.0

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        data = client.data.with_columns(F=torch.ones(client.size, 4))
        fit = client.fit(net, self.local, data, loss=weighted_by_pull, given={"pull": self.pull})
        return Update(client.unload(net), self.weight(client), fit.loss)


def test_columns_of_weight_zero_give_the_same_bits_as_fedavg(tmp_path):
    """Columns change neither the order nor any draw. There is no dropout, which a second forward pass would change."""
    changes = {"model": ToyUnet(dropout=0.0), "rounds": 3}
    digests = [
        run(toy_recipe(algorithm=algorithm, **changes), tmp_path / str(i)).weights_sha256
        for i, algorithm in enumerate((FedAvg(local=ADAM), CoreColumned(local=ADAM), CoreColumned(local=ADAM, pull=0.1)))
    ]
    assert digests[0] == digests[1] != digests[2]


class Half(nn.Module):
    """A layer that is trained, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt, self.fixed = nn.Linear(1, 1), nn.Linear(1, 1)
        with torch.no_grad():
            self.fixed.weight.fill_(2.0)
            self.fixed.bias.fill_(1.0)

    def forward(self, x):
        return self.fixed(self.learnt(x))


@spec
class CoreHalf(Arch):
    frozen = ("fixed",)

    def build(self) -> nn.Module:
        return Half()


def test_frozen_parameters_are_in_no_model_and_no_fit_changes_them():
    """Only trained parameters are counted, sent, filled in and changed; `build` sets the others."""
    arch = CoreHalf(side=1, channels=1, classes=1)
    model = arch.initial(Stream((0,)))
    assert model.params.keys() == {"learnt.weight", "learnt.bias"}
    assert decode(encode(model, Model), Model).params.keys() == model.params.keys()
    eager = machine()
    net = eager.load(model)
    assert not net.module.fixed.weight.requires_grad and net.params.keys() == model.params.keys()
    eager.fit(net, work_of(SGD(lr=0.1, steps=3, batch=1), ONE, direction=None))
    assert Params.of(net).digest() != model.params.digest()
    assert (net.module.fixed.weight.item(), net.module.fixed.bias.item()) == (2.0, 1.0)
    eager.release()
    again = eager.load(model)
    assert Params.of(again).digest() == model.params.digest() and not again.module.fixed.weight.requires_grad


def test_rows_of_a_data_set_keep_all_its_columns():
    data = Dataset(
        torch.arange(3, dtype=torch.uint8)[:, None, None, None],
        torch.tensor([0, 1, 0]),
        ("a", "b"),
        groups=torch.tensor([7, 8, 9]),
    )
    rows = data.rows(torch.tensor([2, 0]))
    assert rows.images.flatten().tolist() == [2, 0] and rows.labels.tolist() == [0, 0]
    assert rows.groups.tolist() == [9, 7] and rows.domains is None


def test_a_network_without_an_architecture_has_a_clear_error():
    with pytest.raises(Exception, match="made without an architecture"):
        _ = Net(Half()).arch


# ---- what other networks, and other kinds of values, need ----


@spec
class CoreFixedUnet(ToyUnet):
    """A toy U-Net whose bottleneck is set by `build` and never trained."""

    parts = {"encoder": ("down",), "decoder": ("up",)}
    frozen = ("middle",)

    def build(self) -> nn.Module:
        net = super().build()
        with torch.no_grad():
            for p in net.middle.parameters():
                p.fill_(0.5)
        return net


def test_a_network_with_constant_values_is_trained_saved_opened_and_resumed(tmp_path):
    recipe = toy_recipe(model=CoreFixedUnet(), sampler=Ancestral(batch=2))
    result = run(recipe, tmp_path / "run")
    opened = load(tmp_path / "run")
    assert opened.model.params.keys() == {"down.weight", "down.bias", "up.weight", "up.bias"}
    assert opened.model.params.digest() == result.weights_sha256 and len(opened.sample(2)) == 2
    assert resume(tmp_path / "run").weights_sha256 == result.weights_sha256


def same(grads, params, given):
    return dict(grads)


def test_a_frozen_layer_does_not_move_under_a_direction():
    """A gradient of nought would let AdamW's decay act: v stays at 2."""
    client, net = bench(), bench().load(model_of(1.0, 2.0))
    net.params["v"].requires_grad_(False)
    client.fit(net, AdamW(lr=0.1, steps=3, batch=1, weight_decay=0.5), client.data, direction=same)
    assert net.params["v"].item() == 2.0 != net.params["w"].item()


def test_networks_with_dropout_train_alike_on_machines_side_by_side():
    """Such a machine keys no generator for networks without dropout; another network may have it."""
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        eager = machine()
        eager.threads = 1
        net = eager.load(model_of(1.0, dropout=0.5))
        eager.fit(net, work_of(SGD(lr=0.01, epochs=2, batch=4), images(*range(0, 250, 25))))
        ends.append(net.params["w"].item())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("value", [1, None, [model_of()], {"a": 1.0}, "text"], ids=str)
def test_given_holds_what_every_machine_can_hand_over(value):
    client = bench()
    with pytest.raises(FederationError, match="`given` has .* 'x'; give floats, tensors, Params or models"):
        client.fit(client.load(model_of()), SGD(lr=0.1, steps=1, batch=1), client.data, given={"x": value})


def summed(net, batch, given):
    return net(batch.x).sum(0)


def noise_of(net, batch, given):
    return batch.drawn["noise"].flatten(1)


def test_apply_needs_a_row_for_each_image_and_draws_by_its_stream():
    shard, client = images(*range(200)), bench()
    with pytest.raises(FederationError, match=r"summed returns a tensor of shape \(1, 1, 1\) for 200 images"):
        client.apply(client.load(model_of()), summed, shard)
    first, again, other = bench(), bench(), bench(8)
    a, b, c = (place.apply(place.load(model_of()), noise_of, shard) for place in (first, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert not torch.equal(a, first.apply(first.load(model_of()), noise_of, shard)), "each call has a stream of its own"


def labelled(net, batch, given):
    assert isinstance(batch.task, CoreOther) and torch.equal(batch.columns["F"], batch.x.flatten(1).mean(1))
    return batch.columns["F"]


def test_apply_takes_a_task_and_columns():
    data = images(*range(0, 250, 10)).dataset
    shard = Shard(data, torch.tensor([5, 3, 20]))
    bright = data.floats(data.images[shard.rows]).flatten(1).mean(1)
    client = bench()
    found = client.apply(client.load(model_of()), labelled, shard.with_columns(F=bright), task=CoreOther())
    assert torch.equal(found, bright)


def test_the_gradient_may_be_of_another_loss_and_leaves_statistics_alone():
    """(w x - u x)^2 at w = 1, u = 4: the slope is 2 (1 - 4) = -6. BatchNorm's running mean stays at nought."""
    client = bench()
    net = client.load(model_of(1.0))
    assert client.gradient(net, client.data, batch=1, loss=distilled, given={"teacher": model_of(4.0)})["w"].item() == -6.0
    normed = CoreNormed(side=1, channels=1, classes=1).initial(Stream((0,)))
    net = client.load(normed)
    client.gradient(net, images(255, 255), batch=2)
    assert net.buffers["norm.running_mean"].item() == 0.0


def stopped(net, batch, given):
    teacher = given["teacher"]
    assert not teacher.module.training and not any(p.requires_grad for p in teacher.params.values())
    return batch.mean((net(batch.x) - teacher(batch.x)).square())


def test_a_frozen_network_is_in_evaluation_mode_and_given_back():
    """One network is trained, the other lent for the fit: the next job that loads one takes that."""
    eager = machine()
    client = bench(eager=eager)
    net = client.load(model_of())
    client.fit(net, SGD(lr=0.1, steps=1, batch=1), client.data, loss=stopped, given={"teacher": model_of(4.0)})
    assert [len(free) for free in eager._free.values()] == [1]


def test_a_draw_may_have_a_task_of_its_own():
    seen = []

    @spec
    class CoreSeeing(CoreNoise):
        def draw(self, net, task, *rest):
            seen.append(type(task))
            return super().draw(net, task, *rest)

    bench().generate(model_of(), 1, CoreSeeing(), task=CoreOther())
    bench().generate(model_of(), 1, CoreSeeing())
    assert seen == [CoreOther, CoreTarget]
