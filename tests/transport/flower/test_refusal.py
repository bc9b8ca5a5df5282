"""What a federation over a network refuses before it waits for sites."""

import pytest
from fake import FakeChannel, over, run_over
from toy import ADAM, SYNTHESIS, ToyUnet, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedddpm import FedDDPM, FedDDPMPlus, QuickTest
from effuse.algorithms.moon import Moon
from effuse.core.errors import FederationError, RecipeError
from effuse.core.spec import spec
from effuse.metrics.encoders import Pixels
from effuse.runs import driver
from effuse.transport.flower.terms import Terms


@spec
class Featureless(ToyUnet):
    """A network that gives no features."""

    featured = False


ORACLE = QuickTest(encoder=Pixels(side=2), reference="oracle")


POOLED = (
    Centralised(local=ADAM),
    FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=ORACLE),
    FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM, real=True),
)


@pytest.mark.parametrize("algorithm", POOLED, ids=lambda algorithm: algorithm.name)
def test_an_algorithm_that_needs_all_data_in_one_place_is_refused_at_once(algorithm, tmp_path):
    """At a server, on one machine, and when a run of an older version is resumed: no connection, no folder, no process."""
    recipe = toy_recipe(algorithm=algorithm, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    reason = f"{algorithm.name} needs all data in one place, which a real federation never has"
    with pytest.raises(FederationError, match=reason):
        run_over(channel, recipe, tmp_path / "run")
    with pytest.raises(FederationError, match=reason):
        driver.run(recipe, tmp_path / "run", engine="flower")
    assert not (tmp_path / "run").exists()
    (tmp_path / "old").mkdir()
    resolved = recipe.resolved(recipe.data.load("train"))
    driver.RunFolder(tmp_path / "old").create(resolved, "toy", driver.SERVED, "cpu", None, {})
    with pytest.raises(FederationError, match=reason):
        driver.resume(tmp_path / "old", served=over(channel, Terms()))
    assert channel.opened == 0


def test_what_an_algorithms_setup_refuses_is_refused_at_once(tmp_path):
    """MOON compares features, which this network does not give."""
    channel, recipe = FakeChannel(tmp_path / "sites", 3), toy_recipe(algorithm=Moon(local=ADAM), model=Featureless())
    with pytest.raises(RecipeError, match="featureless shows no features, which MOON compares"):
        run_over(channel, recipe, tmp_path / "run")
    assert channel.opened == 0 and not (tmp_path / "run").exists()


def test_worker_processes_are_refused_when_a_run_starts_and_when_it_is_resumed(tmp_path):
    engine = over(FakeChannel(tmp_path / "sites", 3), Terms())
    with pytest.raises(RecipeError, match="--workers 2: with Flower every client has its own process"):
        driver.run(toy_recipe(), tmp_path / "run", workers=2, served=engine)
    driver.run(toy_recipe(rounds=1), tmp_path / "run", served=engine)
    with pytest.raises(RecipeError, match="--workers 2: with Flower"):
        driver.resume(tmp_path / "run", workers=2, served=engine)
