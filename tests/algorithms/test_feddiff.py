"""FedDiff: what is sent, drawn, filtered and trained on; its budget; and the class means that it is held against."""

import csv
import dataclasses
import json

import pytest
import torch
from toy import ADAM, SYNTHESIS, ToyImages, ToyLabelled, ToyScores, toy_recipe

from effuse.algorithms.class_means import ClassMeans
from effuse.algorithms.feddiff import FedDiff
from effuse.algorithms.shared.central_images import CentralImages
from effuse.algorithms.shared.filters import AtRandom, Fmf, Oracle
from effuse.core.errors import EffuseError, RecipeError
from effuse.core.privacy import Budget, DpSgd
from effuse.core.recipe import Evaluate
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.data.dirichlet import QuantitySkew
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.diversity import Diversity
from effuse.models.resnet import Cnn
from effuse.models.saved import write_plain
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.histogram import Exact, Gaussian
from effuse.runs.driver import begin, resume, run
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.check import check
from effuse.tools.export import export_auxiliary
from effuse.transport.plan import releases

BUDGET = Budget(epsilon=20.0, delta=1e-3, accountant="rdp")  # milliseconds, where "pld" takes seconds
KEPT = Adam(lr=1e-2, batch=8, epochs=1, state="kept")
VALUES = SYNTHESIS | {
    "generators": (ToyLabelled(), ToyLabelled(width=2)),
    "task": Denoise(schedule=Linear(steps=25)),
    "central": KEPT,
    "least": 1,
}


@spec
class SavedScores(ToyScores):
    def save(self, net, folder, scheduler) -> None:
        write_plain(self, net, folder, scheduler)


def classifying(algorithm, **changes):
    values = {"model": SavedScores(), "task": Classify(), "evaluate": Evaluate(grid=0, metrics=(Accuracy(),))}
    return toy_recipe(algorithm=algorithm, **{**values, **changes})


def server(folder):
    return RunFolder(folder).load_checkpoint().server


def test_as_many_images_are_drawn_as_there_were_with_the_clients_labels(tmp_path):
    """40 images of alternating classes; each client's n_c images carry its own label counts."""
    recipe = classifying(FedDiff(**VALUES))
    run(recipe, tmp_path / "run")
    A, shards = server(tmp_path / "run").A, recipe.shards(recipe.data.load("train"))
    for client, shard in enumerate(shards):
        own = A.labels[A.origin == client]
        assert torch.bincount(own, minlength=2).tolist() == shard.histogram
    assert len(A) == 40
    twice = classifying(FedDiff(**VALUES | {"share": 2.0}))
    run(twice, tmp_path / "twice")
    assert len(server(tmp_path / "twice").A) == 80


def test_a_client_sends_its_generator_once_and_receives_nothing(tmp_path):
    """The first network has 100 parameters, three of them an embedding of two classes and the null label; the second, of
    width 2, has 48. Clients 0 and 2 send the first, client 1 the second: 248. Label counts are no parameters."""
    first = 4 * 9 + 4 + 4 * 4 + 4 + 4 * 9 + 1 + 3
    assert first == 100 and 2 * 9 + 2 + 2 * 2 + 2 + 2 * 9 + 1 + 3 == 48
    report = check(classifying(FedDiff(**VALUES)))
    assert report["traffic"]["parameters"]["down"] == 0
    assert report["traffic"]["parameters"]["up"] == 2 * first + 48
    assert [n["parameters"] for n in report["networks"]] == [first, 48]
    assert report["steps"] == {"client": 3 * 3, "server": 2 * 5}  # three steps each; 40 images in batches of 8, twice


def test_a_round_is_one_pass_of_the_classifier_over_the_images(tmp_path):
    recipe = classifying(FedDiff(**VALUES), rounds=3)
    run(recipe, tmp_path / "run")
    lines = RunFolder(tmp_path / "run").records()
    assert [r.phase for r in lines] == ["warm-up", "synthesis", *["federate"] * 3]
    assert [r.images for r in lines[-3:]] == [40, 40, 40]
    assert all(r.loss is not None for r in lines[-3:])


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    recipe = classifying(FedDiff(**VALUES, filter=Fmf(gamma=0.25)), rounds=3)
    whole = run(recipe, tmp_path / "whole")

    class Killed(Exception):
        pass

    for after in (0, 1, 3):
        started = begin(recipe, tmp_path / f"killed-{after}")
        closed, lines = started.observer.closed, []

        def count(record, closed=closed, lines=lines, after=after):
            closed(record)
            lines.append(record)
            if len(lines) > after:
                raise Killed

        started.observer.closed = count
        with pytest.raises(Killed):
            started.complete()
        assert resume(tmp_path / f"killed-{after}").weights_sha256 == whole.weights_sha256


def test_small_clients_do_not_train_and_nothing_is_drawn_for_them(tmp_path):
    """Of three clients with 40 images, those with fewer than `least` are left out by a rule that is fixed beforehand."""
    recipe = classifying(FedDiff(**VALUES), partition=QuantitySkew(beta=0.5, minimum=2))
    sizes = [len(s) for s in recipe.shards(recipe.data.load("train"))]
    least = sorted(sizes)[1]
    assert sizes.count(least) == 1 and min(sizes) < least
    run(recipe.changed([f"algorithm.least={least}"]), tmp_path / "run")
    assert set(server(tmp_path / "run").A.origin.tolist()) == {k for k, n in enumerate(sizes) if n >= least}


def test_the_filter_is_noted_and_removes_its_share(tmp_path):
    for name, rule in (("fmf", Fmf(gamma=0.25)), ("random", AtRandom(gamma=0.25))):
        run(classifying(FedDiff(**VALUES, filter=rule)), tmp_path / name)
        noted = [r.noted["filter"] for r in RunFolder(tmp_path / name).records() if "filter" in (r.noted or {})]
        assert noted == [{"drawn": 40, "kept": 30}]
    a, b = (server(tmp_path / name).A.pixels for name in ("fmf", "random"))
    assert not torch.equal(a, b)


def test_the_oracle_keeps_what_a_classifier_of_real_images_recognises(tmp_path):
    recipe = classifying(FedDiff(**VALUES, filter=Oracle(solver=Adam(lr=1e-2, batch=8, epochs=2))))
    run(recipe, tmp_path / "run")
    noted = [r.noted["filter"] for r in RunFolder(tmp_path / "run").records() if "filter" in (r.noted or {})]
    assert 0 < noted[0]["kept"] < noted[0]["drawn"] == 40
    private = VALUES | {"warmup": dataclasses.replace(VALUES["warmup"], privacy=DpSgd()), "histogram": Gaussian(epsilon=1.0)}
    with pytest.raises(RecipeError, match=r"oracle\(\) trains on real images without privacy"):
        run(classifying(FedDiff(**private, filter=Oracle()), budget=BUDGET), tmp_path / "private")


def test_metrics_of_samples_measure_the_servers_images(tmp_path):
    metrics = (Accuracy(), Diversity(n=8))
    result = run(classifying(FedDiff(**VALUES), evaluate=Evaluate(grid=0, metrics=metrics)), tmp_path / "run")
    assert "accuracy" in result.metrics and "diversity" not in result.metrics
    assert any(name.endswith("_auxiliary") for name in result.metrics)


def test_exported_images_have_labels_origins_and_provenance(tmp_path):
    run(classifying(FedDiff(**VALUES)), tmp_path / "run")
    where, n = export_auxiliary(tmp_path / "run", "imagefolder", tmp_path / "images")
    rows = list(csv.DictReader((where / "labels.csv").open()))
    A = server(tmp_path / "run").A
    assert n == len(rows) == 40
    assert [int(r["label"]) for r in rows] == A.labels.tolist() and [int(r["client"]) for r in rows] == A.origin.tolist()
    assert {p.parent.name for p in where.rglob("*.png")} == {"dark", "light"}
    provenance = json.loads((where / "provenance.json").read_text())
    assert provenance["synthetic"] and provenance["auxiliary"] == 40 and provenance["sampler"].startswith("ddim")


def private(**changes) -> FedDiff:
    warmup = Adam(lr=1e-2, batch=8, epochs=2, privacy=DpSgd())
    return FedDiff(**VALUES | {"warmup": warmup, "histogram": Gaussian(epsilon=1.0), **changes})


def test_all_releases_of_a_client_compose_to_the_budget(tmp_path):
    """Fit, histogram and magnitudes. A fit on 14 images has 2 epochs of two steps, q = 1/2; on 13 images the same."""
    recipe = classifying(private(filter=Fmf(noise=8.0)), budget=BUDGET)
    result = run(recipe, tmp_path / "run")
    planned = releases(recipe.resolved(recipe.data.load("train")), recipe.shards(recipe.data.load("train")))
    for client, found in planned.items():
        assert sorted((r.what, r.rate, r.steps) for _, r in found) == [
            ("fit", 0.5, 4),
            ("histogram", 1.0, 1),
            ("magnitudes", 1.0, 1),
        ]
        spent = result.privacy["clients"][str(client)]
        solved = [r if r.noise is not None else dataclasses.replace(r, noise=spent["sigma"]) for _, r in found]
        assert epsilon_of(solved, 1e-3, "rdp") == pytest.approx(spent["epsilon"]) and 19.9 < spent["epsilon"] <= 20.0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]["unit"] == "image"


def test_what_is_not_private_is_refused_before_training(tmp_path):
    for wrong, why in (
        (FedDiff(**VALUES), "its solver adam trains on private images without noise; give it privacy=dp_sgd"),
        (private(histogram=Exact()), "exact.. would send exact counts of private images; use gaussian"),
        (private(filter=Fmf(noise=0.0)), "magnitudes would leave the client without noise"),
        (private(histogram=Gaussian(epsilon=30.0)), "these releases alone cost epsilon .*, and the budget is 20"),
    ):
        with pytest.raises(EffuseError, match=why):
            run(classifying(wrong, budget=BUDGET), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(EffuseError, match="the recipe has no budget"):
        run(classifying(private()), tmp_path / "run")


def test_a_batch_norm_network_is_refused_with_its_layer(tmp_path):
    from effuse.algorithms.fedavg import FedAvg

    solver = dataclasses.replace(ADAM, privacy=DpSgd())
    batch = classifying(FedAvg(local=solver), model=Cnn(widths=(8,), norm="batch"), budget=BUDGET)
    with pytest.raises(RecipeError, match=r"cnn: layer 'stages.1' normalises over the images.*use norm=group"):
        run(batch, tmp_path / "a")


def test_a_warm_start_on_class_means_changes_the_generator_and_is_charged(tmp_path):
    """What is told once trains the generator without further cost: one release more, and another network."""
    means = CentralImages(noise=5.0, solver=Adam(lr=1e-2, batch=8, steps=5))
    recipe, plain = (classifying(private(central_images=m), budget=BUDGET) for m in (means, None))
    a, b = run(recipe, tmp_path / "a"), run(plain, tmp_path / "b")
    assert [c["releases"] for c in a.privacy["clients"].values()] == [3] * 3
    assert [c["releases"] for c in b.privacy["clients"].values()] == [2] * 3
    assert not torch.equal(server(tmp_path / "a").A.pixels, server(tmp_path / "b").A.pixels)


def test_class_means_alone_spend_the_whole_budget_on_them(tmp_path):
    """Two classes far apart: their means suffice. The noise is solved: a Gaussian mechanism of epsilon 20, delta 1e-3."""
    algorithm = ClassMeans(central=Adam(lr=1e-1, batch=8, epochs=1, state="kept"), fresh=0.1)
    result = run(classifying(algorithm, budget=BUDGET, rounds=5, data=ToyImages(n=400)), tmp_path / "run")
    spent = result.privacy["clients"]["0"]
    assert spent["releases"] == 1 and 19.9 < spent["epsilon"] <= 20.0 and 0.1 < spent["sigma"] < 0.4
    assert result.metrics["accuracy"].value == 1.0
    A = server(tmp_path / "run").auxiliary
    assert abs(len(A) - 400) < 40 and set(A.origin.tolist()) == {0, 1, 2}
