"""How sites enrol: restarts, lost connections, keys of other clients, and clients that are shut out."""

import re

import pytest
from fake import TWO_OF_THREE, FakeChannel, log_of, run_over
from toy import ADAM, SYNTHESIS, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedddpm import FedDDPM
from effuse.core.errors import QuorumError
from effuse.core.wire import decode
from effuse.runs import driver
from effuse.transport.flower.messages import INVITATION, UNDELIVERED, Invitation, Packet
from effuse.transport.flower.terms import Terms

pytestmark = pytest.mark.usefixtures("slept", "impatient")


def test_a_site_that_is_started_again_is_sent_its_order_again(tmp_path):
    """Client 1 is killed during its job in round 1 and restarts with its state; nothing is lost."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)

    def fault(client, n, packet):
        if client == 1 and n == 2:
            channel.restart(1)
            return None
        return packet

    channel.fault = fault
    result = run_over(channel, recipe, tmp_path / "run", Terms(deadline=5))
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256
    assert "client 1 is connected again" in log_of(tmp_path / "run")


def test_a_disconnected_site_is_sent_its_order_again(tmp_path):
    """The transport reports that client 1's order of round 1 was not delivered; the site reconnects and gets it again."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: Packet(UNDELIVERED) if client == 1 and n == 2 else packet
    result = run_over(channel, recipe, tmp_path / "run", Terms(deadline=5))
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256
    assert "client 1 is disconnected" in log_of(tmp_path / "run")


def test_a_key_is_bound_to_its_client(tmp_path):
    """Node 101 holds client 2's key and claims to be client 1: it is refused, and the run starts without client 1."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.owners = {100: 0, 101: 2, 102: 2}
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", TWO_OF_THREE)
    log = log_of(tmp_path / "run")
    assert "claims to be client 1, but it holds the key of client 2" in log
    assert "starting without clients 1" in log and 1 not in channel.orders
    assert channel.refused == {1: "it claims to be client 1, but it holds the key of client 2"}, "the site is told, too"


@pytest.mark.parametrize("owners", [None, {100: 0, 101: 1, 102: 2}])
def test_terms_name_the_client_whose_key_the_node_holds(owners, tmp_path):
    """A dry run does not enrol; by the terms it notices that it uses another client's key."""
    channel, named = FakeChannel(tmp_path / "sites", 3), {}
    channel.owners, send = owners, channel.send

    def recording(node, packet, life):
        if packet.kind == INVITATION:
            named[node] = decode(packet.head, Invitation).owner
        return send(node, packet, life)

    channel.send = recording
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", TWO_OF_THREE)
    assert named == (owners or dict.fromkeys((100, 101, 102)))


def test_a_site_that_declines_is_reported_with_its_reason(tmp_path):
    """Site 1 has agreed to another manifest: it declines, and the run starts without it."""
    run_over(FakeChannel(tmp_path / "sites", 3), toy_recipe(rounds=1), tmp_path / "first")
    for client in (0, 2):
        (tmp_path / "sites" / str(client) / "manifest.json").unlink()
    run_over(FakeChannel(tmp_path / "sites", 3), toy_recipe(rounds=1, seed=1), tmp_path / "second", TWO_OF_THREE)
    assert re.search("declines: client 1 has agreed to the manifest [0-9a-f]{12} and not to", log_of(tmp_path / "second"))


def test_a_client_that_is_shut_out_is_neither_asked_nor_waited_for(tmp_path):
    """The weights are those of a run in which client 1 is silent, but the server never waits for it."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    silent = FakeChannel(tmp_path / "silent", 3)
    silent.fault = lambda client, n, packet: None if client == 1 else packet
    expected = run_over(silent, recipe, tmp_path / "expected", TWO_OF_THREE)
    channel = FakeChannel(tmp_path / "sites", 3)
    del channel.sites[101]
    result = run_over(channel, recipe, tmp_path / "run", TWO_OF_THREE._replace(shut_out=frozenset({1})))
    assert result.weights_sha256 == expected.weights_sha256 and channel.orders == [0, 2] * 3
    log = log_of(tmp_path / "run")
    assert "waiting for 2 clients" in log and "shut out, because they have no key: 1" in log
    assert "starting without" not in log and "silent" not in log


def test_a_client_that_is_shut_out_is_not_drawn_and_counts_against_the_quorum(tmp_path):
    """Cohorts of one client, and a warm-up group of client 1 alone; then a quorum of two, of which client 2 is silent."""
    terms = TWO_OF_THREE._replace(shut_out=frozenset({1}))
    for name, algorithm in (
        ("one", FedAvg(local=ADAM, cohort=1)),
        ("group", FedDDPM(**SYNTHESIS | {"group": 1}, local=ADAM, central=ADAM)),
    ):
        channel = FakeChannel(tmp_path / name, 3)
        del channel.sites[101]
        recipe = toy_recipe(rounds=6, reproducible=True, algorithm=algorithm)
        result = run_over(channel, recipe, tmp_path / f"run-{name}", terms)
        assert result.rounds == 6 and {*channel.orders} == {0, 2}
    channel = FakeChannel(tmp_path / "silent", 3)
    del channel.sites[101]
    channel.fault = lambda client, n, packet: None if client == 2 else packet
    with pytest.raises(QuorumError, match=r"1 of 2 answered, but 2 must; silent: 2; lower the quorum"):
        run_over(channel, toy_recipe(reproducible=True), tmp_path / "run-silent", terms)
