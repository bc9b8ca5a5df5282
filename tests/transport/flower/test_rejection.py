"""Answers that the server must not use: wrong, unreadable or late ones are discarded, and the round continues."""

import dataclasses
import re

import pytest
import torch
from fake import TWO_OF_THREE, FakeChannel, log_of, nan, over, run_over
from toy import ADAM, ALGORITHMS, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import Update
from effuse.core.params import Params
from effuse.core.recipe import Evaluate
from effuse.core.rng import stream
from effuse.core.wire import decode, encode
from effuse.core.workbench import SERVER
from effuse.diffusion.samplers import Ancestral
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.transport.flower.messages import Packet
from effuse.transport.worker import Receipt

pytestmark = pytest.mark.usefixtures("slept", "impatient")


def in_second_answer(change):
    """A fault that changes client 1's second answer."""

    def fault(client, n, packet):
        return change(packet) if client == 1 and n == 2 else packet

    return fault


def in_update(change):
    """An answer whose update is changed."""

    def changed(packet):
        update = decode(packet.body, Update)
        return packet._replace(body=encode(change(update), Update))

    return changed


def in_params(change):
    """An answer whose model has changed parameters."""

    def changed(update):
        params = Params(change(dict(update.model.params)))
        return dataclasses.replace(update, model=dataclasses.replace(update.model, params=params))

    return in_update(changed)


def wider(update):
    arch = dataclasses.replace(update.model.arch, width=5)
    return dataclasses.replace(update, model=dataclasses.replace(update.model, arch=arch))


def in_receipt(**changes):
    """The answer with another head."""

    def change(packet):
        return packet._replace(head=encode(dataclasses.replace(decode(packet.head, Receipt), **changes), Receipt))

    return change


BAD = {  # the answer, and why it is rejected
    "nan": (nan, "non-finite number"),
    "wrong shape": (in_params(lambda p: p | {"up.bias": torch.zeros(7)}), r"'up\.bias' has the shape \(7,\), not \(1,\)"),
    "missing key": (in_params(lambda p: {k: v for k, v in p.items() if k != "up.bias"}), r"'up\.bias' is missing"),
    "extra key": (in_params(lambda p: p | {"extra": torch.zeros(1)}), "'extra' is unexpected"),
    "another network": (in_update(wider), "its networks are toy_unet"),
    "no weight": (
        in_update(lambda u: dataclasses.replace(u, weight=-1.0)),
        r"its weight is -1\.0; weights must be positive",
    ),
    "no data set's weight": (
        in_update(lambda u: dataclasses.replace(u, weight=1e300)),
        r"its weight is 1e\+300; weights must",
    ),
    "a loss beyond numbers": (in_update(lambda u: dataclasses.replace(u, loss=1e300)), r"its loss is 1e\+300; a loss must"),
    "unknown type": (lambda packet: packet._replace(kind="gossip"), "unknown type 'gossip'"),
    "another message": (
        lambda packet: packet._replace(body=encode(Receipt(1, 1, 0, None), Receipt)),
        "is not a fedavg.update",
    ),
    "no message": (lambda packet: packet._replace(body=b"\x00" * 50), "cannot be read"),
    "too many bytes": (lambda packet: packet._replace(body=packet.body + b"\x00" * 2_000_000), r"is over its limit of \d+"),
    "another's name": (in_receipt(client=0), "its receipt names client 0"),
    "another round": (in_receipt(t=0), "its receipt names call 0 of round 1, another order"),
    "another call": (in_receipt(call=1), "its receipt names call 1 of round 2, another order"),
    "no receipt": (lambda packet: packet._replace(head=b"junk"), "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_rejected_with_a_reason_and_the_round_continues(kind, tmp_path):
    """The weights are those of a run in which client 1 is silent in round 1. Its bytes are counted as discarded."""
    change, reason = BAD[kind]
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    digests, sizes = [], []

    def changed(packet):
        sizes.append((made := change(packet)).size)
        return made

    for name, fault in (("bad", in_second_answer(changed)), ("silent", in_second_answer(lambda packet: None))):
        channel = FakeChannel(tmp_path / name / "sites", 3)
        channel.fault = fault
        digests.append(run_over(channel, recipe, tmp_path / name / "run", TWO_OF_THREE).weights_sha256)
    assert digests[0] == digests[1]
    discarded = [record.traffic.discarded for record in RunFolder(tmp_path / "bad" / "run").records()]
    assert discarded == [None, {"messages": 1, "wire_bytes": sizes[0]}, None]
    assert re.search(f"round 2, job 'train': client 1's answer is rejected: .*{reason}", log_of(tmp_path / "bad" / "run"))
    undisturbed = driver.run(recipe, tmp_path / "undisturbed").weights_sha256
    assert undisturbed != digests[0]


def test_a_client_that_claims_another_state_while_being_evaluated_is_left_out(tmp_path):
    """LocalOnly's clients are evaluated after the last round; client 1's receipt names a snapshot that it cannot have."""
    evaluation = {"evaluate": Evaluate(grid=2), "sampler": Ancestral(batch=2)}
    recipe = toy_recipe(algorithm=ALGORITHMS["localonly"], rounds=1, reproducible=True, **evaluation)
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = in_second_answer(in_receipt(snapshot="9_9"))
    run_over(channel, recipe, tmp_path / "run", TWO_OF_THREE)
    assert "job 'draw': client 1's answer is rejected: the client changed its state" in log_of(tmp_path / "run")


def test_a_late_answer_is_discarded_and_its_clients_state_rolls_back(tmp_path):
    """Client 1's answer of round 1 comes during round 2: it is not used, and client 1 goes on from its state of round 0."""
    recipe = toy_recipe(rounds=4, reproducible=True, algorithm=ToyStateful(local=ADAM))
    results, sizes, came = {}, {}, []
    for name in ("late", "never"):
        channel = FakeChannel(tmp_path / name / "sites", 3)
        late: list[Packet] = []

        def fault(client, n, packet, channel=channel, late=late, name=name):
            if client == 1 and n == 2:
                late.append(packet)
                return None
            if late and name == "late" and channel.fed._late:  # an answer of the next round
                came.append(late[0].size)
                channel.held.append((next(iter(channel.fed._late)), late.pop()))
            return packet

        channel.fault = fault

        def engine(context, channel=channel):
            channel.fed = over(channel, TWO_OF_THREE)(context)
            return channel.fed

        results[name] = driver.run(recipe, tmp_path / name / "run", served=engine)
        snapshots = {p.stem for p in (tmp_path / name / "sites" / "1").glob("*.state")}
        assert "3_0" in snapshots and "1_0" not in snapshots
        sizes[name] = [record.traffic.discarded for record in RunFolder(tmp_path / name / "run").records()]
    assert sizes["never"] == [None] * 4 and results["never"].traffic.discarded is None
    assert [d for d in sizes["late"] if d] == [results["late"].traffic.discarded] == [{"messages": 1, "wire_bytes": came[0]}]
    assert results["late"].weights_sha256 == results["never"].weights_sha256
    report = "client 1's answer to round 2, job 'train' came after the deadline and is discarded"
    assert report in log_of(tmp_path / "late" / "run")


def test_the_operator_sees_who_is_odd(tmp_path):
    """Client 1 of four sends its update backwards, a thousand times as long: the log names it, the line has its numbers."""
    channel = FakeChannel(tmp_path / "sites", 4)
    recipe = toy_recipe(clients=4, rounds=1, reproducible=True)

    def reversed_and_long(update):
        start = recipe.resolved(recipe.data.load("train")).model.initial(stream(0, -1, "model", 0, SERVER, "initial"))
        params = start.params - 1000.0 * (update.model.params - start.params)
        return dataclasses.replace(update, model=update.model.holding(params))

    channel.fault = lambda client, n, packet: in_update(reversed_and_long)(packet) if client == 1 else packet
    run_over(channel, recipe, tmp_path / "run")
    (record,) = RunFolder(tmp_path / "run").records()
    norms = {client: seen["norm"] for client, seen in record.updates.items()}
    assert norms["1"] > 100 * max(norms[k] for k in "023") and record.updates["1"]["cosine"] < 0
    assert record.updates["0"]["weight"] == 10 and record.updates["0"]["loss"] > 0
    log = log_of(tmp_path / "run")
    assert re.search(r"round 1, job 'train': look at client 1: its norm is \S+ times the median and its update points", log)
    assert "look at client 0" not in log and "client 2: weight 10, loss" in log
