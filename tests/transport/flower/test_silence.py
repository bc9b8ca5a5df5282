"""Algorithms when a client's answer is lost: what it had told or kept is missing, and nothing else is."""

import copy
import dataclasses
import json

import pytest
import torch
from fake import FakePost, run_over
from toy import ADAM, ALGORITHMS, SYNTHESIS, toy_recipe

from effuse.algorithms.fedphd import FedPhD, Histogram
from effuse.algorithms.localaug import SHARE, LocalAug
from effuse.algorithms.scaffold import ScaffoldUpdate
from effuse.algorithms.shared.synthesis import Upload
from effuse.core.algorithm import job_of
from effuse.core.errors import WireError
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ddim
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.privacy.histogram import Laplace
from effuse.runs.folder import RunFolder
from effuse.transport.flower import server as federation
from effuse.transport.flower.expectation import Expectation
from effuse.transport.flower.terms import Terms
from effuse.transport.state import Snapshots

HASTY = Terms(quorum=1, deadline=0.3)
pytestmark = pytest.mark.usefixtures("slept")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for name in ("POLL", "ROLL_CALL", "KNOCK"):
        monkeypatch.setattr(federation, name, 0.01)


def rounds_of(tmp_path, lost, algorithm, seen=None, **changes):
    """The last checkpoint and the log of a run in which client 1's answers of these numbers are lost."""
    post = FakePost(tmp_path / "sites", 3)

    def fault(client, n, letter):
        if seen is not None:
            seen.append((client, n, letter))
        return None if client == 1 and n in lost else letter

    post.fault = fault
    run_over(post, toy_recipe(algorithm=algorithm, reproducible=True, **changes), tmp_path / "run", HASTY)
    folder = RunFolder(tmp_path / "run")
    return folder.load_checkpoint(), (folder.path / "federation.log").read_text()


def state(tmp_path, ended, client):
    return Snapshots(tmp_path / "sites" / str(client)).read(ended.snapshots.get(client))


def test_scaffolds_variate_moves_by_those_who_answered(tmp_path):
    """c starts at nought and c_i too: with two of three heard, c = 2/3 mean(c_0, c_2) = (c_0 + c_2) / 3."""
    seen: list = []
    ended, _ = rounds_of(tmp_path, {1}, ALGORITHMS["scaffold, adam"], seen, rounds=1)
    dc = {client: decode(letter.body, ScaffoldUpdate).dc for client, _, letter in seen}
    assert (ended.server.c - (dc[0] + dc[2]) / 3).norm() < 1e-6 * ended.server.c.norm()


def test_feddiffuse_meets_a_client_again_whose_first_answer_was_lost(tmp_path):
    """The toy's 97 values are 388 bytes, its decoder 37 or 148. Client 1's first answer is lost, so what it kept is not built on:
    it is sent everything a second time, and the decoder alone in round 3; the others after round 1.
    """
    ended, _ = rounds_of(tmp_path, {1}, ALGORITHMS["feddiffuse, udec"], rounds=3)
    sent = [record.traffic.clients for record in RunFolder(tmp_path / "run").records()]
    assert [[clients[k]["down"] for k in "012"] for clients in sent] == [[388, 388, 388], [148, 388, 148], [148, 148, 148]]
    assert ended.received == {"theta": (0, 1, 2)}


def test_fedphds_edges_count_those_who_answered(tmp_path):
    """Twenty edges, so client 1 is alone at its own: that edge has nothing, and n_e adds up to the images of the others.

    40 images in thirds are 14, 13 and 13."""
    phd = FedPhD(local=ADAM, cohort=None, edges=20, selection="random", variant="none", r_g=2)
    rounds_of(tmp_path, {3}, phd, rounds=2)  # its answers are: enrol, choose, train
    first, second = (r.noted for r in RunFolder(tmp_path / "run").records()[1:])
    assert len(set(first["edges"].values())) == 3
    assert first["n_e"][first["edges"]["1"]] == 0 and sum(first["n_e"]) == 27
    assert sum(second["n_e"]) == 27 + 40


def test_fedphds_edge_counts_those_who_answered_and_not_who_was_sent_there(tmp_path):
    """One edge: client 1 is silent beside the two others, whose 14 and 13 images are behind the edge's model."""
    phd = FedPhD(local=ADAM, cohort=None, edges=1, variant="none", r_g=2)
    rounds_of(tmp_path, {3}, phd, rounds=1)
    noted = RunFolder(tmp_path / "run").records()[1].noted
    assert noted["edges"] == {"0": 0, "1": 0, "2": 0} and noted["n_e"] == [27]


def test_fedphd_hears_a_lost_histogram_with_the_next_choice_and_its_noise_is_drawn_once(tmp_path):
    seen: list = []
    phd = FedPhD(local=ADAM, cohort=None, variant="none", histogram=Laplace(epsilon=1.0), r_g=1)
    ended, log = rounds_of(tmp_path, {1}, phd, seen, rounds=2)
    told = next(decode(letter.body, Histogram) for client, n, letter in seen if (client, n) == (1, 1))
    assert ended.server.told[1] == pytest.approx(told.counts.tolist()) and ended.server.told.keys() == {0, 1, 2}
    assert "rejected" not in log and "1" in RunFolder(tmp_path / "run").records()[1].noted["edges"]


@pytest.mark.parametrize("name", ["fedddpm", "aux only", "localaug"])
def test_who_has_no_warm_up_model_is_not_asked_for_it(name, tmp_path):
    """Client 1's warm-up is lost: A is drawn from the others' models, and client 1 takes part in what follows."""
    ended, log = rounds_of(tmp_path, {1}, ALGORITHMS[name], rounds=3)
    assert set(ended.server.auxiliary.origin.tolist()) == {0, 2}
    assert "round 0, job 'warm_up': going on with 2 of 3; silent: 1" in log and "rejected" not in log


@pytest.mark.parametrize("lost", [{3}, {3, 4}], ids=["once", "twice"])
def test_a_share_that_was_lost_is_sent_with_the_next_model(lost, tmp_path):
    """LocalAug's client 1 does not hear of its share in time (its third answer) and is sent it again until it answers."""
    algorithm = LocalAug(**SYNTHESIS, local=ADAM)
    seen: list = []
    ended, log = rounds_of(tmp_path, lost, algorithm, seen, rounds=3)
    assert ended.received == {"share": (0, 1, 2)}
    share = state(tmp_path, ended, 1)[SHARE]
    assert "rejected" not in log and {client for client, n, _ in seen if n == 6} == {0, 1, 2}
    others = [state(tmp_path, ended, k)[SHARE] for k in (0, 2)]
    dealt = [image for s in (share, *others) for image in s.pixels.flatten(1).tolist()]
    assert sorted(dealt) == sorted(ended.server.auxiliary.pixels.flatten(1).tolist())


def test_an_evaluation_goes_on_without_a_silent_client(tmp_path):
    """Eight samples wanted of three clients are three each; with two heard there are six in the pool, and the protocol says so."""
    changes = {"evaluate": Evaluate(grid=0, metrics=(FID(n=8, encoder=Pixels(side=2)),)), "sampler": Ddim(batch=4, steps=2)}
    ended, log = rounds_of(tmp_path, {2}, ALGORITHMS["localonly"], rounds=1, **changes)
    assert "job 'draw': going on with 2 of 3; silent: 1" in log
    found = json.loads(ended.metrics)
    assert len(found["fid_pixels"]["clients"]) == 2 and found["fid_pixels"]["protocol"]["generated"] == 8
    assert (
        found["fid_pixels_pooled"]["protocol"]["generated"] == 6 and found["fid_pixels_pooled"]["protocol"]["clients"] == 2
    )


WRONG = {  # algorithm, which answer of client 1, its type, what it becomes, why it is refused
    "another network": (
        "fedddpm",
        2,
        Upload,
        lambda sent: dataclasses.replace(sent, model=wider(sent.model)),
        "it brings the networks toy_unet",
    ),
    "no images": ("fedddpm", 2, Upload, lambda sent: changed(sent, size=0), "upload: 0 images cannot be"),
    "images that are not of its number": (
        "fedddpm",
        2,
        Upload,
        lambda sent: changed(sent, histogram=torch.tensor([1, 1])),
        "cannot be [1, 1]",
    ),
    "fewer than none": (
        "fedphd, pruned in the middle",
        1,
        Histogram,
        lambda sent: changed(sent, counts=-sent.counts),
        "are not negative",
    ),
}


def wider(model):
    return dataclasses.replace(model.arch, width=5).initial(Stream(("wide",)))


def changed(sent, **values):
    """A message as no constructor of ours would make it."""
    made = copy.copy(sent)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_meant_is_refused_as_if_it_had_not_come(kind, tmp_path):
    """What `upload` answers with is known from what was kept before; counts are judged when they are read."""
    name, number, hint, spoil, reason = WRONG[kind]
    post = FakePost(tmp_path / "sites", 3)

    def fault(client, n, letter):
        if (client, n) != (1, number):
            return letter
        return letter._replace(body=encode(spoil(decode(letter.body, hint)), hint))

    post.fault = fault
    run_over(post, toy_recipe(algorithm=ALGORITHMS[name], rounds=1, reproducible=True), tmp_path / "run", HASTY)
    log = (tmp_path / "run" / "federation.log").read_text()
    assert any("client 1's answer is rejected" in line and reason in line for line in log.splitlines())


def test_a_histogram_of_another_length_is_refused():
    """Three counts where there are as many classes as the toy has."""
    recipe = toy_recipe(algorithm=ALGORITHMS["fedphd, pruned in the middle"])
    recipe = recipe.resolved(recipe.data.load("train"))
    job = job_of(recipe.algorithm, "enrol")
    expected = Expectation(recipe, 2, print).of(job, job.arguments())
    classes = recipe.model.shape.classes
    expected.check(Histogram(torch.ones(classes)))
    with pytest.raises(WireError, match=rf"a tensor has the shape \({classes + 1},\); expected: \({classes},\)"):
        expected.check(Histogram(torch.ones(classes + 1)))


def test_a_quorum_spares_as_many_of_a_small_job(tmp_path):
    """Three clients, quorum 2: one may be silent, also when only two are asked."""
    post = FakePost(tmp_path / "sites", 3)
    post.fault = lambda client, n, letter: None if client == 1 else letter
    recipe = toy_recipe(rounds=3, algorithm=ALGORITHMS["fedavg, uniform weights and part of the clients"], reproducible=True)
    run_over(post, recipe, tmp_path / "run", Terms(quorum=2, deadline=0.3))
    assert "going on with 1 of 2; silent: 1" in (tmp_path / "run" / "federation.log").read_text()
