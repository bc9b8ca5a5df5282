"""Every algorithm gives the same bits on every engine, and sends what its rehearsal says."""

import inspect
import json

import pytest
from toy import ADAM, ALGORITHMS, ToyForgetful, ToyScribbler, ToyServerScribbler, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.core.algorithm import Algorithm
from effuse.core.capabilities import Personal
from effuse.core.errors import FederationError
from effuse.core.recipe import Evaluate
from effuse.core.registry import registry
from effuse.diffusion.samplers import Ancestral
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tools.check import check


def test_every_algorithm_of_the_project_is_compared():
    """A new algorithm that is missing in ALGORITHMS fails here. FedDISC needs a folder; its own test compares engines."""
    real = {cls.name for cls in registry(Algorithm).values() if cls.__module__.startswith("effuse.")}
    assert real - {"feddisc"} <= {a.name for a in ALGORITHMS.values()}


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loopback_equals_simulator_and_the_rehearsals_ledger(name, wire, tmp_path):
    algorithm = ALGORITHMS[name]
    evaluate, sampler = Evaluate(grid=2, every=2), Ancestral(batch=4)
    ema = None if isinstance(algorithm, Personal) else 0.5
    recipe = toy_recipe(algorithm=algorithm, rounds=3, wire=wire, ema=ema, evaluate=evaluate, sampler=sampler)
    if isinstance(algorithm, Centralised):
        recipe = toy_recipe(algorithm=algorithm, rounds=3, wire=wire)
    results = {engine: run(recipe, tmp_path / engine, engine=engine) for engine in ("simulator", "loopback")}
    a, b = results.values()
    assert a.weights_sha256 == b.weights_sha256
    if recipe.ema is not None:
        averages = {load(tmp_path / engine, ema=True).model.params.digest() for engine in results}
        assert len(averages) == 1
    noted = [[record.noted for record in RunFolder(tmp_path / engine).records()] for engine in results]
    assert noted[0] == noted[1]
    assert a.traffic.bytes == b.traffic.bytes and a.traffic.parameters == b.traffic.parameters
    if a.traffic.bytes.up:
        assert b.traffic.wire_bytes.up > b.traffic.bytes.up
    predicted, ledger = check(recipe)["traffic"], json.loads((tmp_path / "simulator" / "ledger.json").read_text())
    for quantity in ("parameters", "bytes"):
        assert ledger["training"][quantity] == predicted[quantity]
        assert ledger["evaluation"][quantity] == predicted["evaluation"][quantity]
        assert [r[quantity] for r in ledger["per_round"]] == [r[quantity] for r in predicted["per_round"]]
    assert ledger["training"]["clients"] == predicted["clients"]


def test_the_weights_depend_on_the_seed_and_on_training(tmp_path):
    """Otherwise the equalities above would mean nothing."""
    digests = {run(toy_recipe(seed=s, rounds=r), tmp_path / f"{s}-{r}").weights_sha256 for s, r in ((0, 1), (0, 2), (1, 2))}
    assert len(digests) == 3


def test_evaluation_does_not_change_training(tmp_path):
    often = toy_recipe(rounds=3, evaluate=Evaluate(grid=2, every=1), sampler=Ancestral(batch=2))
    rarely = toy_recipe(rounds=3)
    assert run(often, tmp_path / "a").weights_sha256 == run(rarely, tmp_path / "b").weights_sha256


@pytest.mark.parametrize("how", ["in place", "data", "numpy"])
def test_a_client_that_changes_its_message_is_caught(how, tmp_path):
    with pytest.raises(FederationError, match="job 'train' of toy_scribbler changed a tensor"):
        run(toy_recipe(algorithm=ToyScribbler(local=ADAM, how=how)), tmp_path / "run")


def test_a_server_program_that_changes_its_state_in_place_is_caught(tmp_path):
    with pytest.raises(FederationError, match="server program of toy_server_scribbler changed a tensor"):
        run(toy_recipe(algorithm=ToyServerScribbler(local=ADAM)), tmp_path / "run")


def test_an_answer_that_is_never_taken_is_an_error(tmp_path):
    with pytest.raises(FederationError, match="answers of clients 1, 2 were never taken"):
        run(toy_recipe(algorithm=ToyForgetful(local=ADAM)), tmp_path / "run")


def test_algorithms_import_no_engine():
    for cls in registry(Algorithm).values():
        if cls.__module__.startswith("effuse."):
            assert "effuse.transport" not in inspect.getsource(inspect.getmodule(cls))
