"""FedDDA by hand: what is drawn and dealt, what a client lacks, and which images it leaves out."""

import dataclasses

import numpy as np
import pytest
import torch
from toy import ADAM, DRAWN, TOY_GUIDE, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddda import FedDDA, mistaken
from effuse.algorithms.shared.shares import SHARE
from effuse.core.data import Dataset, Partition
from effuse.core.errors import RecipeError
from effuse.core.recipe import Evaluate, read_manifest
from effuse.core.spec import spec
from effuse.diffusion.samplers import Ddim
from effuse.machines.eager import Eager
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.pretrained import FromPretrained
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.tools.check import check
from effuse.transport.state import Snapshots

DDA = FedDDA(local=ADAM, **DRAWN)


@spec
class Sorted(Partition):
    """Client 0 has the dark images only, client 1 the light ones, client 2 the last two of each."""

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        labels = dataset.labels.numpy()
        dark, light = (np.flatnonzero(labels == c) for c in (0, 1))
        return [dark[:-2], light[:-2], np.sort(np.concatenate([dark[-2:], light[-2:]]))]


def test_images_are_drawn_in_groups_evenly_over_the_classes(tmp_path):
    """16 images in groups of 6: 6, 6 and 4, before the two federated rounds; of each class three, three and two."""
    run(toy_recipe(algorithm=DDA), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    records = folder.records()
    assert [r.phase for r in records] == ["drawing"] * 3 + ["federate"] * 2
    assert [r.noted["drawn"] for r in records[:3]] == [6, 12, 16]
    drawn = folder.load_checkpoint().server.auxiliary
    assert drawn.labels.tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3 + [0] * 2 + [1] * 2
    assert len(drawn.pixels.flatten(1).unique(dim=0)) == 16, "every group has other random numbers"


def states(tmp_path, algorithm, **changes):
    """The server's images, and each client's share, after a run."""
    run(toy_recipe(algorithm=algorithm, **changes), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    ended = folder.load_checkpoint()
    found = [Snapshots(folder.path / "clients" / str(k)).read(ended.snapshots[k])[SHARE] for k in range(3)]
    return ended, found


def test_every_client_keeps_some_of_the_images(tmp_path):
    """Eight of sixteen, without repetition, others for each client."""
    ended, shares = states(tmp_path, dataclasses.replace(DDA, cohort=None))
    rows = {tuple(image.flatten().tolist()): i for i, image in enumerate(ended.server.auxiliary.pixels)}
    chosen = [[rows[tuple(image.flatten().tolist())] for image in share.pixels] for share in shares]
    assert all(len(set(some)) == 8 for some in chosen) and len({frozenset(some) for some in chosen}) == 3
    for some, share in zip(chosen, shares):
        assert torch.equal(ended.server.auxiliary.labels[some], share.labels)
    assert ended.received == {"share": (0, 1, 2)}


def images_trained(tmp_path, algorithm, **changes):
    run(toy_recipe(algorithm=algorithm, partition=Sorted(), **changes), tmp_path / "run")
    return [r.images for r in RunFolder(tmp_path / "run").records() if r.phase == "federate"]


def test_add_lack_uses_classes_of_which_a_client_has_no_image(tmp_path):
    """Clients 0 and 1 have 18 images of one class, client 2 has both. A share of all 16 has eight of each class.

    add: 18 + 16, 18 + 16 and 4 + 16 images are 88. add_lack: 18 + 8, 18 + 8 and 4 are 56.
    """
    whole = dataclasses.replace(DDA, share=16)
    assert images_trained(tmp_path / "a", whole) == [88, 88]
    assert images_trained(tmp_path / "b", dataclasses.replace(whole, deal="add_lack")) == [56, 56]


def test_confident_mistakes_by_hand():
    """Labels 0 0 1 1, probabilities of class 0: 0.9, 0.2, 0.6, 0.1. Mean ones: 0.55 of class 0, (0.4 + 0.9) / 2 = 0.65 of 1.

    The second image is light with 0.8 >= 0.65 and labelled dark; the third is dark with 0.6 >= 0.55 and labelled light.
    """
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
    assert mistaken(p, torch.tensor([0, 0, 1, 1])).tolist() == [False, True, True, False]
    unsure = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5], [0.1, 0.9]])  # 0.65 and 0.7: nobody is sure of 0.6 and 0.5
    assert not mistaken(unsure, torch.tensor([0, 0, 1, 1])).any()
    assert not mistaken(p, torch.tensor([0, 0, 0, 0]))[[0, 1, 2, 3]].any(), "nobody is sure of a class without images"


def test_the_filter_leaves_out_what_the_global_model_calls_another_class(tmp_path, monkeypatch):
    """From the second round on, every second image of a share counts as mistaken: 88 images, then 88 - 3 * 8."""
    monkeypatch.setattr("effuse.algorithms.feddda.mistaken", lambda p, labels: torch.arange(len(labels)) % 2 == 0)
    algorithm = dataclasses.replace(DDA, share=16, filter=1)
    assert images_trained(tmp_path, algorithm, rounds=3) == [88, 64, 64]


def test_a_client_without_added_images_trains_on_its_own(tmp_path, monkeypatch):
    """All are left out: what FedAvg trains on, 18, 18 and 4 images."""
    monkeypatch.setattr("effuse.algorithms.feddda.mistaken", lambda p, labels: labels >= 0)
    assert images_trained(tmp_path, dataclasses.replace(DDA, share=16, filter=0)) == [40, 40]


def test_it_draws_from_a_denoiser_while_the_run_classifies(tmp_path, monkeypatch):
    """The guide is another run's model, by its folder: a network and a task that are not the run's."""
    task = Denoise(schedule=DRAWN["task"].schedule)
    guide = toy_recipe(model=TOY_GUIDE, task=task, algorithm=FedAvg(local=ADAM))
    saved = run(guide, tmp_path / "guide")
    tasks, generate = [], Eager.generate

    def watched(machine, net, task, n, sampler, labels, stream):
        tasks.append((task, net.arch.name))
        return generate(machine, net, task, n, sampler, labels, stream)

    monkeypatch.setattr(Eager, "generate", watched)
    algorithm = dataclasses.replace(DDA, guide=FromPretrained(folder=str(tmp_path / "guide" / "model")), task=task)
    recipe = toy_recipe(algorithm=algorithm)
    found = run(recipe, tmp_path / "run")
    assert tasks == [(task, "toy_labelled")] * 3 and recipe.task != task
    pinned = read_manifest(tmp_path / "run")["recipe"]["algorithm"]
    assert saved.weights_sha256 in pinned, "the guide's weights are pinned"
    assert found.metrics["accuracy"].value >= 0.0


def test_the_drawn_images_are_measured(tmp_path):
    """Metrics of samples look at what the server drew, as with other synthetic images."""
    metric = FID(n=16, encoder=Pixels(side=2), split="train")
    recipe = dataclasses.replace(toy_recipe(algorithm=DDA), evaluate=Evaluate(grid=0, metrics=(metric,)))
    assert "fid_pixels_auxiliary" in run(recipe, tmp_path / "run").metrics


def test_shares_are_charged_once():
    """Down: three models a round, and once three shares of eight images of 16 bytes with labels of 8 bytes."""
    two, three = (check(toy_recipe(algorithm=DDA, rounds=n))["traffic"]["bytes"] for n in (2, 3))
    plain = check(dataclasses.replace(toy_recipe(algorithm=DDA, rounds=2), algorithm=FedAvg(local=ADAM)))["traffic"]["bytes"]
    assert two["down"] - plain["down"] == 3 * 8 * (16 + 8) and two["up"] == plain["up"]
    assert three["down"] - two["down"] == plain["down"] // 2


def test_what_cannot_work_is_refused():
    with pytest.raises(RecipeError, match="algorithm.share: 20 images for each client, but n=16 are drawn; lower it"):
        dataclasses.replace(DDA, share=20)
    for change, words in (
        ({"guide": ToyUnet()}, "algorithm.guide: toy_unet draws images without labels"),
        ({"guide": dataclasses.replace(TOY_GUIDE, classes=3)}, r"are \(4, 1, 3\), those of the data \(4, 1, 2\)"),
        ({"sampler": Ddim(steps=26)}, "26"),
    ):
        with pytest.raises(RecipeError, match=words):
            check(toy_recipe(algorithm=dataclasses.replace(DDA, **change)))
