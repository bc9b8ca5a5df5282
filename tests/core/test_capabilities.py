"""Capabilities are declared by the algorithms that have them, and by no others."""

import inspect

import pytest
from toy import ADAM, ALGORITHMS, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core import capabilities
from effuse.core.algorithm import Algorithm, job_of
from effuse.core.capabilities import Averages, Companions, Discloses, Draws, Hierarchical, Personal, Prepares, StopsEarly
from effuse.core.errors import FederationError
from effuse.core.registry import registry
from effuse.machines.hollow import Hollow
from effuse.transport.loopback import Loopback
from effuse.transport.simulator import on_disk

DECLARED = {
    Personal: {"local_only", "feddiffuse_ulatdec", "feddiffuse_udec", "fedproto_original"},
    Hierarchical: {"fedphd"},
    Discloses: {"fedcvae", "feddiff", "feddisco", "fedphd"},
    Draws: {
        "aux_only",
        "class_means",
        "dense",
        "fedcvae",
        "feddda",
        "fedddpm",
        "feddiff",
        "fedddpm_plus",
        "fedrcl_guided",
        "localaug",
    },
    Prepares: {"aux_only", "fedcvae", "fedddpm", "feddiff", "fedddpm_plus", "localaug"},
    Averages: {"centralised"},
    StopsEarly: {"fedddpm_plus"},
    Companions: {"moon"},
}
HOOKS = {"jobs", "solvers", "trains", "ready", "setup", "round", "deliver", "warnings"}


def test_every_capability_is_declared_by_the_algorithms_that_have_it():
    real = {cls for cls in registry(Algorithm).values() if cls.__module__.startswith("effuse.")}
    assert {kind: {cls.name for cls in real if issubclass(cls, kind)} for kind in DECLARED} == DECLARED
    defined = {
        cls for _, cls in inspect.getmembers(capabilities, inspect.isclass) if cls.__module__ == capabilities.__name__
    }
    assert {cls for cls in defined if issubclass(cls, Algorithm)} == {*DECLARED}, "there are no others"


def test_an_algorithm_has_few_hooks():
    """A hook that only one algorithm needs belongs into a capability."""
    assert {name for name in vars(Algorithm) if not name.startswith("_")} - {"name"} == HOOKS


def test_a_capability_alone_is_not_a_concrete_algorithm():
    assert not {cls.name for cls in registry(Algorithm).values()} & {kind.name for kind in DECLARED}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_personal_models_are_asked_to_draw(name):
    for job in ("draw", "classify"):
        assert (job in ALGORITHMS[name].jobs) == isinstance(ALGORITHMS[name], Personal)


def test_the_job_draw_is_refused_by_an_algorithm_without_personal_models(tmp_path):
    """FedAvg has only the job 'train'."""
    algorithm, recipe = FedAvg(local=ADAM), toy_recipe()
    with pytest.raises(FederationError, match="fedavg has no job 'draw'; it has train"):
        job_of(algorithm, "draw")
    shards = recipe.shards(recipe.data.load("train"))
    fed = Loopback(recipe, shards, Hollow(), snapshots=on_disk(tmp_path))
    with pytest.raises(FederationError, match="no job 'draw'"):
        fed.ask(Personal.draw, [0], model=None, n=1, sampler=None, average=False)
