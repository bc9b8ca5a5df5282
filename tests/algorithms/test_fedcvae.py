"""FedCVAE: decoders sent once, images in the clients' labels, and their distillation."""

import dataclasses
import json

import numpy as np
import pytest
from toy import ADAM, AUTOENCODER, CVAES, SMALL, ToyImages, toy_recipe

from effuse.algorithms.fedcvae import FedCVAE
from effuse.core.data import Dataset, Partition
from effuse.core.errors import FederationError, RecipeError
from effuse.core.recipe import Evaluate
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.data.sources import Digits
from effuse.diffusion.samplers import Ddim
from effuse.metrics.accuracy import Accuracy
from effuse.models.cvae import Cvae
from effuse.privacy.histogram import Gaussian, Laplace
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.tools.check import check
from effuse.transport.state import Snapshots

KD = CVAES | {"variant": "kd", "distillation": ADAM}


@spec
class Skewed(Partition):
    """Of forty images, light and dark by turns: one dark one; four of each kind; and the rest, 15 dark and 16 light ones."""

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(dataset)), [1, 9])


def recipe_of(**changes):
    """A classifier of dark and light squares."""
    values = {
        "algorithm": FedCVAE(**CVAES, central=ADAM),
        "model": SMALL,
        "task": Classify(),
        "evaluate": Evaluate(grid=0, metrics=(Accuracy(),)),
        "rounds": 1,
    }
    return toy_recipe(**values | changes)


def server(folder):
    return RunFolder(folder).load_checkpoint().server


def counts(A):
    """Images of each class that came from each of three clients."""
    return [A.labels[A.origin == k].bincount(minlength=2).tolist() for k in range(3)]


def sent(folder):
    ledger = json.loads((folder / "ledger.json").read_text())
    return [(r["phase"], r["parameters"]["up"], r["bytes"]["up"], r["parameters"]["down"]) for r in ledger["per_round"]]


def test_decoders_and_histograms_are_sent_once_and_nothing_goes_down(tmp_path):
    """A warm-up, then three decoders of P numbers, each with two counts of eight bytes; then only the server works."""
    run(recipe_of(rounds=2), tmp_path / "run")
    arch = dataclasses.replace(AUTOENCODER, only="decoder").resolved(ToyImages().load("train").shape)
    P = sum(p.numel() for p in arch.build().parameters())
    up = [("warm-up", 0, 0, 0), ("synthesis", 3 * P, 3 * (4 * P + 16), 0), ("federate", 0, 0, 0), ("federate", 0, 0, 0)]
    assert sent(tmp_path / "run") == up
    assert server(tmp_path / "run").decoders == {}
    ended = RunFolder(tmp_path / "run").load_checkpoint()
    kept = Snapshots(tmp_path / "run" / "clients" / "0").read(ended.snapshots[0])
    assert kept == {}, "the encoder is dropped with the decoder"
    checked = check(recipe_of())
    assert [n["name"] for n in checked["networks"]] == ["cvae"] and checked["networks"][0]["parameters"] > P


def test_as_many_images_with_the_labels_of_each_client(tmp_path):
    """The clients hold 1, 8 and 31 images; with least=2 the first does not train."""
    algorithm = FedCVAE(**CVAES, central=ADAM, least=2)
    run(recipe_of(algorithm=algorithm, partition=Skewed()), tmp_path / "run")
    A = server(tmp_path / "run").auxiliary
    assert counts(A) == [[0, 0], [4, 4], [15, 16]] and A.pixels.shape == (39, 1, 4, 4)
    with pytest.raises(FederationError, match="no client has 32 images to train on; lower algorithm.least"):
        run(recipe_of(algorithm=dataclasses.replace(algorithm, least=32), partition=Skewed()), tmp_path / "none")


def test_generators_go_to_the_clients_in_turn(tmp_path):
    """Five clients, two autoencoders of which the second is larger: three and two of them are sent."""
    other = Cvae(widths=(6,), z=3, groups=2)
    run(
        recipe_of(algorithm=FedCVAE(**CVAES | {"generators": (AUTOENCODER, other), "group": 9}, central=ADAM), clients=5),
        tmp_path,
    )
    sizes = []
    for arch in (AUTOENCODER, other):
        decoder = dataclasses.replace(arch, only="decoder").resolved(ToyImages().load("train").shape)
        sizes.append(sum(p.numel() for p in decoder.build().parameters()))
    assert sent(tmp_path)[1][1] == 3 * sizes[0] + 2 * sizes[1]


def test_what_a_histogram_costs_is_told(tmp_path):
    """A Gaussian mechanism of epsilon 2, once for each site; its noise changes the labels, and exact counts cost nothing."""
    noisy = FedCVAE(**CVAES, central=ADAM, histogram=Gaussian(epsilon=2.0))
    run(recipe_of(algorithm=noisy), tmp_path / "noisy")
    told = json.loads((tmp_path / "noisy" / "ledger.json").read_text())["privacy"]["histogram"]
    assert (told["epsilon"], told["delta"], told["times"]) == (2.0, 1e-5, 1)
    run(recipe_of(), tmp_path / "exact")
    assert "privacy" not in json.loads((tmp_path / "exact" / "ledger.json").read_text())
    noisy_counts, exact_counts = (counts(server(tmp_path / name).auxiliary) for name in ("noisy", "exact"))
    assert sum(map(sum, exact_counts)) == 40 and noisy_counts != exact_counts


def test_a_distilled_decoder_draws_all_classes_alike(tmp_path):
    """As many images as before, half of each class, from no client; the clients' decoders are not kept."""
    run(recipe_of(algorithm=FedCVAE(**KD, central=ADAM), partition=Skewed()), tmp_path / "run")
    records = RunFolder(tmp_path / "run").records()
    assert [r.phase for r in records] == ["warm-up", "synthesis", "distillation", "federate"]
    assert records[2].noted["distillation"]["images"] == 40 and not any(up for _, up, _, _ in sent(tmp_path / "run")[2:])
    ended = server(tmp_path / "run")
    assert ended.auxiliary.labels.bincount().tolist() == [20, 20] and set(ended.auxiliary.origin.tolist()) == {-1}
    assert ended.decoders == {}


def test_the_distilled_decoder_imitates_the_clients(tmp_path):
    """Dark squares have a brightness near 3 and light ones near 203; the clients' decoders know, and then the server's."""
    differences = []
    for steps in (1, 300):
        solvers = {"warmup": Adam(lr=3e-2, batch=8, steps=100), "distillation": Adam(lr=3e-2, batch=8, steps=steps)}
        algorithm = FedCVAE(**KD | solvers, central=ADAM)
        run(recipe_of(algorithm=algorithm, clients=1), tmp_path / str(steps))
        A = server(tmp_path / str(steps)).auxiliary
        dark, light = (A.pixels[A.labels == c].float().mean().item() for c in (0, 1))
        differences.append(light - dark)
    assert differences[0] < 50 and 150 < differences[1] < 220


@pytest.mark.parametrize("variant", ["ens", "kd"])
def test_a_classifier_learns_from_decoded_digits(variant, tmp_path):
    """Two sites with half of the digits each: from their autoencoders alone, well above chance on real ones."""
    algorithm = FedCVAE(
        variant=variant,
        warmup=Adam(lr=3e-3, batch=32, epochs=10),
        generators=(Cvae(widths=(16, 32), z=10),),
        distillation=Adam(lr=1e-2, batch=64, epochs=8) if variant == "kd" else None,
        central=Adam(lr=3e-3, batch=64, epochs=2),
    )
    recipe = recipe_of(algorithm=algorithm, data=Digits(), clients=2)
    recipe = recipe.changed(["model=cnn()", "rounds=2"])
    assert run(recipe, tmp_path / "run").metrics["accuracy"].value > 0.7
    assert load(tmp_path / "run").model.arch.name == "cnn"


def test_settings_that_do_not_go_together_are_refused():
    for wrong, why in (
        ({"variant": "kd"}, "algorithm.distillation"),
        ({"distillation": ADAM}, "algorithm.distillation"),
        ({"generators": ()}, "algorithm.generators"),
        ({"generators": (Cvae(only="decoder"),)}, "algorithm.generators"),
        ({**KD, "generators": (AUTOENCODER, Cvae(z=4))}, "one length of z"),
        ({**KD, "real": True}, "real images come from none"),
    ):
        with pytest.raises(RecipeError, match=why):
            FedCVAE(**CVAES | wrong, central=ADAM)
    with pytest.raises(RecipeError, match=r"task reconstruct\(\) does not fit"):
        check(toy_recipe(task=FedCVAE(**CVAES, central=ADAM).task))
    with pytest.raises(RecipeError, match="algorithm.sampler: no decode 'ddim'; valid: decode"):
        recipe_of().changed([f"algorithm.sampler={Ddim()}"])


def test_noise_on_a_histogram_is_a_sites_own(tmp_path):
    """Three sites with equal counts tell different noisy ones."""
    algorithm = FedCVAE(**CVAES | {"share": 1.0}, central=ADAM, histogram=Laplace(epsilon=0.2))
    run(recipe_of(algorithm=algorithm, data=ToyImages(n=48)), tmp_path / "run")
    assert len({tuple(each) for each in counts(server(tmp_path / "run").auxiliary)}) == 3
