"""A site carries out the orders of its own rehearsal, few of them twice, and no others."""

import dataclasses
import json

import pytest
from fake import FakeChannel, run_over
from odd_job import ToyOddJob
from private_sites import invited, lines, message_of, order, private
from private_sites import site_at as private_site
from test_site import invitation_of, resolved, site_at
from toy import ADAM, ALGORITHMS, ToyStateful, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.localonly import LocalOnly
from effuse.core.errors import FederationError
from effuse.core.federation import EVALUATION_T, Order
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.core.wire import encode
from effuse.diffusion.samplers import Ddim

pytestmark = pytest.mark.usefixtures("slept", "impatient")
STATEFUL = ToyStateful(local=ADAM)


def joined(folder, recipe):
    site = site_at(folder)
    site.enrol(invitation_of(recipe))
    return site


def head(job="train", t=0, federated=None, call=0, base=None, durable=""):
    return encode(Order(job, t, t if federated is None else federated, call, 0, base, durable), Order)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"t": 2}, r"round 3, .* rehearsal of the manifest has nothing there"),  # of rounds 0 and 1
        ({"t": 10**6}, "nothing there"),
        ({"t": -1}, "nothing there"),
        ({"call": 1}, "call 1, .* has train as federated round 0 there"),
        ({"federated": 1}, "has train as federated round 0 there"),
        ({"job": "gossip"}, "has no job 'gossip'"),
        ({"t": EVALUATION_T}, "the manifest evaluates nothing at sites"),
        ({"base": "0_0"}, "starts from the state 0_0, which comes after it"),
        ({"base": "1_0"}, "starts from the state 1_0, which comes after it"),
        ({"base": "../0_0"}, "not the name of a state"),
        ({"base": "_"}, "not the name of a state"),
    ],
)
def test_an_order_that_the_rehearsal_has_not_is_refused(changes, why, tmp_path):
    recipe = resolved()
    site = joined(tmp_path, recipe)
    with pytest.raises(FederationError, match=why):
        site.perform(head(**changes), message_of(recipe))
    site.perform(head(), message_of(recipe))


def test_a_job_whose_answer_was_lost_may_be_asked_again(tmp_path):
    """FedDisco asks for label counts once; a server that has not got them asks in the next round, before it trains."""
    recipe = resolved(algorithm=ALGORITHMS["feddisco"], rounds=2)
    course = joined(tmp_path, recipe)._carry_out.__self__
    orders = [("enrol", 0, 0), ("train", 0, 1), ("enrol", 1, 0), ("train", 1, 1)]
    for job, t, call in orders:
        course._reach(order := Order(job, t, t, call, 0, None, ""))
        assert course._has(order)
    assert not course._has(Order("enrol", 1, 1, 3, 0, None, ""))


def test_another_network_or_other_parameters_are_refused(tmp_path):
    """Four channels in the manifest, eight in the order; and four in its name, with the parameters of eight."""
    recipe, wide = resolved(), resolved(model=ToyUnet(width=8))
    site = joined(tmp_path, recipe)
    with pytest.raises(FederationError, match="it comes with the network toy_unet, which the manifest has not"):
        site.perform(head(), message_of(wide))
    job = recipe.algorithm.jobs["train"]
    lie = dataclasses.replace(wide.model.initial(Stream(("test",))), arch=recipe.model)
    with pytest.raises(FederationError, match="the parameters at '.*' are not those of the manifest"):
        site.perform(head(), encode(job.arguments(model=lie), job.arguments))


def test_a_site_pinned_to_two_rounds_does_not_do_fifty_jobs(tmp_path):
    """Two orders are rehearsed, so 2 x 2 + 10 = 14 are answered, of both rounds. The same order again is no other one.

    A restarted site counts on; a new manifest starts at none.
    """
    recipe = resolved()
    site, done = joined(tmp_path, recipe), 0
    for seed in range(25):
        for t in (1, 0):
            try:
                site.perform(head(t=t), message_of(recipe, f"{seed}"))
                done += 1
            except FederationError as error:
                assert "has answered 14 orders, and up to this round the manifest has 2" in str(error)
    assert done == 14
    again = joined(tmp_path, recipe)
    assert again.perform(head(t=1), message_of(recipe, "0")) == again.perform(head(t=1), message_of(recipe, "0"))
    with pytest.raises(FederationError, match=r"deleting orders\.json"):
        again.perform(head(t=1), message_of(recipe, "new"))
    (tmp_path / "manifest.json").unlink()
    joined(tmp_path, other := resolved(seed=1)).perform(head(), message_of(other))
    assert len(json.loads((tmp_path / "orders.json").read_text())["answered"]) == 1


def test_a_refused_or_failed_order_does_not_count(tmp_path):
    recipe = resolved(algorithm=STATEFUL)
    site = joined(tmp_path, recipe)
    with pytest.raises(FederationError, match="no snapshot '0_0'"):
        site.perform(head(t=1, base="0_0"), message_of(recipe))
    assert not (tmp_path / "orders.json").exists()


def test_no_order_goes_back_behind_two_checkpoints(tmp_path):
    """After one checkpoint with a state round 1 may begin without; after two it may not. A run that begins anew may."""
    recipe = resolved(algorithm=STATEFUL, rounds=3)
    site = joined(tmp_path, recipe)
    site.perform(head(), message_of(recipe))
    site.perform(head(t=1, base="0_0", durable="0_0"), message_of(recipe))
    site.perform(head(), message_of(recipe))
    site.perform(head(t=1, base="0_0", durable="0_0"), message_of(recipe))
    site.perform(head(t=2, base="1_0", durable="1_0"), message_of(recipe))
    site = joined(tmp_path, recipe)
    with pytest.raises(FederationError, match="starts without the state that two checkpoints have named"):
        site.perform(head(t=1), message_of(recipe))
    site.perform(head(), message_of(recipe))


def test_an_evaluation_asks_for_no_more_images_than_the_manifest(tmp_path):
    sampler = Ddim(steps=2)
    recipe = resolved(algorithm=LocalOnly(local=ADAM), evaluate=Evaluate(grid=2), sampler=sampler)
    site, job, model = joined(tmp_path, recipe), recipe.algorithm.jobs["draw"], recipe.model.initial(Stream(("test",)))
    for n, by in ((3, sampler), (10**9, sampler), (2, Ddim(steps=10**6))):
        with pytest.raises(FederationError, match="images by .* and the manifest has at most 2 by ddim"):
            site.perform(head("draw", EVALUATION_T, 0), encode(job.arguments(model, n, by, False), job.arguments))
    site.perform(head("draw", EVALUATION_T, 0), encode(job.arguments(model, 2, sampler, False), job.arguments))


def test_a_restarted_site_answers_the_evaluation_that_follows_its_last_round(tmp_path):
    """Twenty rounds, each with an evaluation: 20 answers before it, of which a rehearsal of one round allows 2 x 2 + 10."""
    recipe = resolved(algorithm=LocalOnly(local=ADAM), evaluate=Evaluate(grid=2, every=1), sampler=Ddim(steps=2), rounds=20)
    site, job, model = joined(tmp_path, recipe), recipe.algorithm.jobs["draw"], recipe.model.initial(Stream(("test",)))
    site.perform(head(), message_of(recipe))
    again = joined(tmp_path, recipe)
    again._carry_out.__self__._answered = dict.fromkeys(f"{k:032x}" for k in range(20))
    asked = encode(job.arguments(model, 2, recipe.sampler, False), job.arguments)
    assert again.perform(head("draw", EVALUATION_T, 0, base="0_0"), asked)


def test_an_algorithm_without_a_rehearsal_is_held_to_its_rounds(tmp_path):
    recipe = resolved(algorithm=ToyOddJob(local=ADAM))
    site = joined(tmp_path, recipe)
    site.perform(head(), message_of(recipe))
    assert any(
        "cannot be rehearsed, so its orders are held to the manifest's jobs and number of rounds" in s for s in site.shown
    )
    with pytest.raises(FederationError, match="the manifest has 2 rounds, not 3"):
        site.perform(head(t=2), message_of(recipe))


def test_a_refused_order_is_not_charged_to_a_ledger(tmp_path):
    recipe = private(FedAvg(local=ADAM))
    site = invited(private_site(tmp_path / "site"), recipe)
    with pytest.raises(FederationError, match="nothing there"):
        site.perform(order(t=7), message_of(recipe))
    assert not any("releases" in line for line in lines(tmp_path))
    site.perform(order(), message_of(recipe))
    assert any("releases" in line for line in lines(tmp_path))


@pytest.mark.parametrize("name", ["fedphd, pruned in the middle", "feddiff, two kinds of networks", "localonly"])
def test_a_whole_run_stays_on_its_course(name, tmp_path):
    """Networks that are cut on the way, several networks, and models that stay with clients and are evaluated there."""
    recipe = toy_recipe(algorithm=ALGORITHMS[name], evaluate=Evaluate(grid=2, every=1), sampler=Ddim(batch=2, steps=2))
    channel = FakeChannel(tmp_path / "sites", 3)
    run_over(channel, recipe, tmp_path / "run")
    for client in range(3):
        known = json.loads((tmp_path / "sites" / str(client) / "orders.json").read_text())
        assert len(known["answered"]) == channel.answers[client] > 0
