"""FedProto by hand: the distance from prototypes, who counts for how much in them, and padding."""

import dataclasses

import pytest
import torch
from hand import HandNet, one_weight_recipe
from torch import Tensor, nn
from torch.nn import functional
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedproto import FedProto, FedProtoOriginal, ProtoMeans, ProtoUpdate, prototyped, prototypes
from effuse.algorithms.localonly import LocalOnly
from effuse.core.errors import RecipeError, WireError
from effuse.core.model import Net
from effuse.core.params import Params
from effuse.core.recipe import Evaluate
from effuse.core.reducers import Median
from effuse.core.solvers import SGD
from effuse.core.task import Batch
from effuse.data.dirichlet import LabelSkew
from effuse.metrics.accuracy import Accuracy
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.transport.state import Snapshots

STILL = SGD(lr=1e-30, batch=8, epochs=1)  # no weight moves
GIVEN = {
    "means": torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 5.0]]),
    "known": torch.tensor([1.0, 0.0, 1.0]),
    "pull": torch.tensor(2.0),
}


class Fixed(nn.Module):
    """Its features are a row of weights for each value of the pixel, and its logits are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.5, 2.5]]))

    def forward(self, x: Tensor, give: str = "output"):
        z = self.rows[x.flatten().long()]
        return torch.zeros(len(x), 3) + 0 * z.sum(), z


def loss_of(labels: list[int], rows: list[int], weight: Tensor | None = None):
    """The loss, its second value, and the gradient of the rows."""
    net = Net(Fixed())
    x = torch.tensor(rows).float().view(-1, 1, 1, 1)
    loss, held = prototyped(net, Batch(x, torch.tensor(labels), Classify(), weight=weight), GIVEN)
    loss.backward()
    return loss.detach(), held.detach(), net.params["rows"].grad


def test_the_distance_is_a_mean_over_images_and_features():
    """z = (1, 2) from P_0 = (0, 0): (1 + 4) / 2 = 2.5. z = (3, 4) has the unknown class 1: 0, and it counts.

    z = (1.5, 2.5) from P_2 = (1, 5): (0.25 + 6.25) / 2 = 3.25. The mean is 5.75 / 3, twice that the second value.
    The cross-entropy of zero logits is ln 3 = 1.098612. The gradient of row 0 is 2 / 3 * 2 (1, 2) / 2 = (2/3, 4/3).
    """
    loss, held, gradient = loss_of([0, 1, 2], [0, 1, 2])
    assert held.item() == pytest.approx(2 * 5.75 / 3, rel=1e-6)
    assert loss.item() == pytest.approx(1.0986123 + 2 * 5.75 / 3, rel=1e-6)
    assert gradient[0].tolist() == pytest.approx([2 / 3, 4 / 3]) and gradient[1].tolist() == [0.0, 0.0]


def test_a_padded_batch_equals_the_unpadded_one():
    plain, padded = loss_of([0, 2], [0, 2]), loss_of([0, 2, 0], [0, 2, 0], torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(padded, plain)
    assert abs(loss_of([0, 2, 0], [0, 2, 0])[0] - plain[0]) > 0.1, "a copy that counts would change it"


def reduced(*told: Params) -> Params:
    """What the server gets: the mean over clients, each counted once."""
    return Params({k: torch.stack([t[k] for t in told]).mean(0) for k in told[0]})


def of(value: float, count: float) -> Params:
    return Params({"sums": torch.tensor([[value * count], [0.0]]), "counts": torch.tensor([count, 0.0])})


def test_owners_count_alike_or_by_images():
    """Means 1 of one image and 4 of three: (1 + 4) / 2 = 2.5, or (1 + 12) / 4 = 3.25. Eq. 6 literally halves the latter.

    A third client has no such image and changes nothing. Class 1 is nobody's.
    """
    nobody = of(0.0, 0.0)
    uniform, by_size = (prototypes(reduced(of(1, a), of(4, b), nobody), None) for a, b in ((1, 1), (1, 3)))
    assert uniform["means"][0].item() == pytest.approx(2.5) and by_size["means"][0].item() == pytest.approx(3.25)
    assert uniform["known"].tolist() == by_size["known"].tolist() == [1.0, 0.0]


def test_a_class_that_nobody_tells_keeps_its_prototype():
    before = Params({"means": torch.tensor([[7.0], [8.0]]), "known": torch.tensor([0.0, 1.0])})
    found = prototypes(of(2.0, 3.0), before)
    assert found["means"].flatten().tolist() == [2.0, 8.0] and found["known"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("means", ["uniform", "size"])
def test_clients_tell_the_means_of_their_features(means, tmp_path):
    """No weight moves, so the prototypes are means of the first model's features: of class means, or of all images."""
    recipe = toy_recipe(algorithm=FedProto(local=STILL, means=means), rounds=1, partition=LabelSkew(beta=0.5), clients=3)
    run(recipe, tmp_path / "run")
    server, train = RunFolder(tmp_path / "run").load_checkpoint().server, recipe.data.load("train")
    resolved = recipe.resolved(train)
    net = resolved.model.build().eval()
    net.load_state_dict(dict(server.model.params))
    with torch.no_grad():
        z = net(train.floats(train.images), give="features")
    shards = [torch.as_tensor(s.rows) for s in resolved.shards(train)]
    for c in range(2):
        own = [z[rows[train.labels[rows] == c]] for rows in shards]
        own = [rows for rows in own if len(rows)]
        each = torch.stack([rows.mean(0) for rows in own]).mean(0)
        wanted = each if means == "uniform" else torch.cat(own).mean(0)
        torch.testing.assert_close(server.prototypes["means"][c], wanted)
    sizes = {tuple(train.labels[rows].bincount(minlength=2).tolist()) for rows in shards}
    assert len(sizes) == 3, "otherwise both rules agree"


def test_the_first_round_is_fedavgs_and_the_second_is_not(tmp_path):
    digests = {}
    for algorithm in (FedProto(local=ADAM), FedAvg(local=ADAM)):
        for rounds in (1, 2):
            recipe = dataclasses.replace(toy_recipe(algorithm=FedProto(local=ADAM), rounds=rounds), algorithm=algorithm)
            digests[algorithm.name, rounds] = run(recipe, tmp_path / f"{algorithm.name}-{rounds}").weights_sha256
    assert digests["fedproto", 1] == digests["fedavg", 1] and digests["fedproto", 2] != digests["fedavg", 2]
    noted = [record.noted for record in RunFolder(tmp_path / "fedproto-2").records()]
    assert not noted[0] and noted[1]["held"] > 0


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_without_a_pull_it_is_fedavg(engine, tmp_path):
    """The same bits and the same traffic, since nothing is told."""
    recipe = toy_recipe(algorithm=FedProto(local=ADAM, pull=0.0), rounds=3)
    fedavg = dataclasses.replace(recipe, algorithm=FedAvg(local=ADAM))
    a, b = (run(r, tmp_path / r.algorithm.name, engine=engine) for r in (recipe, fedavg))
    assert a.weights_sha256 == b.weights_sha256 and a.traffic.bytes == b.traffic.bytes


def test_distances_are_in_fp32_under_autocast():
    """A layer in bf16 gives z; 1.0078125 is the next number of bf16 after 1, and (2^-7)^2 / 2 is far below its steps."""

    class Rounded(Fixed):
        def forward(self, x: Tensor, give: str = "output"):
            output, z = super().forward(x)
            return output, functional.linear(z, torch.eye(2))

    x, labels = torch.zeros(1, 1, 1, 1), torch.tensor([0])
    given = GIVEN | {"means": torch.tensor([[1.001, 2.003], [0.0, 0.0], [0.0, 0.0]])}
    with torch.autocast("cpu", torch.bfloat16):
        assert Rounded()(x)[1].dtype == torch.bfloat16
        held = prototyped(Net(Rounded()), Batch(x, labels, Classify()), given)[1]
    assert held.dtype == torch.float32 and held.item() == pytest.approx(2 * (0.001**2 + 0.003**2) / 2, rel=1e-3)


def test_models_of_their_own_stay_with_their_clients(tmp_path):
    """The first model goes down once. Up go two means of 16 features and two counts of 4 bytes in each of three rounds.

    Every client's own model is measured on the test images: their mean and their spread.
    """
    algorithm, evaluate = FedProtoOriginal(local=ADAM), Evaluate(grid=0, metrics=(Accuracy(),))
    recipe = toy_recipe(algorithm=algorithm, rounds=3, evaluate=evaluate)
    result = run(recipe, tmp_path / "run")
    ended = RunFolder(tmp_path / "run").load_checkpoint()
    states = [Snapshots(tmp_path / "run" / "clients" / str(k)).read(ended.snapshots[k]) for k in range(3)]
    models = {state["model"].params.digest() for state in states}
    first = ended.server.model
    assert len(models) == 3 and first.params.digest() not in models
    sent = result.traffic.bytes
    assert sent.up == 3 * 3 * 4 * (2 * 16 + 2) and sent.down == 3 * first.params.nbytes + 2 * 3 * 4 * (2 * 16 + 2)
    data, right = recipe.data.load("test"), []
    for state in states:
        net = first.arch.build().eval()
        net.load_state_dict(dict(state["model"].params))
        with torch.no_grad():
            right.append(float((net(data.floats(data.images)).argmax(1) == data.labels).float().mean()))
    measured = result.metrics["accuracy"]
    assert measured.clients == pytest.approx(right) and measured.value == pytest.approx(sum(right) / 3)


def test_models_of_their_own_are_measured_on_test_images_only(tmp_path):
    evaluate = Evaluate(grid=0, metrics=(Accuracy(split="train"),))
    recipe = dataclasses.replace(toy_recipe(algorithm=FedProtoOriginal(local=ADAM)), evaluate=evaluate)
    with pytest.raises(RecipeError, match="looks at a model, but those of fedproto_original stay with its clients"):
        run(recipe, tmp_path / "run")


def test_without_a_pull_models_of_their_own_are_local_onlys(tmp_path):
    recipe = toy_recipe(algorithm=FedProtoOriginal(local=ADAM, pull=0.0), rounds=3)
    alone = dataclasses.replace(recipe, algorithm=LocalOnly(local=ADAM))
    a, b = (run(r, tmp_path / r.algorithm.name) for r in (recipe, alone))
    assert a.weights_sha256 == b.weights_sha256 and a.metrics["accuracy"].clients == b.metrics["accuracy"].clients


def test_counts_below_nought_are_refused():
    told = Params({"sums": torch.zeros(2, 1), "counts": torch.tensor([1.0, -1.0])})
    with pytest.raises(WireError, match=r"\[1.0, -1.0\] are no counts of classes"):
        ProtoUpdate(None, 1.0, None, told, None)
    with pytest.raises(WireError):
        ProtoMeans(1.0, None, told, None)


def test_rules_that_compare_replies_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="median.. compares whole replies, and clients have different classes; use mean"):
        run(toy_recipe(algorithm=FedProto(local=ADAM, aggregate=Median())), tmp_path / "run")


def test_a_network_without_features_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="hand_net is no classifier with features"):
        run(one_weight_recipe(FedProto(local=SGD(lr=0.5, batch=4, steps=1)), model=HandNet()), tmp_path / "run")
