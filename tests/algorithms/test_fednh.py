"""FedNH by hand: how the head's vectors move, what clients tell, and that no fit changes the vectors."""

import dataclasses
import math

import pytest
import torch
from private_fits import private
from torch.nn import functional as F
from toy import ADAM, COSINE, SMALL, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fednh import HEAD, FedNH, HeadUpdate, moved
from effuse.algorithms.shared.prototypes import class_sums
from effuse.core.algorithm import on_client
from effuse.core.data import Shard
from effuse.core.errors import RecipeError
from effuse.core.model import Model
from effuse.core.params import Buffers
from effuse.core.privacy import Budget
from effuse.core.reducers import Krum
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.machines.eager import Eager
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.transport.plan import releases

STILL = SGD(lr=1e-30, batch=8, epochs=1)  # no weight moves


def test_vectors_move_towards_the_classes():
    """W = I, rho 0.7; class 0: means (3, 4) of 10 images and (4, 3) of 30; nobody has class 1.

    Both means have length 5: 10 (0.6, 0.8) + 30 (0.8, 0.6) = (30, 26), of length 39.699: (0.755689, 0.654930).
    0.7 (1, 0) + 0.3 of it = (0.926707, 0.196479), of length 0.947306: (0.978254, 0.207408). W_1 stays.
    The mean over two clients, (15, 13), has the same direction.
    """
    for told in ([30.0, 26.0], [15.0, 13.0]):
        W = moved(torch.eye(2), torch.tensor([told, [0.0, 0.0]]), 0.7)
        assert W[0].tolist() == pytest.approx([0.978254, 0.207408], abs=1e-6) and W[1].tolist() == [0.0, 1.0]


def alone(data, net=None):
    """A client with these images, and a network of the toy's size."""
    client = Client(Eager(torch.device("cpu")), Classify(), 1, 0, Shard.whole(data))
    client.begin(Stream((0, 0, "train")), 0)
    arch = COSINE.resolved(data.shape)
    return client, net or client.load(arch.initial(Stream((1,))))


def test_a_client_tells_directions_times_counts():
    """20 dark and 20 light images: each row has length 20 and the direction of the sum of unit features."""
    data = toy_recipe().data.load("train")
    client, net = alone(data)
    told = FedNH(local=ADAM).told(client, net)["classes"]
    with torch.no_grad():
        z = F.normalize(net.module.eval()(data.floats(data.images), give="features"), dim=1)
    for c in range(2):
        torch.testing.assert_close(told[c], 20 * F.normalize(z[data.labels == c].sum(0), dim=0))


def test_a_class_without_images_tells_nought():
    data = toy_recipe().data.load("train")
    client, net = alone(data.rows((data.labels == 1).nonzero().flatten()))
    told = FedNH(local=ADAM).told(client, net)["classes"]
    assert told[0].tolist() == [0.0] * len(told[0]) and told[1].norm().item() == pytest.approx(20.0)


def test_one_image_changes_sums_and_counts_by_at_most_the_root_of_two():
    """Its features have length one, and it counts one: together the square root of 1 + 1, which the noise is scaled by."""
    data = toy_recipe().data.load("train")
    client, net = alone(data)
    fewer, _ = alone(data.rows(torch.arange(1, len(data))), net)
    sums, counts = (a - b for a, b in zip(class_sums(client, net, unit=True), class_sums(fewer, net, unit=True)))
    assert torch.cat([sums.flatten(), counts]).norm().item() == pytest.approx(math.sqrt(2), rel=1e-5)


def test_the_servers_vectors_follow_the_features(tmp_path):
    """No weight moves: after a round W is `moved` from the first W, by what three clients tell of the first model."""
    ended = {}
    for rho in (1.0, 0.5):
        recipe = toy_recipe(algorithm=FedNH(local=STILL, rho=rho), rounds=1)
        run(recipe, tmp_path / str(rho))
        ended[rho] = load(tmp_path / str(rho)).model
    data = recipe.data.load("train")
    client, _ = alone(data)
    net = client.load(ended[1.0])
    told = sum(recipe.algorithm.told(alone(s.gathered(), net)[0], net)["classes"] for s in recipe.shards(data))
    torch.testing.assert_close(ended[0.5].buffers[HEAD], moved(ended[1.0].buffers[HEAD], told, 0.5))


def test_no_fit_moves_the_vectors_and_all_train_the_scale(tmp_path):
    """With rho 1 the vectors are orthonormal to the end, and s leaves its start at 1."""
    run(toy_recipe(algorithm=FedNH(local=ADAM, rho=1.0)), tmp_path / "run")
    model = load(tmp_path / "run").model
    W = model.buffers[HEAD]
    torch.testing.assert_close(W @ W.T, torch.eye(2), rtol=0, atol=1e-6)
    assert abs(model.params["head.scale"].item() - 1.0) > 1e-3
    run(toy_recipe(algorithm=FedNH(local=ADAM, rho=0.5)), tmp_path / "other")
    assert not torch.allclose(load(tmp_path / "other").model.buffers[HEAD], W, atol=1e-3)


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_vectors_that_stay_give_fedavgs_bits(engine, tmp_path):
    """FedAvg of the same network with uniform weights; the traffic is the same, since nothing is told."""
    recipe = toy_recipe(algorithm=FedNH(local=ADAM, rho=1.0), rounds=3)
    fedavg = dataclasses.replace(recipe, algorithm=FedAvg(local=ADAM, weights="uniform"))
    a, b = (run(r, tmp_path / r.algorithm.name, engine=engine) for r in (recipe, fedavg))
    assert a.weights_sha256 == b.weights_sha256 and a.traffic.bytes == b.traffic.bytes


@spec
class OtherHead(FedNH):
    """Its clients return other vectors than they were sent."""

    @on_client
    def train(self, client: Client, model: Model) -> HeadUpdate:
        reply = super().train(client, model)
        head = reply.model.buffers.holding(Buffers({HEAD: torch.ones(2, 16)}))
        return dataclasses.replace(reply, model=dataclasses.replace(reply.model, buffers=head))


def test_vectors_that_clients_return_are_ignored(tmp_path):
    found = []
    for kind in (FedNH, OtherHead):
        recipe = dataclasses.replace(toy_recipe(algorithm=FedNH(local=ADAM), rounds=1), algorithm=kind(local=ADAM))
        found.append(run(recipe, tmp_path / kind.__name__).weights_sha256)
    assert found[0] == found[1]


def test_features_are_released_with_noise_under_a_budget():
    """Each round a fit and its class features; the noise of both is the budget's."""
    budget = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
    recipe = toy_recipe(algorithm=private(FedNH(local=ADAM)), budget=budget, rounds=2)
    train = recipe.data.load("train")
    resolved = recipe.resolved(train)
    found = [(t, release.what) for t, release in releases(resolved, resolved.shards(train))[0]]
    assert found == [(0, "fit"), (0, "class features"), (1, "fit"), (1, "class features")]
    silent = dataclasses.replace(resolved, algorithm=private(FedNH(local=ADAM, noise=0.0)))
    with pytest.raises(RecipeError, match="class features would leave the client without noise"):
        releases(silent, silent.shards(train))


def test_rules_that_compare_replies_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="krum.* compares whole replies, and clients have different classes; use mean"):
        run(toy_recipe(algorithm=FedNH(local=ADAM, aggregate=Krum(f=0))), tmp_path / "run")


def test_a_linear_head_is_refused(tmp_path):
    recipe = dataclasses.replace(toy_recipe(algorithm=FedNH(local=ADAM)), model=SMALL)
    with pytest.raises(RecipeError, match="cnn has no cosine head, whose vectors FedNH moves; set model.head=cosine"):
        run(recipe, tmp_path / "run")
