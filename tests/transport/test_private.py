"""Every algorithm trains privately to the same bits on every engine, or is refused with its reason."""

import pytest
from private_fits import private
from toy import ALGORITHMS, toy_recipe

from effuse.core.errors import EffuseError
from effuse.core.privacy import Budget
from effuse.runs.driver import run

BUDGET = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
REFUSED = {
    "mofedsam, sgd": "sharpness-aware",
    "mofedsam, adam": "sharpness-aware",
    "fedphd, pruned in the middle": "exact counts",
    "fedphd, never pruned, an edge fails": "exact counts",
    "scaffold, option I": "without noise",
    "fedcvae": "exact counts",
    "ensemble, different networks, a majority": "layer 'stages.1' normalises over the images",
    "dense, different networks": "layer 'stages.1' normalises over the images",
    "a loss that looks at the average": "without noise",  # it asks for a gradient
}


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
