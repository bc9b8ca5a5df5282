"""A site's own budget: what leaves is charged first, under noise that nobody else can draw."""

import dataclasses
import json

import pytest
import torch
from fake import FakeChannel, run_over
from toy import ADAM, ALGORITHMS, ToyImages, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.localonly import LocalOnly
from effuse.core.build import with_values
from effuse.core.errors import FederationError, QuorumError, RecipeError, RunError
from effuse.core.federation import Order
from effuse.core.fit import Private
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import Budget, DpSgd, Release
from effuse.core.rng import Stream, stream
from effuse.core.solvers import Solver
from effuse.core.wire import decode, encode
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.ledger import Ledger
from effuse.runs import driver
from effuse.tools.preview import what_leaves
from effuse.transport.flower import guarded
from effuse.transport.flower.guarded import Limit, Withheld
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Consent, Site
from effuse.transport.worker import Receipt

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
