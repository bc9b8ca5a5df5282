"""`effuse ledger`: what it prints, and what it refuses."""

import math

import pytest
from toy import ToyImages

from effuse.core.privacy import Budget, Release
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.ledger import Ledger, ledger_path

FIT, COUNTS = Release("fit", noise=20.0, rate=0.2, steps=5), Release("histogram", "laplace", 100.0)


@pytest.fixture
def charged(monkeypatch, tmp_path):
    """The default ledger of the toy images, with one charge."""
    monkeypatch.setenv("EFFUSE_LEDGERS", str(tmp_path / "ledgers"))
    path = ledger_path(ToyImages().load("train").digest)
    Ledger(path, Budget(epsilon=5.0), "f" * 64).charge("ab" * 32, "round 3, job 'train'", [FIT, COUNTS])
    return path


def test_charges_and_their_spend_are_printed(effuse, charged):
    epsilon = epsilon_of([FIT, COUNTS], 1e-5)
    assert 0 < epsilon < math.inf
    for line in (f"ledger {charged}", "ledger --data 'toy_images(n=40)'"):
        shown = effuse(line).out
        assert f"all of it composes to epsilon {epsilon:.4g} at delta 1e-05" in shown
    report = effuse(f"ledger {charged} --json --delta 1e-3").json
    assert report["epsilon"] == epsilon_of([FIT, COUNTS], 1e-3) and report["delta"] == 1e-3
    (charge,) = report["charges"]
    assert charge["what"] == "round 3, job 'train'" and charge["unit"] == "image" and len(charge["releases"]) == 2


def test_what_is_no_ledger_is_refused_and_not_made(effuse, charged, tmp_path):
    assert "give either the ledger's FILE or --data" in effuse("ledger").sentence
    assert "there is no such ledger, so nothing has been charged" in effuse(f"ledger {tmp_path / 'x.jsonl'}").sentence
    assert "there is no such ledger" in effuse("ledger --data 'toy_images(n=41)'").sentence
    assert "--delta 2.0: it must lie between 0 and 1" in effuse(f"ledger {charged} --delta 2").sentence
    charged.write_text("not a ledger\n")
    assert "line 1: damaged or changed by hand" in effuse(f"ledger {charged}").sentence
    assert not (tmp_path / "x.jsonl").exists()
