"""An order is paid before it computes, once, whenever its site is killed; nothing leaves that was not paid."""

import os

import pytest
from private_sites import (
    PRIVATE,
    Killed,
    guarded_of,
    invited,
    ledger_of,
    lines,
    message_of,
    order,
    private,
    site_at,
    spent_by,
)
from toy import ADAM, ToyStateful

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.errors import FederationError, TrainingError
from effuse.core.privacy import Release
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ddim
from effuse.privacy.accountant import epsilon_of
from effuse.transport.flower import guarded
from effuse.transport.flower.guarded import Limit, Withheld
from effuse.transport.worker import Receipt


def test_an_order_is_charged_before_it_computes_and_its_reply_is_stored_before_it_leaves(tmp_path, monkeypatch):
    """Two rounds of 5 steps on 40 images in batches of 8: each is a release of rate 1/5 in 5 steps."""
    recipe = private(PRIVATE["fedavg"])
    site = invited(site_at(tmp_path / "site"), recipe)
    sigma = site.worker.protections[0].sigma
    fit = Release("fit", noise=sigma, rate=1 / 5, steps=5)
    assert epsilon_of([fit, fit], 1e-3, "rdp") == pytest.approx(50.0, rel=1e-3)
    train, seen = FedAvg.train, []
    monkeypatch.setattr(
        FedAvg, "train", lambda self, client, model: (seen.append(lines(tmp_path)), train(self, client, model))[1]
    )
    receipt, reply = site.perform(order(), message_of(recipe))
    on_shapes, at_work = seen
    assert on_shapes == [] and [line["kind"] for line in at_work] == ["charge"]
    assert [line["kind"] for line in lines(tmp_path)] == ["charge", "nonce", "reply"]
    (entry,) = ledger_of(tmp_path).entries()
    assert entry.releases == (fit,) and entry.what == "round 1, job 'train'" and entry.unit == "image"
    assert decode(reply, Update).loss is None and decode(reply, Update).weight == 40.0


def test_a_repeated_order_costs_once_and_another_message_is_a_new_release_with_new_noise(tmp_path):
    """Also after a restart, and where only `durable` differs."""
    recipe = private(PRIVATE["fedavg"], rounds=3)
    site = invited(site_at(tmp_path / "site"), recipe)
    first = site.perform(order(), message_of(recipe))
    assert site.perform(order(), message_of(recipe)) == first
    again = invited(site_at(tmp_path / "site"), recipe)
    assert again.perform(order(durable="0_0"), message_of(recipe)) == first
    assert len(ledger_of(tmp_path).entries()) == 1
    other = again.perform(order(), message_of(recipe, "other"))
    assert other[1] != first[1] and len(ledger_of(tmp_path).entries()) == 2
    assert again.perform(order(), message_of(recipe)) == first, "the older reply is still known"


def test_overspending_is_refused_before_it_computes(tmp_path, monkeypatch):
    """The budget covers the two rounds of the recipe; a server that asks twice in one, with other models, is refused."""
    recipe, trained = private(PRIVATE["fedavg"]), []
    site = invited(site_at(tmp_path / "site"), recipe)
    train = FedAvg.train
    monkeypatch.setattr(
        FedAvg, "train", lambda self, client, model: (trained.append(client.machine), train(self, client, model))[1]
    )
    for t in (0, 1):
        site.perform(order(t), message_of(recipe))
    with pytest.raises(
        FederationError, match=r"round 2, job 'train' would cost epsilon 35.34; with the 50 .*, and the site's cap is 50"
    ):
        site.perform(order(1), message_of(recipe, "other"))
    assert sum(machine is site.worker.client(0).machine for machine in trained) == 2
    assert len(ledger_of(tmp_path).entries()) == 2
    site.perform(order(1), message_of(recipe))  # what was paid is still sent
    assert spent_by(tmp_path) <= 50.0


def test_a_server_gets_no_more_than_the_runs_budget_from_a_site_that_allows_more(tmp_path):
    """The site allows 500 in all and the recipe asks for 50, in two rounds: a third release is refused."""
    recipe = private(PRIVATE["fedavg"])
    site = invited(site_at(tmp_path / "site", limit=Limit(500.0, 1e-3, tmp_path / "ledger.jsonl")), recipe)
    for t in (0, 1):
        site.perform(order(t), message_of(recipe))
    with pytest.raises(FederationError, match=r"round 2, job 'train': this run has spent epsilon 50, .* budget of 50"):
        site.perform(order(1), message_of(recipe, "other"))
    assert len(ledger_of(tmp_path).entries()) == 2


@pytest.mark.parametrize("name", ["fedavg", "state"])
def test_a_site_that_is_killed_at_any_moment_is_charged_once(name, tmp_path, monkeypatch):
    """It is killed when a write must reach the disk: charge, nonce, the reply's file, folder and line, and the state's two.

    The list of orders that were answered takes two more.

    Until its reply is stored, its state is no snapshot either.
    """
    recipe, sync = private(PRIVATE[name]), os.fsync
    for k in range(100):
        folder, calls = tmp_path / str(k), iter(range(k))

        def dying(handle, calls=calls):
            if next(calls, None) is None:
                raise Killed
            sync(handle)

        site = invited(site_at(folder / "site"), recipe)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", dying)
            try:
                reply = site.perform(order(), message_of(recipe))
            except Killed:
                reply = None
        guarded_of(site).ledger.close()  # as the end of its process does
        stored = folder.joinpath("ledger.jsonl").read_text().count('"reply"')
        assert stored or not list((folder / "site").glob("*.state"))
        again = invited(site_at(folder / "site"), recipe)
        first = again.perform(order(), message_of(recipe))
        assert again.perform(order(), message_of(recipe)) == first and reply in (None, first)
        assert len(ledger_of(folder).entries()) == 1
        snapshot = decode(first[0], Receipt).snapshot
        assert snapshot is None or (folder / "site" / f"{snapshot}.state").exists()
        if reply is not None:
            break
    assert k == (9 if name == "state" else 7)


def test_the_state_that_a_stored_reply_names_comes_back_with_it(tmp_path):
    """Another message overwrote the snapshot 0_0, and a later order deleted it; the next order starts from the first."""
    recipe = private(ToyStateful(local=ADAM), rounds=4)
    site = invited(site_at(tmp_path / "site"), recipe)
    first = site.perform(order(), message_of(recipe))
    state = (tmp_path / "site" / "0_0.state").read_bytes()
    second = site.perform(order(1, base="0_0"), message_of(recipe))
    site.perform(order(), message_of(recipe, "other"))
    assert (tmp_path / "site" / "0_0.state").read_bytes() != state
    assert site.perform(order(1, base="0_0"), message_of(recipe)) != second, "from another state: another release"
    assert site.perform(order(), message_of(recipe)) == first
    assert (tmp_path / "site" / "0_0.state").read_bytes() == state
    assert site.perform(order(1, base="0_0"), message_of(recipe)) == second
    assert len(ledger_of(tmp_path).entries()) == 4


def test_only_the_last_replies_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "KEPT", 1)
    recipe = private(PRIVATE["fedavg"], rounds=3)
    site = invited(site_at(tmp_path / "site"), recipe)
    first, second = (site.perform(order(t), message_of(recipe)) for t in (0, 1))
    assert site.perform(order(1), message_of(recipe)) == second
    assert site.perform(order(), message_of(recipe)) != first and len(ledger_of(tmp_path).entries()) == 3


def test_a_failure_on_private_images_leaves_without_its_reason(tmp_path, monkeypatch):
    recipe, train = private(PRIVATE["fedavg"]), FedAvg.train
    site = invited(site_at(tmp_path / "site"), recipe)

    def failing(self, client, model):
        if client.machine.device.type == "meta":
            return train(self, client, model)
        raise TrainingError(f"the brightest pixel is {client.data.dataset.images.max()}")

    monkeypatch.setattr(FedAvg, "train", failing)
    with pytest.raises(Withheld) as error:
        site.perform(order(), message_of(recipe))
    sentence = site.failed(error.value)
    assert sentence == "round 1, job 'train' failed on private images; the reason is in the site's own log"
    assert "the brightest pixel is 206" in (tmp_path / "site" / "site.log").read_text() and "206" in site.shown[-1]


def test_what_was_not_charged_does_not_leave(tmp_path, monkeypatch):
    """A job that trains once on shapes, and twice on the images."""
    recipe, train = private(PRIVATE["fedavg"]), FedAvg.train
    site = invited(site_at(tmp_path / "site"), recipe)

    def sly(self, client, model):
        again = client.machine.device.type != "meta" and train(self, client, model)
        return again and train(self, client, again.model) or train(self, client, model)

    monkeypatch.setattr(FedAvg, "train", sly)
    with pytest.raises(FederationError, match="released something else than it was charged for; nothing was sent"):
        site.perform(order(), message_of(recipe))
    assert all(line["kind"] != "reply" for line in lines(tmp_path))


def test_a_job_that_cannot_be_done_on_shapes_is_refused(tmp_path, monkeypatch):
    recipe, train = private(PRIVATE["fedavg"]), FedAvg.train
    site = invited(site_at(tmp_path / "site"), recipe)
    decides = lambda self, client, model: train(self, client, model) if float(model.params.norm()) else None  # noqa: E731
    monkeypatch.setattr(FedAvg, "train", decides)
    with pytest.raises(FederationError, match=r"cannot be done on shapes \(RuntimeError\), so this site cannot know"):
        site.perform(order(), message_of(recipe))
    assert ledger_of(tmp_path).entries() == []


def test_images_of_a_personal_model_cost_nothing(tmp_path):
    """The model was paid; what is drawn from it is post-processing."""
    recipe = private(PRIVATE["localonly"], evaluate=Evaluate(grid=2), sampler=Ddim(batch=2, steps=2))
    jobs = recipe.algorithm.jobs
    site = invited(site_at(tmp_path / "site"), recipe)
    receipt, _ = site.perform(order(), message_of(recipe))
    arguments = jobs["draw"].arguments
    sent = arguments(model=recipe.model.initial(Stream((0,))), n=2, sampler=recipe.sampler, average=False)
    base = decode(receipt, Receipt).snapshot
    drawn = [site.perform(order(-2, base=base, job="draw"), encode(sent, arguments)) for _ in range(2)]
    assert drawn[0] == drawn[1] and decode(drawn[0][1], jobs["draw"].returns).images.pixels.shape[0] == 2
    assert [line["kind"] for line in lines(tmp_path)] == ["charge", "nonce", "reply"]
