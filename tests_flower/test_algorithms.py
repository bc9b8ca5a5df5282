"""Every algorithm over TLS and node authentication, with three clients in processes, gives the simulator's weights."""

import pytest
from private_sites import PRIVATE, private
from toy import ALGORITHMS, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral
from effuse.runs import driver
from effuse.transport.flower.commands import Served, served
from effuse.transport.flower.terms import Terms

REAL = {name: a for name, a in ALGORITHMS.items() if not isinstance(a, Centralised)}  # it needs all data in one place


@pytest.mark.parametrize("name", REAL)
def test_the_simulators_weights(name, deployment):
    evaluate, sampler = Evaluate(grid=2, every=2), Ancestral(batch=4)
    recipe = toy_recipe(algorithm=REAL[name], rounds=3, reproducible=True, evaluate=evaluate, sampler=sampler)
    equal(recipe, deployment)


@pytest.mark.parametrize("name", ["fedavg", "feddiff"])
def test_the_simulators_noise(name, deployment):
    """Simulated sites plan for themselves and add the noise of a simulation."""
    equal(private(PRIVATE[name], rounds=3, reproducible=True), deployment)


def equal(recipe, deployment) -> None:
    """Run a recipe with real processes and in the simulator, and compare."""
    deployment.sites()
    engine = served(Served(deployment.address, deployment.keys, Terms(deadline=120.0)), "toy", 3)
    result = driver.run(recipe, deployment.folder / "flower", name="toy", served=engine)
    expected = driver.run(recipe, deployment.folder / "simulator")
    assert result.weights_sha256 == expected.weights_sha256
    assert result.traffic.bytes == expected.traffic.bytes
    for process in deployment.processes:  # sites end when the run is over
        assert process.wait(30) == 0
