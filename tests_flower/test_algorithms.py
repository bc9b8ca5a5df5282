"""Every algorithm of the project over TLS and node authentication, three clients in processes of their own: the simulator's weights."""

import pytest
from toy import ALGORITHMS, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral
from effuse.runs import driver
from effuse.transport.flower.commands import Served, served
from effuse.transport.flower.terms import Terms

REAL = {name: a for name, a in ALGORITHMS.items() if not isinstance(a, Centralised)}  # which a real federation cannot do


@pytest.mark.parametrize("name", REAL)
def test_the_simulators_weights(name, town):
    evaluate, sampler = Evaluate(grid=2, every=2), Ancestral(batch=4)
    recipe = toy_recipe(algorithm=REAL[name], rounds=3, reproducible=True, evaluate=evaluate, sampler=sampler)
    town.sites()
    engine = served(Served(town.address, town.keys, Terms(deadline=120.0)), "toy", 3)
    found = driver.run(recipe, town.folder / "flower", name="toy", served=engine)
    expected = driver.run(recipe, town.folder / "simulator")
    assert found.weights_sha256 == expected.weights_sha256
    assert found.traffic.bytes == expected.traffic.bytes
    for process in town.processes:  # told that the run is over, sites leave by themselves
        assert process.wait(30) == 0
