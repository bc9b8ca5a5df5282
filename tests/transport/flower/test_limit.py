"""What a site allows its data to be charged, and what it refuses when it enrols."""

import contextlib
import dataclasses
import os
import stat

import pytest
from private_sites import (
    BUDGET,
    PRIVATE,
    Killed,
    invited,
    ledger_of,
    message_of,
    order,
    private,
    site_at,
)
from toy import ToyImages, toy_recipe

from effuse.core.errors import FederationError, RecipeError, RunError
from effuse.core.privacy import Budget
from effuse.privacy.accountant import epsilon_of
from effuse.tools.preview import what_leaves
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.guarded import Limit
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Site


def test_a_second_run_on_the_same_data_is_refused_when_it_enrols(tmp_path):
    """The ledger belongs to the data: another run, another folder and another client number do not help."""
    small = Budget(epsilon=1.0, delta=1e-3, accountant="rdp")
    recipe, other = (private(PRIVATE["fedavg"], budget=small, seed=seed) for seed in (0, 1))
    first = invited(site_at(tmp_path / "site"), recipe)
    for t in (0, 1):
        first.perform(order(t), message_of(recipe))
    with pytest.raises(FederationError, match="this run would cost epsilon 1; with the 1 that this site's data has spent"):
        invited(site_at(tmp_path / "another", client=1), other)
    invited(site_at(tmp_path / "site"), recipe)  # the same run may go on
    twice = epsilon_of(2 * [r for entry in ledger_of(tmp_path).entries() for r in entry.releases], 1e-3)
    for cap, delta, enough in ((1.01 * twice, 1e-3, True), (0.99 * twice, 1e-3, False), (1.01 * twice, None, False)):
        site = site_at(tmp_path / f"{cap}", client=1, limit=Limit(cap, delta, tmp_path / "ledger.jsonl"))
        with contextlib.nullcontext() if enough else pytest.raises(FederationError, match="that this site's data has spent"):
            invited(site, other)


def test_the_ledger_is_named_after_the_data(tmp_path, monkeypatch):
    """One more image starts a new file, so a site whose data grows names its ledger."""
    monkeypatch.setenv("EFFUSE_LEDGERS", str(tmp_path / "ledgers"))
    recipe = private(PRIVATE["fedavg"])
    for name, data in (("a", ToyImages()), ("b", ToyImages()), ("c", ToyImages(n=41))):
        site = invited(site_at(tmp_path / name, data=data, limit=Limit()), recipe)
        site.perform(order(), message_of(recipe, name))
    digests = [ToyImages().load("train").digest, ToyImages(n=41).load("train").digest]
    counted = {path.stem: path.read_text().count('"charge"') for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert counted == {digests[0]: 2, digests[1]: 1}


def test_an_image_that_is_added_makes_another_order(tmp_path):
    """Otherwise a run on the grown data would be answered with what the smaller data was."""
    recipe = private(PRIVATE["fedavg"])
    for data in (ToyImages(), ToyImages(n=41)):
        invited(site_at(tmp_path / str(data.n) / "site", data=data, ledger=tmp_path / "ledger.jsonl"), recipe).perform(
            order(), message_of(recipe)
        )
    assert len(ledger_of(tmp_path).entries()) == 2


def test_what_would_not_protect_a_sites_own_images_is_refused_at_enrolment(tmp_path):
    for name, recipe, limit, why in (
        ("reproducible", private(PRIVATE["fedavg"], reproducible=True), Limit(), "could draw this site's noise again"),
        ("canaries", private(PRIVATE["fedavg"], canaries=3), Limit(), "canaries=3: they are set aside in simulations"),
        ("canaries, plain", toy_recipe(canaries=3), Limit(), "canaries=3"),
        ("no budget", toy_recipe(), Limit(epsilon=1.0), "within epsilon 1 only, and the recipe has no budget"),
        ("no privacy", toy_recipe(budget=BUDGET), Limit(), "trains on private images without noise"),
        ("dear", private(PRIVATE["fedavg"]), Limit(epsilon=1.0), "this run would cost epsilon .* the site's cap is 1 "),
        (
            "delta",  # 1/40 of 40 images
            private(PRIVATE["fedavg"], budget=dataclasses.replace(BUDGET, delta=0.025)),
            Limit(),
            "budget.delta=0.025: this promise also holds where one of 40 images",
        ),
        ("groups", private(PRIVATE["fedavg"], budget=dataclasses.replace(BUDGET, unit="group")), Limit(), "has no groups"),
    ):
        site = site_at(tmp_path / name / "site", limit=limit._replace(ledger=tmp_path / name / "ledger.jsonl"))
        with pytest.raises((FederationError, RecipeError), match=why):
            invited(site, recipe.resolved(recipe.data.load("train")))
        with pytest.raises(FederationError, match="before the terms"):
            site.perform(order(), b"")
    for limit, why in ((Limit(epsilon=0.0), "must be positive"), (Limit(delta=1e-5), "give it with --epsilon")):
        with pytest.raises(FederationError, match=why):
            site_at(tmp_path / "bad", limit=limit)
    with pytest.raises(FederationError, match="--data recipe is a simulated site, whose noise protects nobody"):
        Site(tmp_path / "bad", 0, None, Consent(), "cpu", print, Limit(epsilon=1.0))


def test_a_secret_is_whole_or_not_there(tmp_path, monkeypatch):
    recipe = private(PRIVATE["fedavg"])
    site, replace = tmp_path / "site", os.replace

    def dying(old, new):
        if new.name == "secret":
            raise Killed
        replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dying)
        invited(site_at(site), recipe)
    assert not (site / "secret").exists()
    invited(site_at(site), recipe)
    assert stat.S_IMODE((site / "secret").stat().st_mode) == 0o600 and len((site / "secret").read_bytes()) == 32
    for part in (b"", b"half"):
        (site / "secret").write_bytes(part)
        with pytest.raises(RunError, match=rf"secret has {len(part)} bytes and not 32; restore it from a backup"):
            invited(site_at(site), recipe)
    assert not list(site.glob(".secret*"))


def test_a_dry_run_says_what_a_run_would_cost(tmp_path):
    recipe = private(PRIVATE["fedavg"])
    invitation = Invitation("toy", recipe.saved(), ("dark", "light"), "", "")
    site = site_at(tmp_path / "site")
    shown = "\n".join(what_leaves(site, invitation))
    sigma = invited(site_at(tmp_path / "site"), recipe).worker.protections[0].sigma
    assert f"this run may cost epsilon 50 (delta 0.001) for each image: 2 releases with sigma {sigma:.4g}, by rdp" in shown
    assert "promised: one image is replaced by nothing; not covered: the number of images of each client" in shown
    ledger = "ledger.jsonl: epsilon 0 charged so far, 50 with this run (delta 0.001); this site's cap is 50"
    assert f"ledger {tmp_path}/{ledger}" in shown
    assert "would refuse" not in shown
    assert "promised the sum of both sites' epsilons" in shown and "private steps take two to four times as long" in shown
    narrow = site_at(tmp_path / "site", limit=Limit(1.0, ledger=tmp_path / "ledger.jsonl"))
    assert "this site would refuse it: this run would cost epsilon" in "\n".join(what_leaves(narrow, invitation))
    simulated = Site(tmp_path / "simulated", 0, None, Consent(), "cpu", print)
    shown = "\n".join(what_leaves(simulated, invitation))
    assert "this run may cost epsilon 50" in shown and "ledger" not in shown
