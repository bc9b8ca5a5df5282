"""Algorithms when a client's answer is lost: its content and its new state are missing, and nothing else."""

import copy
import dataclasses
import json

import pytest
import torch
from fake import FakeChannel, run_over
from toy import ADAM, ALGORITHMS, SYNTHESIS, toy_recipe

from effuse.algorithms.fedcda import FedCDA
from effuse.algorithms.feddisco import FedDisco, Told
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.localaug import SHARE, LocalAug
from effuse.algorithms.scaffold import ScaffoldUpdate
from effuse.algorithms.shared.labels import Histogram
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
from effuse.transport.flower.expectation import Expectation
from effuse.transport.flower.terms import Terms
from effuse.transport.state import Snapshots

ONE_OF_THREE = Terms(quorum=1, deadline=0.3)
pytestmark = pytest.mark.usefixtures("slept", "impatient")


def run_losing(tmp_path, lost, algorithm, answers=None, **changes):
    """The last checkpoint and the log of a run in which client 1's answers of these numbers are lost."""
    channel = FakeChannel(tmp_path / "sites", 3)

    def fault(client, n, packet):
        if answers is not None:
            answers.append((client, n, packet))
        return None if client == 1 and n in lost else packet

    channel.fault = fault
    run_over(channel, toy_recipe(algorithm=algorithm, reproducible=True, **changes), tmp_path / "run", ONE_OF_THREE)
    folder = RunFolder(tmp_path / "run")
    return folder.load_checkpoint(), (folder.path / "federation.log").read_text()


def state(tmp_path, ended, client):
    return Snapshots(tmp_path / "sites" / str(client)).read(ended.snapshots.get(client))


def test_scaffolds_variate_moves_by_the_clients_that_answered(tmp_path):
    """c and all c_i start at zero: with answers of two of three, c = 2/3 mean(c_0, c_2) = (c_0 + c_2) / 3."""
    answers: list = []
    ended, _ = run_losing(tmp_path, {1}, ALGORITHMS["scaffold, adam"], answers, rounds=1)
    dc = {client: decode(packet.body, ScaffoldUpdate).dc for client, _, packet in answers}
    assert (ended.server.c - (dc[0] + dc[2]) / 3).norm() < 1e-6 * ended.server.c.norm()


def test_feddiffuse_sends_a_client_everything_until_its_answer_is_accepted(tmp_path):
    """The toy's 97 values are 388 bytes, the 37 of its decoder 148.

    Client 1's first answer is lost: it is sent everything twice, and only the decoder in round 3, the others after round 1.
    """
    ended, _ = run_losing(tmp_path, {1}, ALGORITHMS["feddiffuse, udec"], rounds=3)
    records = RunFolder(tmp_path / "run").records()
    assert [record.silent for record in records] == [[1], None, None]
    assert [[*record.clients] for record in records] == [["0", "2"], ["0", "1", "2"], ["0", "1", "2"]]
    assert all(own.loss > 0 and own.seconds >= 0 for record in records for own in record.clients.values())
    sent = [record.traffic.clients for record in records]
    assert [[clients[k]["down"] for k in "012"] for clients in sent] == [[388, 388, 388], [148, 388, 148], [148, 148, 148]]
    assert ended.received == {"theta": (0, 1, 2)}


def test_fedphds_edges_count_the_clients_that_answered(tmp_path):
    """40 images for three clients are 14, 13 and 13. With twenty edges, client 1 is alone at one.

    That edge counts no images, and n_e adds up to those of the other two.
    """
    phd = FedPhD(local=ADAM, cohort=None, edges=20, selection="random", variant="none", r_g=2)
    run_losing(tmp_path, {3}, phd, rounds=2)  # its answers are: enrol, choose, train
    first, second = (r.noted for r in RunFolder(tmp_path / "run").records()[1:])
    assert len(set(first["edges"].values())) == 3
    assert first["n_e"][first["edges"]["1"]] == 0 and sum(first["n_e"]) == 27
    assert sum(second["n_e"]) == 27 + 40


def test_fedphds_edge_does_not_count_a_silent_client(tmp_path):
    """One edge for all: client 1 is silent, and the edge's model is of the others' 14 and 13 images."""
    phd = FedPhD(local=ADAM, cohort=None, edges=1, variant="none", r_g=2)
    run_losing(tmp_path, {3}, phd, rounds=1)
    noted = RunFolder(tmp_path / "run").records()[1].noted
    assert noted["edges"] == {"0": 0, "1": 0, "2": 0} and noted["n_e"] == [27]


def test_a_lost_histogram_comes_with_the_next_choice_and_the_same_noise(tmp_path):
    answers: list = []
    phd = FedPhD(local=ADAM, cohort=None, variant="none", histogram=Laplace(epsilon=1.0), r_g=1)
    ended, log = run_losing(tmp_path, {1}, phd, answers, rounds=2)
    lost = next(decode(packet.body, Histogram) for client, n, packet in answers if (client, n) == (1, 1))
    assert ended.server.histograms[1] == pytest.approx(lost.counts.tolist()) and ended.server.histograms.keys() == {0, 1, 2}
    assert "rejected" not in log and "1" in RunFolder(tmp_path / "run").records()[1].noted["edges"]


def test_a_lost_histogram_is_told_in_the_next_round_with_the_same_noise(tmp_path):
    """Client 1 does not train in the round whose first answer is lost. Then all three are asked again, and no more."""
    answers: list = []
    disco = FedDisco(local=ADAM, histogram=Laplace(epsilon=1.0))
    ended, log = run_losing(tmp_path, {1}, disco, answers, rounds=3)
    told = {n: decode(packet.body, Told).counts.tolist() for client, n, packet in answers if client == 1 and n < 3}
    assert told[1] == told[2] == pytest.approx(list(ended.server.members[1].counts))
    noted = [record.noted["weights"] for record in RunFolder(tmp_path / "run").records()]
    assert [sorted(each) for each in noted] == [["0", "2"], ["0", "1", "2"], ["0", "1", "2"]]
    assert [n for client, n, _ in answers if client == 0] == [1, 2, 3, 4, 5] and "rejected" not in log


def test_fedcda_keeps_the_last_choice_of_a_silent_client(tmp_path):
    """Client 1's second answer is lost: its first model stays in the cache and in the mean."""
    ended, log = run_losing(tmp_path, {2}, FedCDA(local=ADAM, warmup=1), rounds=2)
    assert [c.client for c in ended.server.cache] == [0, 0, 1, 2, 2] and ended.server.chosen[1] == 2
    assert "rejected" not in log


@pytest.mark.parametrize("name", ["fedddpm", "aux only", "localaug"])
def test_a_client_without_a_warm_up_model_is_not_asked_for_one(name, tmp_path):
    """Client 1's warm-up is lost: A is drawn from the others' models, and client 1 takes part in later rounds."""
    ended, log = run_losing(tmp_path, {1}, ALGORITHMS[name], rounds=3)
    assert set(ended.server.auxiliary.origin.tolist()) == {0, 2}
    assert "round 1, job 'warm_up': continuing with 2 of 3; silent: 1" in log and "rejected" not in log


@pytest.mark.parametrize("lost", [{3}, {3, 4}], ids=["once", "twice"])
def test_a_share_that_was_lost_is_sent_with_the_next_model(lost, tmp_path):
    """The answer of LocalAug's client 1 to its share, its third, is lost; it is sent the share until it answers."""
    algorithm = LocalAug(**SYNTHESIS, local=ADAM)
    answers: list = []
    ended, log = run_losing(tmp_path, lost, algorithm, answers, rounds=3)
    assert ended.received == {"share": (0, 1, 2)}
    share = state(tmp_path, ended, 1)[SHARE]
    assert "rejected" not in log and {client for client, n, _ in answers if n == 6} == {0, 1, 2}
    others = [state(tmp_path, ended, k)[SHARE] for k in (0, 2)]
    dealt = [image for s in (share, *others) for image in s.pixels.flatten(1).tolist()]
    assert sorted(dealt) == sorted(ended.server.auxiliary.pixels.flatten(1).tolist())


def test_an_evaluation_goes_on_without_a_silent_client(tmp_path):
    """Eight samples of three clients are three each; with two answers the pool has six, and the protocol says so."""
    changes = {"evaluate": Evaluate(grid=0, metrics=(FID(n=8, encoder=Pixels(side=2)),)), "sampler": Ddim(batch=4, steps=2)}
    ended, log = run_losing(tmp_path, {2}, ALGORITHMS["localonly"], rounds=1, **changes)
    assert "job 'draw': continuing with 2 of 3; silent: 1" in log
    metrics = json.loads(ended.metrics)
    own, pooled = metrics["fid_pixels"], metrics["fid_pixels_pooled"]
    assert len(own["clients"]) == 2 and own["protocol"]["generated"] == 8
    assert pooled["protocol"]["generated"] == 6 and pooled["protocol"]["clients"] == 2


def wider(model):
    return dataclasses.replace(model.arch, width=5).initial(Stream(("wide",)))


def changed(message, **values):
    """A message that its constructor would refuse."""
    result = copy.copy(message)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


UPLOAD, HISTOGRAM = ("fedddpm", 2, Upload), ("fedphd, pruned in the middle", 1, Histogram)
WRONG = {  # (algorithm, which answer of client 1, its type), how it is changed, why it is rejected
    "another network": (UPLOAD, lambda u: dataclasses.replace(u, model=wider(u.model)), "its networks are toy_unet"),
    "no images": (UPLOAD, lambda u: changed(u, size=0), "upload: 0 images cannot be"),
    "counts of other images": (UPLOAD, lambda u: changed(u, histogram=torch.tensor([1, 1])), "cannot be [1, 1]"),
    "negative counts": (HISTOGRAM, lambda h: changed(h, counts=-h.counts), "are not negative"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_impossible_answer_is_rejected(kind, tmp_path):
    """The shapes of `upload` are known from the state of the job before it; counts are checked when they are read."""
    (name, number, hint), change, reason = WRONG[kind]
    channel = FakeChannel(tmp_path / "sites", 3)

    def fault(client, n, packet):
        if (client, n) != (1, number):
            return packet
        return packet._replace(body=encode(change(decode(packet.body, hint)), hint))

    channel.fault = fault
    run_over(channel, toy_recipe(algorithm=ALGORITHMS[name], rounds=1, reproducible=True), tmp_path / "run", ONE_OF_THREE)
    log = (tmp_path / "run" / "federation.log").read_text()
    assert any("client 1's answer is rejected" in line and reason in line for line in log.splitlines())


def test_a_histogram_of_another_length_is_refused():
    """One count more than the toy has classes."""
    recipe = toy_recipe(algorithm=ALGORITHMS["fedphd, pruned in the middle"])
    recipe = recipe.resolved(recipe.data.load("train"))
    job = job_of(recipe.algorithm, "enrol")
    expected = Expectation(recipe, 2, print).of(job, job.arguments())
    classes = recipe.model.shape.classes
    expected.check(Histogram(torch.ones(classes)))
    with pytest.raises(
        WireError, match=rf"the tensor at 'reply.counts' has the shape \({classes + 1},\), not \({classes},\)"
    ):
        expected.check(Histogram(torch.ones(classes + 1)))


def test_as_many_clients_may_be_silent_in_a_small_cohort(tmp_path):
    """Three clients, quorum 2: one may be silent, also when only two are asked."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 else packet
    recipe = toy_recipe(rounds=3, algorithm=ALGORITHMS["fedavg, uniform weights and part of the clients"], reproducible=True)
    run_over(channel, recipe, tmp_path / "run", Terms(quorum=2, deadline=0.3))
    assert "continuing with 1 of 2; silent: 1" in (tmp_path / "run" / "federation.log").read_text()


def test_feddifrc_sends_its_guide_again_where_the_answer_is_lost(tmp_path):
    """Client 1's moments and its first training are lost: it has told and kept nothing, and looks in the second round."""
    ended, _ = run_losing(tmp_path, {1, 2}, ALGORITHMS["feddifrc, principal axes of an untrained guide"], rounds=2)
    assert ended.received == {"guide": (0, 1, 2), "basis": (0, 1, 2)}
    assert [state(tmp_path, ended, k)["seen"].at for k in range(3)] == [0, 1, 0]
    assert {*state(tmp_path, ended, 1)} == {"seen"}


def test_fedema_takes_the_global_network_after_a_lost_answer(tmp_path):
    """Client 1's second answer is lost, and with it the state of that round: in the third it counts as having missed it."""
    ended, _ = run_losing(tmp_path, {2}, ALGORITHMS["fedema"], rounds=2)
    kept = [state(tmp_path, ended, k)["last"] for k in range(3)]
    assert [last.at for last in kept] == [1, 0, 1]
    ended, _ = run_losing(tmp_path / "longer", {2}, ALGORITHMS["fedema"], rounds=3)
    later = state(tmp_path / "longer", ended, 1)["last"]
    assert later.at == 2 and later.scale == kept[1].scale, "lambda stays that of its first round"


def test_feddda_sends_a_share_again_where_the_answer_is_lost(tmp_path):
    """Client 1's first answer is lost: it is sent the same eight images in the next round."""
    ended, _ = run_losing(tmp_path, {1}, dataclasses.replace(ALGORITHMS["feddda"], cohort=None), rounds=2)
    assert ended.received == {"share": (0, 1, 2)}
    sent = [record.traffic.clients["1"]["down"] for record in RunFolder(tmp_path / "run").records()[3:]]
    assert sent[0] == sent[1] > 8 * 16
