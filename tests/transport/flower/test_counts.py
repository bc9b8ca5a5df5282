"""Noise on counts of labels without a budget: no two runs share it, and the site's ledger is charged for each."""

import pytest
import torch
from private_sites import ledger_of, lines, order, site_at
from toy import ADAM, ToyImages, toy_recipe

from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.shared.labels import Histogram
from effuse.core.errors import RecipeError
from effuse.core.wire import decode, encode
from effuse.privacy.histogram import Exact, Gaussian, Laplace
from effuse.tools.preview import what_leaves
from effuse.transport.flower.guarded import Limit
from effuse.transport.flower.messages import Invitation

ORDERED = order(job="enrol")


def noisy(histogram, **changes):
    recipe = toy_recipe(algorithm=FedPhD(local=ADAM, histogram=histogram, variant="none"), **changes)
    return recipe.resolved(recipe.data.load("train"))


def terms(recipe) -> Invitation:
    return Invitation("toy", recipe.saved(), ("dark", "light"), "", "")


def counts_of(site, recipe, ordered=ORDERED) -> torch.Tensor:
    (site.folder / "manifest.json").unlink(missing_ok=True)  # the operator agrees to another manifest
    site.enrol(terms(recipe))
    job = recipe.algorithm.jobs["enrol"]
    return decode(site.perform(ordered, encode(job.arguments(), job.arguments))[1], Histogram).counts


@pytest.mark.parametrize("mechanism", [Laplace, Gaussian])
def test_two_runs_do_not_give_the_counts(tmp_path, mechanism):
    """With equal normals z, y1 = c + s1 z and y2 = c + s2 z would give c = (s1 y2 - s2 y1) / (s1 - s2) exactly."""
    one, two = (mechanism(epsilon=e) for e in (4.0, 8.0))
    s1, s2 = one.release.noise, two.release.noise
    y1, y2 = (counts_of(site_at(tmp_path / "site"), noisy(m)).double() for m in (one, two))
    assert bool((y1 > 0).all() and (y2 > 0).all()), "no count was cut at zero, so the attack below had all it needs"
    assert not torch.allclose((s1 * y2 - s2 * y1) / (s1 - s2), torch.tensor([20.0, 20.0]).double(), atol=1e-3)


def test_each_draw_is_charged_once_and_across_runs(tmp_path):
    first, second, exact = noisy(Laplace(epsilon=0.5)), noisy(Laplace(epsilon=0.25)), noisy(Exact())
    for recipe, charges in ((exact, 0), (first, 1), (first, 1), (second, 2)):
        answers = [counts_of(site_at(tmp_path / "site"), recipe) for _ in range(2)]
        assert torch.equal(*answers)
        charged = [line for line in lines(tmp_path) if line["kind"] == "charge"] if charges else []
        assert len(charged) == charges
    assert [r.noise for entry in ledger_of(tmp_path).entries() for r in entry.releases] == [2.0, 4.0]
    assert ledger_of(tmp_path).spent()[0] == pytest.approx(0.75, rel=0.01), "0.5 + 0.25"
    shown = "\n".join(what_leaves(site_at(tmp_path / "site"), terms(second)))
    assert "counts of labels leave this site with the noise of laplace(epsilon=0.25); models leave it without" in shown
    assert f"ledger {tmp_path}/ledger.jsonl: epsilon 0.7" in shown


def test_an_image_more_draws_other_noise(tmp_path):
    """The seed, the manifest and the secret are equal; the noise must differ, or the difference is the image."""
    recipe, site = noisy(Laplace(epsilon=4.0)), tmp_path / "site"
    ledger = tmp_path / "ledger.jsonl"
    a, b = (counts_of(site_at(site, data=ToyImages(n=n), limit=Limit(ledger=ledger)), recipe) for n in (40, 42))
    assert not torch.allclose(b - a, torch.ones(2), atol=1e-3), "20 and 21 images of each class"


def test_noise_that_the_server_can_draw_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="the server could draw this site's noise again"):
        site_at(tmp_path / "site").enrol(terms(noisy(Laplace(epsilon=1.0), reproducible=True)))
    site_at(tmp_path / "exact" / "site").enrol(terms(noisy(Exact(), reproducible=True)))
