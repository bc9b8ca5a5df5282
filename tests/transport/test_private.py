"""Every algorithm trains privately to the same bits on every engine, or is refused with its reason."""

import dataclasses

import pytest
import torch
from private_fits import private
from toy import ADAM, ALGORITHMS, TEST, ToyImages, ToyLabelled, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.filters import Everything
from effuse.algorithms.shared.synthesis import Synthesising
from effuse.core.algorithm import on_client
from effuse.core.data import Dataset, Shard, Split
from effuse.core.errors import EffuseError, RecipeError
from effuse.core.model import Model, Net
from effuse.core.privacy import Budget
from effuse.core.protection import Protection
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.core.task import Batch, Given
from effuse.core.workbench import Client
from effuse.data.partition import Iid
from effuse.machines.eager import Eager
from effuse.runs.driver import begin, resume, run
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.transport.plan import releases

BUDGET = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
REFUSED = {
    "mofedsam, sgd": "sharpness-aware",
    "mofedsam, adam": "sharpness-aware",
    "fedphd, pruned in the middle": "exact counts",
    "fedphd, never pruned, an edge fails": "exact counts",
    "scaffold, option I": "without noise",
    "fedcvae": "exact counts",
    "feddisco": "exact counts",
    "fedproto, by images, part of the clients": "does not say that its reply is covered",  # its class means have no bound
    "fedcda, part of the clients": "does not say that its reply is covered",  # it tells a loss
    "fed3r": "does not say that its reply is covered",  # moments of features have no bound
    "fedproto, models of their own": "does not say that its reply is covered",
    "fedrcl": "compares the images of a batch",
    "ensemble, different networks, a majority": "layer 'stages.1' normalises over the images",
    "dense, different networks": "layer 'stages.1' normalises over the images",
    "fedema": "layer 'projector.1' normalises over the images",
    "fedema, part of the clients": "layer 'projector.1' normalises over the images",
    "fedlid": "layer 'projector.1' normalises over the images",
    "feddda, what a client lacks, filtered": "number of images would depend on private ones",
    "a loss that looks at the average": "without noise",  # it asks for a gradient
}
# what a client of FedDifRC sees through its guide is not noised
REFUSED |= {name: "does not say that its reply is covered" for name in ALGORITHMS if name.startswith("feddifrc")}
REFUSED |= {name: REFUSED["fedrcl"] for name in ALGORITHMS if name.startswith("fedrcl ")}


def private_recipe(algorithm, **changes):
    return toy_recipe(algorithm=private(algorithm), **{"budget": BUDGET, "rounds": 2, **changes})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loopback_equals_simulator(name, tmp_path):
    recipe = private_recipe(ALGORITHMS[name], wire="bf16")
    if name in REFUSED:
        with pytest.raises(EffuseError, match=REFUSED[name]):
            run(recipe, tmp_path / "refused")
        return
    a, b = (run(recipe, tmp_path / engine, engine=engine) for engine in ("simulator", "loopback"))
    assert a.weights_sha256 == b.weights_sha256
    plain = run(toy_recipe(algorithm=ALGORITHMS[name], rounds=2, wire="bf16"), tmp_path / "plain")
    assert a.weights_sha256 != plain.weights_sha256
    assert 0 < a.privacy["epsilon"] <= BUDGET.epsilon
    assert a.privacy == b.privacy


@spec
class Frank(FedAvg):
    """Adds the brightness of its images to the reply, and says nothing of it."""

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        sent = super().train(client, model)
        return dataclasses.replace(sent, weight=float(client.data.gathered().images.float().mean()))


def test_a_job_that_does_not_say_that_its_reply_is_covered_is_refused(tmp_path):
    with pytest.raises(EffuseError, match="job 'train' of frank does not say that its reply is covered by it"):
        run(private_recipe(Frank(local=ADAM)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def across(net: Net, batch: Batch, given: Given) -> torch.Tensor:
    """A loss that pushes the images of a batch apart: no image has a loss of its own."""
    output = net(*batch.task.inputs(batch)).flatten(1)
    return batch.task.loss(net, batch) - 0.1 * torch.cdist(output, output).mean()


@spec
class Repelling(FedAvg):
    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, loss=across)
        return Update(client.unload(net), self.weight(client), fit.loss)


def test_a_loss_that_compares_images_is_refused(tmp_path):
    with pytest.raises(EffuseError, match="the loss across compares the images of a batch"):
        run(private_recipe(Repelling(local=ADAM)), tmp_path / "run")
    run(toy_recipe(algorithm=Repelling(local=ADAM)), tmp_path / "plain")


def test_groups_are_protected_as_one(tmp_path):
    """Twenty patients of two images each, in three clients: units, not images, decide rate and steps."""
    by_group = private_recipe(FedAvg(local=ADAM), data=ToyPatients(), partition=Iid(by_group=True), rounds=1)
    grouped = dataclasses.replace(by_group, budget=dataclasses.replace(BUDGET, unit="group"))
    plans = {}
    for name, recipe in (("image", by_group), ("group", grouped)):
        train = recipe.data.load("train")
        plans[name] = releases(recipe.resolved(train), recipe.shards(train))
    sizes = [len(s) for s in grouped.shards(grouped.data.load("train"))]
    assert all(n % 2 == 0 for n in sizes)
    # batches of 8: ceil(n / 8) steps for n images, ceil(n / 2 / 8) for n / 2 patients
    assert [plans["image"][k][0][1].steps for k in range(3)] == [-(-n // 8) for n in sizes]
    assert [plans["group"][k][0][1].steps for k in range(3)] == [-(-(n // 2) // 8) for n in sizes]
    for found in plans.values():  # one epoch has as many steps as the inverse of the rate
        assert all(found[k][0][1].rate == pytest.approx(1 / found[k][0][1].steps) for k in range(3))
    assert plans["image"][0][0][1].rate < plans["group"][0][0][1].rate
    a, b = (run(recipe, tmp_path / name) for name, recipe in (("image", by_group), ("group", grouped)))
    assert a.weights_sha256 != b.weights_sha256 and b.privacy["unit"] == "group"
    with pytest.raises(RecipeError, match="the data has no groups"):
        run(dataclasses.replace(grouped, data=ToyImages(), partition=Iid()), tmp_path / "none")


@spec
class ToyPatients(ToyImages):
    """The toy images, two of each patient."""

    def load(self, split: Split) -> Dataset:
        data = super().load(split)
        return dataclasses.replace(data, groups=torch.arange(len(data)) // 2)


def test_two_messages_never_share_their_noise():
    """The same order with another message: other Poisson batches and other noise."""
    data = dataclasses.replace(ToyImages().load("train"), private=True)
    drawn = []
    for digest in ("a", "b", "a"):
        client = Client(Eager(torch.device("cpu")), Denoise(), 1, 0, Shard.whole(data))
        client.begin(Stream((0, 0, "train")), 0)
        client.protection, client.message = Protection(BUDGET, 1.0), digest
        drawn.append(client.noised(torch.zeros(8), sensitivity=1.0, noise=None, what="nothing"))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_a_budget_needs_private_solvers_and_they_need_a_budget(tmp_path):
    with pytest.raises(RecipeError, match="solver adam trains on private images without noise"):
        run(toy_recipe(algorithm=FedAvg(local=ADAM), budget=BUDGET), tmp_path / "a")
    with pytest.raises(RecipeError, match="the recipe has no budget"):
        run(toy_recipe(algorithm=private(FedAvg(local=ADAM))), tmp_path / "b")


def test_no_loss_of_a_private_client_is_recorded(tmp_path):
    run(private_recipe(FedAvg(local=ADAM)), tmp_path / "run")
    assert [r.loss for r in RunFolder(tmp_path / "run").records()] == [None, None]


def test_a_killed_private_run_resumes_to_the_same_bits(tmp_path):
    recipe = private_recipe(FedAvg(local=ADAM), rounds=3)
    whole = run(recipe, tmp_path / "whole")
    begun = begin(recipe, tmp_path / "cut")

    class Stop(Exception):
        pass

    def stop(record):
        if record.t == 1:
            raise Stop

    begun.observer.closed = stop
    with pytest.raises(Stop):
        begun.complete()
    assert resume(tmp_path / "cut").weights_sha256 == whole.weights_sha256


def test_worker_processes_give_the_same_bits(tmp_path):
    recipe = private_recipe(FedAvg(local=ADAM))
    one, two = (run(recipe, tmp_path / str(n), workers=n) for n in (1, 2))
    assert one.weights_sha256 == two.weights_sha256 and one.privacy == two.privacy


SIMULATED_ONLY = {
    "fedddpm": {"real": True},
    "aux only": {"real": True},
    "localaug": {"real": True},
    "fedcvae, distilled, different networks, with noise": {"real": True, "variant": "ens", "distillation": None},
    "feddiff, two kinds of networks": {"real": True, "filter": Everything()},
    "fedddpm+": {"test": dataclasses.replace(TEST, reference="oracle")},
}


@pytest.mark.parametrize("name", SIMULATED_ONLY)
def test_real_images_at_the_server_are_refused(name, tmp_path):
    """What a simulation trains on, or stops by, without noise is covered by no budget; without one it may."""
    algorithm = dataclasses.replace(ALGORITHMS[name], **SIMULATED_ONLY[name])
    with pytest.raises(EffuseError, match="real images without privacy"):
        run(private_recipe(algorithm), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(toy_recipe(algorithm=algorithm, rounds=1), tmp_path / "plain")


@pytest.mark.parametrize("name", ["fedddpm", "aux only", "localaug"])
def test_exact_counts_of_labels_do_not_leave_with_an_upload(name, tmp_path):
    """A conditional warm-up model is sent with its client's counts."""
    algorithm = private(ALGORITHMS[name])
    assert isinstance(algorithm, Synthesising)
    with pytest.raises(EffuseError, match="exact counts of private images would be sent"):
        run(toy_recipe(algorithm=algorithm, budget=BUDGET, model=ToyLabelled()), tmp_path / "run")
