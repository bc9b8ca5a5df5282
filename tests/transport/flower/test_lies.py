"""Clients that lie in every field of every job of every algorithm: each is rejected by name, and the run goes on."""

import dataclasses
import functools
import re
import types

import pytest
import torch
from fake import FakeChannel, log_of, run_over
from lies import LyingChannel
from toy import ADAM, ALGORITHMS, ToyImages, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.capabilities import Personal
from effuse.core.errors import WireError
from effuse.core.recipe import Evaluate
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ddim
from effuse.metrics.accuracy import Accuracy
from effuse.models.resnet import Cnn
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.transport.flower import superlink
from effuse.transport.flower.bounds import most_images, refuse_lies
from effuse.transport.flower.messages import REFUSAL, Lost, reason_of
from effuse.transport.flower.terms import Terms

pytestmark = pytest.mark.usefixtures("slept", "impatient")
HONEST, LIARS = 2, 260  # more liars than there are lies about any answer
NETWORKED = [name for name in ALGORITHMS if name != "centralised"]  # which no network has
FIRST = {ALGORITHMS[name].name: name for name in reversed(NETWORKED)}.values()  # one for each algorithm
BATCH_NORM = {
    "model": Cnn(widths=(4,), norm="batch"),
    "task": Classify(),
    "sampler": None,
    "evaluate": Evaluate(grid=0, metrics=(Accuracy(),)),
}
# what says nothing that an honest client could not have said, or changes nothing
HARMLESS = re.compile(
    r"""reply\.(loss|contrast|score|held|objective)\ =\ '(-1|0|1|0\.5|None)'  # any finite number of a usual size, or none
    |reply\.weight\ =\ '0\.5'
    |reply\.[\w.]+(\[0\])?\ =\ '0'                            # the number of the first tensor, as it was
    |reply\.[\w.]*buffers(\[0\]\ =|\ is\ backwards|\ with).*  # of a network that has none
    |no\ tensors                                              # where the reply has none
    |kind\ 'undeliver'                                        # as if the connection had failed
    """,
    re.VERBOSE,
)


def run_with_liars(tmp_path, algorithm, **changes):
    """The run, its lies that were accepted, and its log."""
    if hasattr(algorithm, "cohort"):
        algorithm = dataclasses.replace(algorithm, cohort=None)
    if hasattr(algorithm, "group"):
        algorithm = dataclasses.replace(algorithm, group=HONEST + LIARS)
    if isinstance(algorithm, Personal):  # its clients are asked to draw images, too
        changes |= {"evaluate": Evaluate(grid=2), "sampler": Ddim(batch=2, steps=2)}
    clients, data = HONEST + LIARS, ToyImages(n=4 * (HONEST + LIARS))
    recipe = toy_recipe(**{"algorithm": algorithm, "clients": clients, "data": data, "reproducible": True} | changes)
    channel = LyingChannel(tmp_path / "sites", HONEST, LIARS)
    result = run_over(channel, recipe, tmp_path / "run", Terms(quorum=1, deadline=0.3))
    log = log_of(tmp_path / "run")
    rejected = {
        (f"{job} {int(t) - 1}", int(client))  # sentences count rounds from one
        for t, job, client in re.findall(r"round (-?\d+), job '(\w+)': client (\d+)'s answer is rejected: \S", log)
    }
    assert len(rejected) > LIARS / 2
    return result, {lie for key, lie in channel.told.items() if key not in rejected}, log


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.slow("a variant of an algorithm that is tested"))
        for name in NETWORKED
    ],
)
def test_a_lie_costs_its_teller_an_answer_and_nobody_else(name, tmp_path):
    """Two honest clients and 260 liars, each with another lie in every answer: the run ends with a finite model.

    Lies that are accepted are those that an honest client could have told. No honest client is ever rejected.
    """
    result, accepted, log = run_with_liars(tmp_path, ALGORITHMS[name])
    assert result.rounds == 2 and not re.search("client [01]'s answer is rejected", log)
    assert [lie for lie in sorted(accepted) if not HARMLESS.fullmatch(lie)] == []
    assert RunFolder(tmp_path / "run").load_checkpoint().server.model.params.finite()


def test_buffers_of_another_type_are_rejected(tmp_path):
    """BatchNorm's running means as float64, and its counter as a float: neither is what the job answers with."""
    result, accepted, log = run_with_liars(tmp_path, FedAvg(local=ADAM), **BATCH_NORM)
    assert result.rounds == 2 and "is of torch.float64, not torch.float32" in log
    assert not {lie for lie in accepted if " as torch" in lie or " full of " in lie}


def test_a_claim_of_images_is_bounded():
    """By the operator's number; without one by 100,000, or twice what the server's own data has."""
    assert (most_images(500, 10**6), most_images(None, 0), most_images(None, 70_000)) == (500, 100_000, 140_000)
    upload = ALGORITHMS["class means"].jobs["tell"].returns
    refuse_lies(upload(torch.zeros(2, 1), torch.tensor([250.0, 250.0])), 500)
    with pytest.raises(WireError, match="'counts' claims 501 images; a client may have 500"):
        refuse_lies(upload(torch.zeros(2, 1), torch.tensor([250.0, 251.0])), 500)


def test_uniform_weights_are_uniform(tmp_path):
    """Where a weight is the same for one and for a thousand images, no other weight is believed."""
    channel = FakeChannel(tmp_path / "sites", 3)
    algorithm = FedAvg(local=ADAM, weights="uniform")
    job = algorithm.jobs["train"]

    def fault(client, n, packet):
        if client != 1:
            return packet
        return packet._replace(body=encode(dataclasses.replace(decode(packet.body, job.returns), weight=7.0), job.returns))

    channel.fault = fault
    run_over(channel, toy_recipe(algorithm=algorithm), tmp_path / "run", Terms(quorum=2, deadline=0.3))
    assert "client 1's answer is rejected: its weight is 7.0; weights must be 1 here" in log_of(tmp_path / "run")


@pytest.mark.parametrize("error", [ValueError("parts do not fit"), KeyError("head"), AssertionError()], ids=repr)
def test_parts_that_do_not_fit_together_are_a_refusal(error, monkeypatch):
    """Flower checks the hash of every part, and raises errors of its own on what they make together."""

    def broken(*arguments):
        raise error

    monkeypatch.setattr(superlink, "pull", broken)
    proto = types.SimpleNamespace(metadata=types.SimpleNamespace(reply_to_message_id="7"))
    pulled = types.SimpleNamespace(messages_list=[proto], message_object_trees=[None])
    channel = types.SimpleNamespace(
        _call=lambda call: call(),
        _run=0,
        limit=None,
        _endpoint=types.SimpleNamespace(client=types.SimpleNamespace(PullMessages=lambda request: pulled)),
    )
    channel._collected = functools.partial(superlink.SuperLink._collected, channel)
    ((ticket, packet),) = superlink.SuperLink.collect(channel, ["7"], 1.0)
    assert ticket == "7" and packet.kind == REFUSAL
    assert reason_of(packet).startswith(f"its upload cannot be read ({type(error).__name__}")


def test_a_lost_connection_is_no_refusal(monkeypatch):
    def lost(call):
        raise Lost("gone")

    channel = types.SimpleNamespace(_call=lost, _endpoint=None)
    channel._collected = functools.partial(superlink.SuperLink._collected, channel)
    with pytest.raises(Lost):
        list(superlink.SuperLink.collect(channel, ["7"], 1.0))
