"""Personal models: each is measured at its client; mean, spread and a balanced pool are reported."""

import dataclasses
import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from recorded import taken
from toy import ADAM, ToyUnet, toy_recipe

from effuse.algorithms.feddiffuse import UDec, ULatDec
from effuse.algorithms.localonly import LocalOnly
from effuse.core.metric import Images, Measurement, Metric, Subject
from effuse.core.recipe import Evaluate
from effuse.core.rng import SETTINGS
from effuse.core.spec import spec
from effuse.diffusion.samplers import Ancestral
from effuse.machines.eager import Eager
from effuse.models.unet import DigitsUnet
from effuse.runs.driver import run
from effuse.runs.evaluation import evaluate_run, in_turn, shares_of
from effuse.runs.folder import RunFolder
from effuse.runs.save import load, weights_digest
from effuse.tools.check import check


@spec
class ToyBrightness(Metric):
    """The mean of the first n images."""

    n: int = 6
    called: str = "bright"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.called,)

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        assert taken(SETTINGS), "metrics need the lock: a recording in another thread sets options under which they fail"
        return {self.called: Measurement(float(subject.samples(self.n).pixels.double().mean()), {"generated": self.n})}


def test_shares_are_pooled_in_turn():
    """Clients 0, 1 and 2 show 0 10 20, 1 11 21 and 2 12 22: the first four of the pool are 0 1 2 10."""
    shares = [Images(torch.tensor([k, 10.0 + k, 20.0 + k]).view(3, 1, 1, 1), torch.arange(3)) for k in range(3)]
    pool = in_turn(shares)
    assert pool.pixels.flatten().tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert pool.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert in_turn([Images(s.pixels) for s in shares]).labels is None


def test_personal_models_have_a_mean_a_spread_and_a_balanced_pool(tmp_path):
    """Metrics of six and of three images: the pool takes two images of each of three clients, or one."""
    metrics = (ToyBrightness(n=6), ToyBrightness(n=3, called="few"))
    recipe = toy_recipe(algorithm=UDec(local=ADAM), evaluate=Evaluate(grid=0, metrics=metrics), sampler=Ancestral(batch=6))
    drawn = {}
    measure = ToyBrightness.measure

    def watch(metric, subject):
        drawn.setdefault(metric.called, []).append(subject.samples(metric.n).pixels)
        return measure(metric, subject)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyBrightness, "measure", watch)
        found = run(recipe, tmp_path).metrics
    for name, n in (("bright", 6), ("few", 3)):
        *each, pooled = drawn[name]
        values = [float(x.double().mean()) for x in each]
        assert found[name].clients == values and len(set(values)) > 1
        assert found[name].value == statistics.fmean(values) and found[name].std == statistics.stdev(values)
        # each draws six images from the same noise: the first client gives the first two, the second the next two, and so on
        shares = [drawn["bright"][k][2 * k + i] for i in range(2) for k in range(3)]
        assert torch.equal(pooled, torch.stack(shares)[:n])
        assert found[f"{name}_pooled"].value == float(pooled.double().mean())
        assert found[f"{name}_pooled"].protocol == {"generated": n, "clients": 3}


def test_a_pool_alone_costs_no_more_than_one_model(tmp_path):
    """Six images of three clients: two each, without metrics per client; the check predicts the traffic."""
    recipe = toy_recipe(
        algorithm=UDec(local=ADAM),
        evaluate=Evaluate(grid=0, metrics=(ToyBrightness(n=6),), personal="pooled"),
        sampler=Ancestral(batch=6),
    )
    drawn = []
    generate = Eager.generate

    def watch(machine, net, task, n, *rest):
        drawn.append(n)
        return generate(machine, net, task, n, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eager, "generate", watch)
        found = run(recipe, tmp_path / "run").metrics
    assert drawn == [2, 2, 2]
    assert found["bright_pooled"].protocol == {"generated": 6, "clients": 3} and found.keys() == {"bright_pooled"}
    sent = json.loads((tmp_path / "run" / "ledger.json").read_text())["evaluation"]
    assert check(recipe)["traffic"]["evaluation"]["bytes"] == sent["bytes"]


def test_clients_that_never_trained_are_not_evaluated(tmp_path):
    """One of three clients takes part and gives all six images of the pool; a later evaluation and the check agree."""
    for algorithm in (UDec(local=ADAM, cohort=1), ULatDec(local=ADAM, cohort=1)):
        path = tmp_path / algorithm.name
        evaluate = Evaluate(grid=2, metrics=(ToyBrightness(n=6),))
        recipe = toy_recipe(algorithm=algorithm, rounds=1, evaluate=evaluate, sampler=Ancestral(batch=6))
        result = run(recipe, path)
        [k] = RunFolder(path).load_checkpoint().received["theta"]
        assert [p.name for p in (path / "samples").iterdir()] == [f"round-00001-client-{k}.png"]
        found = result.metrics
        assert found["bright_pooled"].protocol == {"generated": 6, "clients": 1}
        assert found["bright"].clients == [found["bright_pooled"].value]
        own = load(path, client=k).model.params.digest()
        assert result.weights_sha256 == weights_digest(load(path).model, [own])
        sent = json.loads((path / "ledger.json").read_text())["evaluation"]
        assert check(recipe)["traffic"]["evaluation"]["bytes"] == sent["bytes"]
        assert evaluate_run(path, [])["bright_pooled"].protocol["clients"] == 1


def test_sites_that_never_answered_are_not_evaluated():
    """Three sites, of which two have answered."""
    algorithm = LocalOnly(local=ADAM)
    fed = SimpleNamespace(has={"model": {0, 2}}.__getitem__)
    assert algorithm.owners(None, fed) == [0, 2]
    recipe = toy_recipe(algorithm=algorithm, evaluate=Evaluate(grid=0, metrics=(ToyBrightness(n=6),)))
    assert shares_of(recipe, 2) == (3, 6) and shares_of(recipe, 0) == (6, 6), "without owners nobody draws"
    assert shares_of(recipe, 4) == (2, 6), "four clients with one image each would be too few"


def test_clients_draw_whole_turns_of_the_classes():
    """Ten classes, 20 clients: five of 100 images each, from ten drawn; 500 of 10,000; without classes, only the share."""
    labelled = toy_recipe(model=DigitsUnet(side=8, channels=1, classes=10), clients=20)
    for arch, n, drawn in ((labelled.model, 100, 10), (labelled.model, 10_000, 500), (ToyUnet(), 100, 5)):
        evaluate = Evaluate(grid=0, metrics=(ToyBrightness(n=n),), personal="pooled")
        assert shares_of(dataclasses.replace(labelled, model=arch, evaluate=evaluate), 20) == (n // 20, drawn)
