"""Every algorithm trains privately to the same bits on every engine, or is refused with its reason."""

import dataclasses

import pytest
from toy import ALGORITHMS, ToyLabelled, toy_recipe

from effuse.algorithms.shared.synthesis import Synthesising
from effuse.core.build import with_values
from effuse.core.errors import EffuseError
from effuse.core.privacy import Budget, DpSgd
from effuse.core.solvers import Solver
from effuse.runs.driver import run

BUDGET = Budget(epsilon=50.0, delta=1e-3)
ON_DATA = ("local", "warmup")  # keys of solvers that clients run on their own images
REFUSED = {
    "mofedsam, sgd": "sharpness-aware",
    "mofedsam, adam": "sharpness-aware",
    "fedphd, pruned in the middle": "exact counts",
    "fedphd, never pruned, an edge fails": "exact counts",
    "scaffold, option I": "without noise",
    "a loss that looks at the average": "without noise",  # it asks for a gradient
}


def private(algorithm, **dp):
    """The same algorithm with private solvers on the clients' images."""
    changes = {
        f.name: with_values(value, f.name, privacy=DpSgd(**dp))
        for f in dataclasses.fields(algorithm)
        if f.name in ON_DATA and isinstance(value := getattr(algorithm, f.name), Solver)
    }
    return with_values(algorithm, "algorithm", **changes)


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


@pytest.mark.parametrize("name", ["fedddpm", "aux only", "localaug"])
def test_exact_counts_of_labels_do_not_leave_with_an_upload(name, tmp_path):
    """A conditional warm-up model is sent with its client's counts."""
    algorithm = private(ALGORITHMS[name])
    assert isinstance(algorithm, Synthesising)
    with pytest.raises(EffuseError, match="exact counts of private images would be sent"):
        run(toy_recipe(algorithm=algorithm, budget=BUDGET, model=ToyLabelled()), tmp_path / "run")
