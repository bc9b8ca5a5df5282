"""Centralised and LocalOnly by hand, and the server's moving average."""

import json

import pytest
from hand import one_weight_recipe, trained

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.localonly import LocalOnly
from effuse.core.solvers import SGD
from effuse.runs.driver import run
from effuse.runs.save import load


def test_centralised_trains_on_all_data_and_sends_nothing(tmp_path):
    """One step of lr 0.25 on images 1, 1, 1, -1 (mean 0.5) from 0: 0.25 * 2 * 0.5 = 0.25."""
    recipe = one_weight_recipe(Centralised(local=SGD(lr=0.25, batch=4, steps=1)))
    assert trained(recipe, tmp_path) == pytest.approx(0.25)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger["training"]["bytes"]["total"] == 0


def test_centralised_reports_its_per_step_average(tmp_path):
    """Steps end at 0.25 and 0.375; an average with decay 0.5 from 0: 0.125, then 0.25; carried over rounds."""
    recipe = one_weight_recipe(Centralised(local=SGD(lr=0.25, batch=4, steps=1, ema=0.5)), rounds=2)
    assert trained(recipe, tmp_path) == pytest.approx(0.375)
    assert load(tmp_path, ema=True).model.params["w"].item() == pytest.approx(0.25)


def test_lone_sites_end_at_their_own_data(tmp_path):
    """Two rounds of lr 0.25: 0.5 then 0.75 of the way to 1 and to -1. The shared model keeps its initial value."""
    recipe = one_weight_recipe(LocalOnly(local=SGD(lr=0.25, batch=4, steps=1)), rounds=2)
    assert trained(recipe, tmp_path) == 0.0
    assert load(tmp_path, client=0).model.params["w"].item() == pytest.approx(0.75)
    assert load(tmp_path, client=1).model.params["w"].item() == pytest.approx(-0.75)


def test_lone_sites_receive_the_model_once_and_send_none(tmp_path):
    """One weight to each of two clients, in the first of three rounds."""
    run(one_weight_recipe(LocalOnly(local=SGD(lr=0.25, batch=4, steps=1)), rounds=3), tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["training"]["parameters"] == {"up": 0, "down": 2, "total": 2}
    assert [r["parameters"]["down"] for r in ledger["per_round"]] == [2, 0, 0]


def test_lone_models_are_part_of_the_digest(tmp_path):
    """The shared model never changes, so only the clients' own models differ between two learning rates."""
    digests = set()
    for lr in (0.25, 0.5):
        recipe = one_weight_recipe(LocalOnly(local=SGD(lr=lr, batch=4, steps=1)))
        digests.add(run(recipe, tmp_path / str(lr)).weights_sha256)
    assert len(digests) == 2


def test_server_ema(tmp_path):
    """FedAvg's rounds end at 1/4, 3/8 and 7/16. With decay 1/2 they weigh 1, 2 and 4 of 7: 2.75 / 7.

    An average that starts from the first model would be 3/8.
    """
    recipe = one_weight_recipe(FedAvg(local=SGD(lr=0.25, batch=4, steps=1)), rounds=3, ema=0.5)
    assert trained(recipe, tmp_path) == pytest.approx(0.4375)
    assert load(tmp_path, ema=True).model.params["w"].item() == pytest.approx(2.75 / 7)
