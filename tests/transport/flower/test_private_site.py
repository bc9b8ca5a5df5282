"""A site's own budget: what leaves is charged first, under noise that nobody else can draw."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import stat

import numpy as np
import pytest
import torch
from fake import EVERYONE, TWO_OF_THREE, FakeChannel, log_of, over, run_over
from toy import ADAM, ALGORITHMS, ToyImages, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.feddiff import FedDiffUpload
from effuse.algorithms.localonly import LocalOnly
from effuse.core.build import with_values
from effuse.core.errors import FederationError, RecipeError, RunError, TrainingError
from effuse.core.federation import Order
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import Budget, DpSgd, Release
from effuse.core.rng import Stream, stream
from effuse.core.solvers import Solver
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ddim
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.histogram import Laplace
from effuse.privacy.ledger import Ledger
from effuse.privacy.noise import SecureNoise, SecureNumbers
from effuse.runs import driver
from effuse.tools.preview import what_leaves
from effuse.transport.flower import guarded
from effuse.transport.flower.guarded import Limit, Withheld
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Consent, Site
from effuse.transport.worker import Receipt, message_digest

pytestmark = pytest.mark.usefixtures("slept", "impatient")

BUDGET = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")  # which is solved in milliseconds
ON_DATA = ("local", "warmup")  # keys of solvers that clients run on their own images


def private(algorithm, **changes):
    """A resolved recipe whose clients train privately."""
    solvers = {
        f.name: with_values(value, f.name, privacy=DpSgd())
        for f in dataclasses.fields(algorithm)
        if f.name in ON_DATA and isinstance(value := getattr(algorithm, f.name), Solver)
    }
    algorithm = with_values(algorithm, "algorithm", **solvers)
    recipe = toy_recipe(algorithm=algorithm, **{"budget": BUDGET, **changes})
    return recipe.resolved(recipe.data.load("train"))


PRIVATE = {
    "fedavg": FedAvg(local=ADAM),
    "feddiff": ALGORITHMS["feddiff, two kinds of networks"],
    "state": ToyStateful(local=ADAM, cohort=2),
    "localonly": LocalOnly(local=ADAM),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_simulated_sites_have_the_simulators_noise(name, tmp_path):
    recipe = private(PRIVATE[name], reproducible=True)
    result = run_over(FakeChannel(tmp_path / "sites", 3), recipe, tmp_path / "run")
    expected = driver.run(recipe, tmp_path / "simulator")
    assert result.weights_sha256 == expected.weights_sha256
    plain = driver.run(toy_recipe(algorithm=PRIVATE[name], reproducible=True), tmp_path / "plain")
    assert result.weights_sha256 != plain.weights_sha256
    assert "cannot be done on shapes" not in (tmp_path / "run" / "federation.log").read_text()


def site_at(folder, client=0, data=ToyImages(), limit=None, ledger=None) -> Site:  # noqa: B008
    """A site with its own data, whose ledger is in the folder above its own."""
    shown: list[str] = []
    limit = limit or Limit(ledger=ledger or folder.parent / "ledger.jsonl")
    site = Site(folder, client, data, Consent(), "cpu", shown.append, limit)
    site.shown = shown
    return site


def invited(site, recipe) -> Site:
    site.enrol(Invitation("toy", recipe.saved(), ("dark", "light"), "", ""))
    return site


def message_of(recipe, seed="test") -> bytes:
    job = recipe.algorithm.jobs["train"]
    return encode(job.arguments(model=recipe.model.initial(Stream((seed,)))), job.arguments)


def order(t=0, client=0, base=None, durable=None, job="train") -> bytes:
    return encode(Order(job, t, t, 0, client, base, durable), Order)


def ledger_of(folder, recipe=None, run="") -> Ledger:
    return Ledger(folder / "ledger.jsonl", BUDGET if recipe is None else recipe.budget, run)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


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
    assert entry.releases == (fit,) and entry.what == "round 0, job 'train'" and entry.unit == "image"
    assert decode(reply, Update).loss is None and decode(reply, Update).weight == 40.0


def test_a_repeated_order_costs_once_and_another_message_is_a_new_release_with_new_noise(tmp_path):
    """Also after a restart, and where only `durable` differs. The sites' secrets are equal here, so nonces must differ."""
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
    upload = order(1, base=snapshot, job="upload"), encode(jobs["upload"].arguments(), jobs["upload"].arguments)
    on_shapes = site._carry_out.__self__.rehearsal
    monkeypatch.setattr(Stream, "numpy", lambda self: pytest.fail("keyed numbers at a real site"))
    monkeypatch.setattr(on_shapes, "perform", lambda *args: [on_shapes.on_release(None, r) for r in releases])
    monkeypatch.setattr(SecureNumbers, "normal", lambda self, loc, scale, size: n.append(scale) or np.full(size, 100.0))
    releases = (Release("histogram", noise=recipe.algorithm.histogram.sigma), Release("magnitudes", noise=2.0))
    told = decode(site.perform(*upload)[1], FedDiffUpload)
    assert n == [recipe.algorithm.histogram.sigma] and told.histogram.tolist() == [120, 120], "20 of each, and 100"
    entries = ledger_of(tmp_path).entries()
    assert [[r.what for r in entry.releases] for entry in entries] == [["fit"], ["histogram", "magnitudes"]]


def test_laplace_noise_of_four_normals():
    """Standard deviation sqrt(2) / epsilon = 2.83 at epsilon 0.5, and a mean deviation of 1 / epsilon = 2."""
    rng = SecureNumbers(SecureNoise(bytes(32), bytes(16)))
    noise = Laplace(epsilon=0.5).noise(100_000, rng)
    assert noise.std() == pytest.approx(2 * math.sqrt(2), rel=0.02) and noise.mean() == pytest.approx(0, abs=0.05)
    assert np.abs(noise).mean() == pytest.approx(2.0, rel=0.02)
    assert (noise > 2 * math.log(10)).mean() == pytest.approx(0.05, rel=0.05), "P(X > s log 10) = 1 / 20"


def test_overspending_is_refused_before_it_computes(tmp_path, monkeypatch):
    """The budget covers the two rounds of the recipe; a server that asks for a third one is refused."""
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
        site.perform(order(2), message_of(recipe))
    assert sum(machine is site.worker.client(0).machine for machine in trained) == 2
    assert len(ledger_of(tmp_path).entries()) == 2
    site.perform(order(1), message_of(recipe))  # what was paid is still sent
    assert spent_by(tmp_path) <= 50.0


def spent_by(folder, delta=1e-3) -> float:
    return epsilon_of([r for entry in ledger_of(folder).entries() for r in entry.releases], delta, "rdp")


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


class Killed(BaseException):
    """A process that ends at this point."""


@pytest.mark.parametrize("name", ["fedavg", "state"])
def test_a_site_that_is_killed_at_any_moment_is_charged_once(name, tmp_path, monkeypatch):
    """It is killed at each write that must reach the disk: charge, nonce, the reply's file, folder and line, and the state's.

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
        site._carry_out.__self__.ledger.close()  # as the end of its process does
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
    assert k == (7 if name == "state" else 5)


def test_the_state_that_a_stored_reply_names_comes_back_with_it(tmp_path):
    """Another message overwrote the snapshot 0_0, and a later order deleted it; the next order starts from the first."""
    recipe = private(PRIVATE["state"], rounds=4)
    site = invited(site_at(tmp_path / "site"), recipe)
    first = site.perform(order(), message_of(recipe))
    state = (tmp_path / "site" / "0_0.state").read_bytes()
    second = site.perform(order(1, base="0_0"), message_of(recipe))
    site.perform(order(), message_of(recipe, "other"))
    assert (tmp_path / "site" / "0_0.state").read_bytes() != state
    assert site.perform(order(), message_of(recipe)) == first
    assert (tmp_path / "site" / "0_0.state").read_bytes() == state
    assert site.perform(order(1, base="0_0"), message_of(recipe)) == second
    assert len(ledger_of(tmp_path).entries()) == 3


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
    assert sentence == "round 0, job 'train' failed on private images; the reason is in the site's own log"
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
    recipe = private(PRIVATE["localonly"])
    jobs = recipe.algorithm.jobs
    site = invited(site_at(tmp_path / "site"), recipe)
    receipt, _ = site.perform(order(), message_of(recipe))
    arguments = jobs["draw"].arguments
    sent = arguments(model=recipe.model.initial(Stream((0,))), n=2, sampler=Ddim(batch=2, steps=2), average=False)
    base = decode(receipt, Receipt).snapshot
    drawn = [site.perform(order(-2, base=base, job="draw"), encode(sent, arguments)) for _ in range(2)]
    assert drawn[0] == drawn[1] and decode(drawn[0][1], jobs["draw"].returns).images.pixels.shape[0] == 2
    assert [line["kind"] for line in lines(tmp_path)] == ["charge", "nonce", "reply"]


def test_a_secret_is_whole_or_not_there(tmp_path):
    recipe = private(PRIVATE["fedavg"])
    site = tmp_path / "site"
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
    narrow = site_at(tmp_path / "site", limit=Limit(1.0, ledger=tmp_path / "ledger.jsonl"))
    assert "this site would refuse it: this run would cost epsilon" in "\n".join(what_leaves(narrow, invitation))
    simulated = Site(tmp_path / "simulated", 0, None, Consent(), "cpu", print)
    shown = "\n".join(what_leaves(simulated, invitation))
    assert "this run may cost epsilon 50" in shown and "ledger" not in shown


class OwnData(FakeChannel):
    """Sites with data of their own, and a ledger each."""

    def site(self, client):
        return site_at(self.folder / str(client) / "site", client)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_federation_of_private_sites(name, tmp_path):
    """Each spends its budget and no more; the server is told no loss; a second run with the same manifest costs nothing."""
    recipe = private(PRIVATE[name])
    first = run_over(OwnData(tmp_path / "sites", 3), recipe, tmp_path / "run")
    spent = [spent_by(tmp_path / "sites" / str(k)) for k in range(3)]
    assert max(spent) == pytest.approx(50.0, rel=1e-3) and max(spent) <= 50.0 and first.privacy["budget"] == 50.0
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
    assert "round 1, job 'train': client 1's answer is rejected: round 1, job 'train' would cost epsilon" in log
    assert "and the site's cap is 50 (delta 0.001, rdp); ask for less, or let the site raise --epsilon" in log
    assert "continuing with 2 of 3" not in log or "rejected: 1" in log


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
        site._carry_out.__self__.ledger.close()
    channel = OwnData(tmp_path / "sites", 3)
    driver.resume(tmp_path / "run", served=over(channel, EVERYONE))
    assert sum(len(ledger_of(tmp_path / "sites" / str(k)).entries()) for k in range(3)) == 6, "three rounds of two"
    assert max(spent_by(tmp_path / "sites" / str(k)) for k in range(3)) <= 50.0
