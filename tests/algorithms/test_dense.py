"""DENSE by hand, and its rounds."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy import ADAM, ALGORITHMS, INVERSION, toy_recipe

from effuse.algorithms.dense import Dense, compared, disagreement, distilled, divergence, statistics
from effuse.algorithms.ensemble import OneShotEnsemble
from effuse.core.errors import RecipeError
from effuse.core.model import Net
from effuse.core.recipe import Evaluate
from effuse.core.solvers import Adam
from effuse.core.task import Batch
from effuse.machines.eager import Eager
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.dense import DenseGenerator, GeneratorNet
from effuse.models.ensemble import Together
from effuse.models.resnet import Cnn
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tasks.classify import Classify

# two clients' logits, their mean, and a student's
CLIENTS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
TEACHER, STUDENT = torch.tensor([[1.0, 0.5, -0.5]]), torch.tensor([[0.5, 1.0, 0.0]])


class Returns(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


def test_the_losses_of_one_image():
    """KL 0.12268845 at T = 1 and, with T^2, 0.11231084 at 20; cross-entropy at label 1: 1.10413061."""
    teacher = Together([Returns(each[None]) for each in CLIENTS], "logits")(torch.zeros(1))
    assert torch.equal(teacher, TEACHER)
    assert divergence(teacher, STUDENT, 1.0).item() == pytest.approx(0.12268845, abs=1e-7)
    assert divergence(TEACHER.double(), STUDENT.double(), 20.0).item() == pytest.approx(0.11231084, abs=1e-8)
    assert F.cross_entropy(teacher, torch.tensor([1])).item() == pytest.approx(1.10413061, abs=1e-7)


def test_disagreement_counts_images_with_other_answers_in_the_mean_of_all():
    """Teacher and student say 0 and 1 for the first image, and both say 0 for the second: half of -KL."""
    teacher, student = torch.cat([TEACHER, TEACHER]), torch.cat([STUDENT, torch.tensor([[9.0, 0.0, 0.0]])])
    assert disagreement(teacher, student).item() == pytest.approx(-0.12268845 / 2, abs=1e-7)


def test_the_student_minimises_the_divergence_at_the_temperature():
    """The teacher's logits come as a column. At T = 20 terms of opposite sign cancel, which costs fp32 four digits."""
    net = Net(Returns(STUDENT))
    batch = Batch(torch.zeros(1, 1, 1, 1), torch.zeros(1), Classify(), columns={"logits": TEACHER})
    assert distilled(net, batch, {"T": torch.tensor(20.0)}).item() == pytest.approx(0.11231084, rel=3e-4)


def test_the_distance_to_a_batch_norms_statistics():
    """0, 2, 4 have mean 2 and biased variance 8/3: |1 - 8/3| + |1 - 2| = 2.666667."""
    norm = nn.BatchNorm2d(1)
    norm.running_mean.fill_(1.0)
    x = torch.tensor([0.0, 2.0, 4.0]).view(3, 1, 1, 1)
    assert statistics(norm, x).item() == pytest.approx(8 / 3)
    # summed over layers and clients; the second layer sees what the first returns, x normalised by mean 1, variance 1
    teacher = nn.ModuleList([nn.Sequential(norm, nn.Flatten()), nn.Sequential(norm, nn.BatchNorm2d(1), nn.Flatten())]).eval()
    net = Net(Together(list(teacher), "logits").eval())
    logits, apart = compared(net, x)
    # (-1, 1, 3) against mean 0, variance 1: |1 - 8/3| + |0 - 1|
    assert apart.item() == pytest.approx(3 * 8 / 3, abs=1e-4) and logits.shape == (3, 1)
    assert not norm._forward_pre_hooks, "later passes are not compared"
    assert compared(Net(Returns(STUDENT)), x)[1].item() == 0.0, "no such layer, no loss"


def dense(**changes):
    return Dense(**{**INVERSION, "local": ADAM, "central": ADAM} | changes)


def test_a_round_is_an_epoch_on_a_growing_pool(tmp_path):
    """Three clients send a network once. Then eight images join the pool in each of three rounds, and nobody is asked."""
    run(toy_recipe(algorithm=dense(), rounds=3), tmp_path / "run")
    records = RunFolder(tmp_path / "run").records()
    assert [r.phase for r in records] == ["local", "federate", "federate", "federate"]
    # a batch of 8 in each of 3 steps, then the student's epochs on 8, 16 and 24 images
    assert [r.images for r in records] == [40, 24 + 8, 24 + 16, 24 + 24]
    ended = RunFolder(tmp_path / "run").load_checkpoint().server
    assert len(ended.pool) == 24 and ended.pool.pixels.dtype == torch.uint8 and set(ended.pool.origin.tolist()) == {-1}
    assert all(part.diff().min() >= 0 for part in ended.pool.labels.split(8)), "labels are sorted in each batch"
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    size = load(tmp_path / "run").model.params.numel
    sent = [(r["parameters"]["up"], r["parameters"]["down"]) for r in ledger["per_round"]]
    assert sent == [(3 * size, 0), (0, 0), (0, 0), (0, 0)] and ended.teacher.params.numel == 3 * size
    # the logits that each round computed for its own batch are those of the whole pool
    net = Eager(torch.device("cpu")).load(ended.teacher).eval()
    with torch.no_grad():
        torch.testing.assert_close(ended.logits, net(ended.pool.images(True).pixels))


def test_the_teacher_is_the_one_shot_ensemble(tmp_path):
    """With one seed to the bit, so that a table can show what the distillation adds."""
    run(toy_recipe(algorithm=dense(), rounds=1), tmp_path / "dense")
    run(toy_recipe(algorithm=OneShotEnsemble(local=ADAM), rounds=1), tmp_path / "ensemble")
    teacher = RunFolder(tmp_path / "dense").load_checkpoint().server.teacher
    assert teacher.params.digest() == load(tmp_path / "ensemble").model.params.digest()


def test_the_pool_gets_the_batch_of_the_lowest_loss(tmp_path, monkeypatch):
    seen, remember = [], GeneratorNet.remember

    def noting(net, images, loss):
        seen.append((loss.item(), images.detach().clone()))
        remember(net, images, loss)

    monkeypatch.setattr(GeneratorNet, "remember", noting)
    synthesis = Adam(lr=3.0, batch=8, steps=6)  # so high a rate that the last loss is not the lowest
    run(toy_recipe(algorithm=dense(synthesis=synthesis), rounds=1), tmp_path / "run")
    losses = [loss for loss, _ in seen]
    assert len(losses) == 6 and min(losses) < losses[-1]
    best = ((seen[losses.index(min(losses))][1] + 1) * 127.5).round().to(torch.uint8)
    pool = RunFolder(tmp_path / "run").load_checkpoint().server.pool
    assert torch.equal(pool.pixels, best)


@pytest.mark.parametrize(("key", "value"), [("oh", 0.0), ("bn", 0.0), ("adv", 0.0), ("T", 1.0)])
def test_every_term_has_an_effect(key, value, tmp_path):
    networks = (Cnn(widths=(2,), norm="batch"),)
    algorithm = dense(networks=networks)
    ends = [
        run(toy_recipe(algorithm=a, rounds=2), tmp_path / str(i)).weights_sha256
        for i, a in enumerate((algorithm, dataclasses.replace(algorithm, **{key: value})))
    ]
    assert ends[0] != ends[1]


def test_the_student_learns_what_the_clients_know(tmp_path):
    """Without real images: the teacher recognises what was drawn for a label, and the student becomes as good as it.

    The images are measured as the server's own.
    """
    better = {"local": Adam(lr=3e-2, batch=8, epochs=8), "synthesis": Adam(lr=1e-2, batch=16, steps=20, betas=(0.5, 0.999))}
    algorithm = dense(**better, generator=DenseGenerator(batch=16, z=8, width=8), central=Adam(lr=3e-2, batch=8, epochs=4))
    recipe = toy_recipe(algorithm=algorithm, rounds=4)
    metrics = (*recipe.evaluate.metrics, FID(n=32, encoder=Pixels(side=2), split="train"))
    result = run(dataclasses.replace(recipe, evaluate=Evaluate(grid=0, metrics=metrics)), tmp_path / "run")
    assert result.metrics["accuracy"].value == 1.0 and result.metrics["fid_pixels_auxiliary"].protocol["generated"] == 32
    ended = RunFolder(tmp_path / "run").load_checkpoint().server
    right = ended.logits.argmax(1) == ended.pool.labels
    assert right.float().mean() > 0.75 and 0 < ended.pool.labels.sum() < 64, "half would be right by chance"


def test_settings_that_do_not_fit_each_other_are_refused():
    for wrong in (
        Adam(lr=1e-2, batch=4, steps=3),
        Adam(lr=1e-2, batch=8, epochs=3),
        Adam(lr=1e-2, batch=8, steps=3, state="kept"),
    ):
        with pytest.raises(RecipeError, match="algorithm.synthesis: the generator draws one batch of 8 images"):
            dense(synthesis=wrong)


def test_the_conformance_suite_has_a_teacher_with_and_without_batch_norm():
    networks = [a.networks for a in ALGORITHMS.values() if isinstance(a, Dense)]
    assert [any(getattr(n, "norm", "") == "batch" for n in each) for each in networks] == [False, True]
