"""Noise that nobody else can draw, and whole federations of private sites."""

import json
import shutil

import numpy as np
import pytest
import torch
from fake import EVERYONE, TWO_OF_THREE, FakeChannel, log_of, over, run_over
from private_sites import (
    BUDGET,
    PRIVATE,
    Killed,
    OwnData,
    guarded_of,
    invited,
    ledger_of,
    message_of,
    order,
    private,
    site_at,
    spent_by,
)
from toy import ALGORITHMS, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddiff import FedDiffUpload
from effuse.core.errors import RecipeError
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import Release
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream, stream
from effuse.core.solvers import Adam
from effuse.core.wire import decode, encode
from effuse.data.sources import Elsewhere
from effuse.privacy.noise import SecureNoise, SecureNumbers
from effuse.runs import driver
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.site import Site
from effuse.transport.worker import Receipt, message_digest

pytestmark = pytest.mark.usefixtures("slept", "impatient")


@pytest.mark.parametrize("name", PRIVATE)
def test_simulated_sites_have_the_simulators_noise(name, tmp_path):
    recipe = private(PRIVATE[name], reproducible=True)
    result = run_over(FakeChannel(tmp_path / "sites", 3), recipe, tmp_path / "run")
    expected = driver.run(recipe, tmp_path / "simulator")
    assert result.weights_sha256 == expected.weights_sha256
    plain = driver.run(toy_recipe(algorithm=PRIVATE[name], reproducible=True), tmp_path / "plain")
    assert result.weights_sha256 != plain.weights_sha256
    assert "cannot be done on shapes" not in (tmp_path / "run" / "federation.log").read_text()


REAL = [name for name, algorithm in ALGORITHMS.items() if not isinstance(algorithm, Centralised) and name not in PRIVATE]


@pytest.mark.slow("other tests do the same for four algorithms")
@pytest.mark.parametrize("name", REAL)
def test_every_algorithm_has_the_simulators_noise_or_is_refused(name, tmp_path):
    recipe = private(ALGORITHMS[name], reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    try:
        expected = driver.run(recipe, tmp_path / "simulator")
    except RecipeError:
        with pytest.raises(RecipeError):
            run_over(channel, recipe, tmp_path / "run")
        assert not channel.opened
        return
    assert run_over(channel, recipe, tmp_path / "run").weights_sha256 == expected.weights_sha256


def noise_of(monkeypatch, kind, site, head, body) -> torch.Tensor:
    """The noise that an order's fit draws."""
    drawn, normal = [], kind.normal

    def watched(self, n, device):
        drawn.append(normal(self, n, device))
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "normal", watched)
        site.perform(head, body)
    return torch.cat(drawn)


def alike(a, b) -> bool:
    """Whether two draws of 485 numbers are the same; independent ones correlate by less than 0.3, over six deviations."""
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert len(a) == len(b) == 485 and (abs(correlation) < 0.3 or torch.equal(a, b))
    return torch.equal(a, b)


def test_who_knows_manifest_seed_and_message_knows_a_simulated_sites_noise_and_not_a_real_ones(tmp_path, monkeypatch):
    """A fit of 5 steps draws 97 numbers each, one for each parameter: 4*9+4, 4*4+4 and 4*9+1."""
    recipe, open_ = private(PRIVATE["fedavg"]), private(PRIVATE["fedavg"], reproducible=True, clients=1)
    body = message_of(recipe)
    digest = message_digest(decode(body, recipe.algorithm.jobs["train"].arguments), recipe.algorithm.jobs["train"].arguments)
    fit = stream(recipe.seed, 0, "train", 0, 0, "").child(1, "fit")
    known = KeyedNoise(fit.child("noise", digest), torch.device("cpu"))
    keyed = torch.cat([known.normal(97, torch.device("cpu")) for _ in range(5)])
    simulated = invited(Site(tmp_path / "simulated", 0, None, Consent(), "cpu", print), open_)
    assert alike(noise_of(monkeypatch, KeyedNoise, simulated, order(), body), keyed)
    for name in ("included", "normal"):  # a fit whose batches or noise come from torch has 2^32 of them
        monkeypatch.setattr(KeyedNoise, name, lambda *rest: pytest.fail("keyed noise at a real site"))
    sites = [invited(site_at(tmp_path / name / "site"), recipe) for name in ("a", "b")]
    a, b = (noise_of(monkeypatch, SecureNoise, site, order(), body) for site in sites)
    assert not alike(a, keyed) and not alike(b, keyed) and not alike(a, b), "equal data, orders and messages"
    shutil.copytree(tmp_path / "a" / "site", tmp_path / "c" / "site")  # the same secret, and a ledger of its own
    c = noise_of(monkeypatch, SecureNoise, invited(site_at(tmp_path / "c" / "site"), recipe), order(), body)
    assert not alike(a, c)
    again = noise_of(monkeypatch, SecureNoise, sites[0], order(), message_of(recipe, "other"))
    assert not alike(a, again), "another message"


def test_disclosed_counts_have_noise_from_the_cipher(tmp_path, monkeypatch):
    """FedDiff's histogram and magnitudes, in one job; numpy's generator has 2^63 seeds."""
    recipe, n = private(PRIVATE["feddiff"]), []
    site = invited(site_at(tmp_path / "site"), recipe)
    arch = recipe.algorithm.generators[0]
    jobs = recipe.algorithm.jobs
    receipt, _ = site.perform(order(job="warm_up"), encode(jobs["warm_up"].arguments(arch=arch), jobs["warm_up"].arguments))
    snapshot = decode(receipt, Receipt).snapshot
    upload = order(1, base=snapshot, job="upload", federated=0), encode(jobs["upload"].arguments(), jobs["upload"].arguments)
    on_shapes = guarded_of(site).rehearsal
    monkeypatch.setattr(Stream, "numpy", lambda self: pytest.fail("keyed numbers at a real site"))
    monkeypatch.setattr(on_shapes, "perform", lambda *args: [on_shapes.on_release(None, r) for r in releases])
    monkeypatch.setattr(SecureNumbers, "normal", lambda self, loc, scale, size: n.append(scale) or np.full(size, 100.0))
    releases = (Release("histogram", noise=recipe.algorithm.histogram.sigma), Release("magnitudes", noise=2.0))
    told = decode(site.perform(*upload)[1], FedDiffUpload)
    assert n == [recipe.algorithm.histogram.sigma] and told.histogram.tolist() == [120, 120], "20 of each, and 100"
    entries = ledger_of(tmp_path).entries()
    assert [[r.what for r in entry.releases] for entry in entries] == [["fit"], ["histogram", "magnitudes"]]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_federation_of_private_sites(name, tmp_path):
    """Each spends its budget and no more; the server is told no loss; a second run with the same manifest costs nothing."""
    recipe = private(PRIVATE[name])
    first = run_over(OwnData(tmp_path / "sites", 3), recipe, tmp_path / "run")
    spent = [spent_by(tmp_path / "sites" / str(k)) for k in range(3)]
    assert max(spent) == pytest.approx(50.0, rel=1e-3) and max(spent) <= 50.0 and first.privacy["epsilon"] == 50.0
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert all(line["loss"] is None for line in rounds if line["phase"] == "warm-up" or name != "feddiff")
    again = run_over(OwnData(tmp_path / "sites", 3), recipe, tmp_path / "again")
    assert [spent_by(tmp_path / "sites" / str(k)) for k in range(3)] == spent
    assert again.weights_sha256 == first.weights_sha256


def test_the_server_shows_why_a_site_refuses_a_round(tmp_path):
    """Between the rounds another process spends what is left of client 1's ledger; the round goes on without it."""
    recipe = private(PRIVATE["fedavg"])
    channel = OwnData(tmp_path / "sites", 3)

    def fault(client, n, packet):
        if (client, n) == (1, 1):
            ledger_of(tmp_path / "sites" / "1", recipe, "another run").charge(
                "ab" * 32, "a job", [Release("fit", noise=1.0)]
            )
        return packet

    channel.fault = fault
    run_over(channel, recipe, tmp_path / "run", TWO_OF_THREE)
    log = log_of(tmp_path / "run")
    assert "round 2, job 'train': client 1's answer is rejected: round 2, job 'train' would cost epsilon" in log
    assert "and the site's cap is 50 (delta 0.001, rdp); ask for less, or let the site raise --epsilon" in log


def test_a_server_that_is_resumed_gets_the_replies_that_were_paid(tmp_path, monkeypatch):
    """It is killed in round 2 after its checkpoint of round 1; the sites are charged for three rounds in all."""
    recipe = private(PRIVATE["state"], rounds=3)
    channel = OwnData(tmp_path / "sites", 3)

    def fault(client, n, packet):
        if len(channel.orders) > 4:
            raise Killed
        return packet

    channel.fault = fault
    with pytest.raises(Killed):
        run_over(channel, recipe, tmp_path / "run")
    for site in channel.sites.values():
        guarded_of(site).ledger.close()
    channel = OwnData(tmp_path / "sites", 3)
    driver.resume(tmp_path / "run", served=over(channel, EVERYONE))
    assert sum(len(ledger_of(tmp_path / "sites" / str(k)).entries()) for k in range(3)) == 6, "three rounds of two"
    assert max(spent_by(tmp_path / "sites" / str(k)) for k in range(3)) <= 50.0


def test_what_no_site_would_train_privately_is_refused_before_anyone_waits(tmp_path):
    channel = OwnData(tmp_path / "sites", 3)
    for recipe, why in (
        (private(ALGORITHMS["fedphd, pruned in the middle"]), "exact counts of private images"),
        (toy_recipe(budget=BUDGET), "trains on private images without noise"),
    ):
        with pytest.raises(RecipeError, match=why):
            run_over(channel, recipe, tmp_path / "run")
    assert not channel.opened and not (tmp_path / "run").exists()


@pytest.mark.parametrize("privately", [False, True])
def test_a_server_without_images_counts_steps(privately, tmp_path):
    """`effuse serve` with `data=elsewhere(...)` and a solver with `steps=` divides by no number of images: it has none."""
    data = Elsewhere(side=4, channels=1, classes=("dark", "light"))
    made = private if privately else toy_recipe
    recipe = made(
        algorithm=FedAvg(local=Adam(lr=1e-2, batch=8, steps=3)), data=data, evaluate=Evaluate(grid=0), sampler=None
    )
    result = run_over(OwnData(tmp_path / "sites", 3), recipe, tmp_path / "run")
    assert result.rounds == 2
