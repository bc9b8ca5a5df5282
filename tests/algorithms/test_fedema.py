"""FedEMA by hand: BYOL's loss and target, how far an encoder moves, and what a client mixes."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from toy import ADAM, PROJECTED, SMALL, toy_recipe

from effuse.algorithms.fedema import FedEMA, Last, byol, convolutions, kept_share, moved
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.fit import Fit
from effuse.core.model import Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.core.task import Batch
from effuse.models.resnet import LinearClassifier
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.views import Views
from effuse.tools.check import check
from effuse.transport.state import Snapshots

LOCAL = SGD(lr=0.05, batch=8, epochs=1, ema=0.9)


class Twice(Views):
    """Both views are the image: its two pixels and those in reverse order."""

    def seen(self, batch: Batch) -> Tensor:
        return torch.cat([batch.x, batch.x.flip(3)])


class Scaled(nn.Module):
    """The projection is the view's pixels times p, and the prediction is that with its second value times q."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, give: str = "output"):
        z = self.p * x.flatten(1)
        return z if give == "projection" else z * torch.stack([torch.ones(()), self.q])


def loss_of(pixels, average=(1.0, 1.0), weight=None):
    """BYOL's loss, and its gradient to the projection and the prediction."""
    net = Net(Scaled())
    x = torch.tensor(pixels).view(-1, 1, 1, 2)
    batch = Batch(x, torch.zeros(len(x), dtype=torch.int64), Twice(), weight=weight)
    loss = byol(net, batch, {"average": {"p": torch.tensor(average), "q": torch.ones(())}})
    loss.backward()
    return loss.item(), torch.cat([net.params["p"].grad, net.params["q"].grad[None]])


def test_byol_by_hand():
    """Views (3, 4) and (4, 3): cosine 24/25 both ways, so 2 * (2 - 2 * 24/25) = 0.16.

    A target of (1, 0) projects onto the first axis: cosines 3/5 and 4/5, so 4 - 2 (3/5 + 4/5) = 1.2.
    """
    assert loss_of([3.0, 4.0])[0] == pytest.approx(0.16, rel=1e-5)
    assert loss_of([3.0, 4.0], average=(1.0, 0.0))[0] == pytest.approx(1.2, rel=1e-6)


def test_each_prediction_is_compared_with_the_other_view():
    """Views (1, 0) and (0, 1) are orthogonal, so 4; each with itself would give 0."""
    assert loss_of([1.0, 0.0])[0] == pytest.approx(4.0)


def test_the_gradient_is_that_of_the_prediction_alone():
    """With a target of (1, 0), cos = 3 p / sqrt(9 p^2 + 16) and 4 p / sqrt(16 p^2 + 9): by differences at p = 1."""

    def at(p: float) -> float:
        return 4.0 - 2.0 * (3 * p / (9 * p * p + 16) ** 0.5 + 4 * p / (16 * p * p + 9) ** 0.5)

    _, gradient = loss_of([3.0, 4.0], average=(1.0, 0.0))
    assert gradient[0].item() == pytest.approx((at(1.001) - at(0.999)) / 0.002, rel=1e-3) and gradient[0] < -0.1


def test_a_padded_batch_equals_the_unpadded_one():
    plain, gradient = loss_of([[3.0, 4.0], [1.0, 2.0]])
    padded = loss_of([[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]], weight=torch.tensor([1.0, 1.0, 0.0]))
    assert padded[0] == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(padded[1], gradient)
    assert abs(loss_of([[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]])[0] - plain) > 1e-3


def params(first: float, second: float) -> Params:
    """Two convolutions of four weights each, and what is no convolution of the encoder."""
    return Params(
        {
            "encoder.a.weight": torch.full((1, 1, 2, 2), first),
            "encoder.b.weight": torch.full((2, 2, 1, 1), second),
            "encoder.norm.weight": torch.full((4,), 9.0 * first),
            "projector.0.weight": torch.full((4, 1), 5.0 * second),
        }
    )


def test_how_far_an_encoder_moves_by_hand():
    """The first convolution moves by 0.3 in four weights, so by 0.6; the second by 0.2, so by 0.4: d = 0.5."""
    assert convolutions(params(1.0, 1.0)) == ["encoder.a.weight", "encoder.b.weight"]
    assert moved(params(1.0, 1.0), params(1.3, 0.8)) == pytest.approx(0.5, rel=1e-6)


class Bench:
    """A client whose fit moves every convolution by a given distance."""

    size, data = 1, None

    def __init__(self, distance: float, at: int, last: Last | None = None) -> None:
        self.state = {} if last is None else {"last": last}
        self.distance, self.federated = distance, at

    def load(self, model: Model) -> Model:
        self.started = model
        return model

    def fit(self, net, solver, data, loss, average) -> Fit:
        self.target = average
        return Fit(1, 1, 0.0, average=params(7.0, 7.0))

    def unload(self, net: Model) -> Model:
        first, second = (float(net.params[f"encoder.{k}.weight"].flatten()[0]) for k in "ab")
        return Model(net.arch, params(first + self.distance / 2, second + self.distance / 2), net.buffers)


def model(value: float) -> Model:
    return Model(PROJECTED, params(value, value), Buffers({}))


def test_what_a_client_mixes_by_hand():
    """d 0.5 in the first round: lambda = 0.7 / 0.5 = 1.4. After d 0.3 mu is 0.42, and after d 0.9 it is 1, not 1.26.

    Sent 1 while its own is 3, a client begins at 1 + 0.42 (3 - 1) = 1.84, and its target is its own.
    """
    assert [kept_share(1.4, d) for d in (0.5, 0.3, 0.9)] == pytest.approx([0.7, 0.42, 1.0])
    algorithm, first = FedEMA(local=LOCAL), Bench(0.5, at=0)
    algorithm.train(first, model(1.0))
    last = first.state["last"]
    assert first.target is None and first.started.params.digest() == model(1.0).params.digest()
    assert (last.moved, last.scale, last.at) == (pytest.approx(0.5), pytest.approx(1.4), 0)
    second = Bench(0.3, at=1, last=last)
    algorithm.train(second, model(1.0))
    assert second.target is last.target
    assert second.state["last"].moved == pytest.approx(0.3) and second.state["last"].scale == last.scale
    third = Bench(0.9, at=2, last=dataclasses.replace(second.state["last"], online=model(3.0)))
    algorithm.train(third, model(1.0))
    assert third.started.params["encoder.a.weight"].flatten()[0].item() == pytest.approx(1.84, rel=1e-5)
    fourth = Bench(0.1, at=3, last=dataclasses.replace(third.state["last"], online=model(3.0)))
    algorithm.train(fourth, model(1.0))
    assert fourth.started.params["encoder.a.weight"].flatten()[0].item() == pytest.approx(3.0, rel=1e-6)


def test_who_missed_a_round_takes_the_global_network():
    """For both networks: its own online network, its target and d are old; lambda stays."""
    last = Last(model(3.0), params(7.0, 7.0), 0.5, 1.4, at=0)
    late = Bench(0.3, at=2, last=last)
    FedEMA(local=LOCAL).train(late, model(1.0))
    assert late.target is None and late.started.params.digest() == model(1.0).params.digest()
    assert late.state["last"].scale == 1.4 and late.state["last"].at == 2


def test_the_target_is_the_average_over_steps(tmp_path):
    """One step from the global network w to y: the target becomes 0.9 w + 0.1 y."""
    one = SGD(lr=0.05, batch=64, steps=1, ema=0.9)
    run(toy_recipe(algorithm=FedEMA(local=one), rounds=1, clients=1), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    last = Snapshots(folder.path / "clients" / "0").read(folder.load_checkpoint().snapshots[0])["last"]
    assert (last.online.params - last.target).norm() > 1e-3
    began = PROJECTED.resolved(Shape(4, 1, 2)).initial(Stream((0, -1, "model", 0, -1, "initial")))
    torch.testing.assert_close(dict(began.params.lerp(last.online.params, 0.1)), dict(last.target), rtol=1e-5, atol=1e-6)


def test_the_server_gets_online_networks_only(tmp_path):
    """Three clients, two rounds: what FedAvg would send of such networks."""
    found = run(toy_recipe(algorithm=FedEMA(local=LOCAL)), tmp_path / "run")
    assert found.traffic.parameters.up == found.traffic.parameters.down == 2 * 3 * found.parameters


def test_what_cannot_work_is_refused():
    with pytest.raises(
        RecipeError, match="algorithm.local.ema: BYOL's target is the moving average over steps; set ema=0.99"
    ):
        FedEMA(local=ADAM)
    recipe = toy_recipe(algorithm=FedEMA(local=LOCAL))
    without = dataclasses.replace(PROJECTED, predictor=False)
    plain = dataclasses.replace(PROJECTED, encoder=LinearClassifier())
    for network, words in (
        (SMALL, r"model: cnn predicts no projection; use projected\(encoder=cnn"),
        (without, "model: projected predicts no projection"),
        (plain, "model.encoder: FedEMA measures how far convolutions move, and there are none"),
    ):
        with pytest.raises(RecipeError, match=words):
            check(dataclasses.replace(recipe, model=network))
