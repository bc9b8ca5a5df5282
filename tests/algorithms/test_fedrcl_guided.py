"""FedRCL with drawn images and held to a guide: whose features are kept, what is trained on, and what is sent once."""

import dataclasses

import pytest
import torch
from toy import ADAM, DRAWN, GUIDE, GUIDE_DRAWS, TOY_GUIDE, ToyUnet, toy_recipe

from effuse.algorithms.fedrcl import FedRCL, FedRCLGuided
from effuse.algorithms.shared.guides import Vectors
from effuse.core.errors import RecipeError
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tools.check import check
from effuse.transport.state import Snapshots

IMAGES = FedRCLGuided(local=ADAM, near=0.5, draws=TOY_GUIDE, **GUIDE_DRAWS)
VECTORS = FedRCLGuided(local=ADAM, near=0.5, guide=Vectors())


def state_of(tmp_path, algorithm, name: str, client: int = 0):
    folder = RunFolder(tmp_path / "run")
    run(toy_recipe(algorithm=algorithm), folder.path)
    ended = folder.load_checkpoint()
    return ended.server, Snapshots(folder.path / "clients" / str(client)).read(ended.snapshots[client]).get(name)


def test_drawn_images_have_features_too(tmp_path):
    """Client 0 has 14 of the 40 images and eight drawn ones. Of class vectors, each feature is that of the image's label."""
    both = dataclasses.replace(IMAGES, guide=Vectors())
    server, H = state_of(tmp_path, both, "H")
    vectors = server.basis.axes[0].half()
    assert H.shape == (14 + 8, 16) and H.dtype == torch.float16
    share = state_of(tmp_path / "other", both, "share")[1]
    assert torch.equal(H[14:], vectors[share.labels]), "the drawn ones follow the client's own"
    assert all(any(torch.equal(row, vector) for vector in vectors) for row in H[:14])


def test_a_network_looks_at_own_and_drawn_images(tmp_path):
    """Its features differ from image to image, and no network is kept at the client."""
    _, H = state_of(tmp_path, dataclasses.replace(IMAGES, guide=GUIDE, t=3), "H")
    assert H.shape == (22, 16) and len(H.unique(dim=0)) == 22
    assert state_of(tmp_path / "other", dataclasses.replace(IMAGES, guide=GUIDE, t=3), "guide")[1] is None


def test_clients_train_on_their_own_and_drawn_images(tmp_path):
    """Three clients of 14, 13 and 13 images and shares of eight: 64 images a round, after 16 were drawn in 6, 6 and 4."""
    run(toy_recipe(algorithm=IMAGES), tmp_path / "run")
    records = RunFolder(tmp_path / "run").records()
    assert [(r.phase, r.images) for r in records[3:]] == [("federate", 64)] * 2
    assert [r.noted["drawn"] for r in records[:3]] == [6, 12, 16]
    assert all(r.noted["held"] > 0 for r in records[3:])


def test_without_a_weight_it_is_fedrcl(tmp_path):
    """Class vectors draw nothing, so every batch is FedRCL's."""
    a, b, held = (
        run(toy_recipe(algorithm=algorithm), tmp_path / name)
        for name, algorithm in (
            ("none", dataclasses.replace(VECTORS, pull=0.0)),
            ("fedrcl", FedRCL(local=ADAM, near=0.5)),
            ("held", VECTORS),
        )
    )
    assert a.weights_sha256 == b.weights_sha256 != held.weights_sha256


def test_what_is_sent_once():
    """Down: shares of eight images of 16 bytes with labels of 8 bytes; with a guide its network and basis, not again."""

    def down(algorithm, rounds):
        return check(toy_recipe(algorithm=algorithm, rounds=rounds))["traffic"]["bytes"]["down"]

    plain = down(FedRCL(local=ADAM), 2)
    assert down(IMAGES, 2) - plain == 3 * 8 * (16 + 8)
    guided = dataclasses.replace(IMAGES, guide=GUIDE, t=3)
    assert down(guided, 2) > down(IMAGES, 2) and down(guided, 3) - down(guided, 2) == plain // 2


def test_what_cannot_work_is_refused():
    with pytest.raises(RecipeError, match=r"algorithm.guide: without a guide and without draws this is fedrcl\(...\)"):
        FedRCLGuided(local=ADAM)
    for change, words in (
        ({"draws": ToyUnet()}, "algorithm.draws: toy_unet draws images without labels"),
        ({"draws": dataclasses.replace(TOY_GUIDE, classes=3)}, r"are \(4, 1, 3\), those of the data \(4, 1, 2\)"),
        ({"guide": dataclasses.replace(GUIDE, stages=(7,))}, "algorithm.guide: there is no stage 7"),
    ):
        with pytest.raises(RecipeError, match=words):
            check(toy_recipe(algorithm=dataclasses.replace(IMAGES, **change)))
    with pytest.raises(RecipeError, match="algorithm.share: 20 images for each client, but n=16 are drawn; lower it"):
        dataclasses.replace(IMAGES, share=20)
    assert set(GUIDE_DRAWS) == set(DRAWN) - {"guide"}
