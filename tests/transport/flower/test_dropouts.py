"""Clients that come late, answer late, stay silent or leave: every run ends, in the weights of those that answered."""

import dataclasses

import pytest
from fake import FakeChannel, log_of, run_over
from toy import ADAM, ALGORITHMS, ToyStateful, toy_recipe

from effuse.core.wire import decode
from effuse.runs.folder import RunFolder
from effuse.transport.flower.terms import Terms
from effuse.transport.worker import Receipt

HALF = Terms(quorum=2, deadline=0.3)
pytestmark = pytest.mark.usefixtures("slept", "impatient")
NAMES = [
    "fedavg",
    "moon",
    "scaffold, adam",
    "mofedsam, adam",
    "feddiffuse, udec",
    "fedphd, never pruned, an edge fails",
    "fedddpm",
    "localaug",
    "ensemble",
    "feddifrc, principal axes of an untrained guide",
    "client state",
    "sent once",
]

ALONE = {"fedddpm": 4, "localaug": 4}  # before this round they ask clients alone, who must answer


def recipe_of(**changes):
    values = {"algorithm": ToyStateful(local=ADAM), "clients": 4, "rounds": 4, "reproducible": True}
    return toy_recipe(**values | changes)


def round_of(packet) -> int:
    return decode(packet.head, Receipt).t


def losing(tmp_path, lost) -> str:
    """The weights of a run in which these (client, round) are lost."""
    channel = FakeChannel(tmp_path / "losing-sites", 4)
    channel.fault = lambda client, n, packet: None if (client, round_of(packet)) in lost else packet
    return run_over(channel, recipe_of(), tmp_path / "losing", HALF).weights_sha256


@pytest.mark.parametrize("name", NAMES)
def test_half_of_a_cohort_is_silent_in_every_round(name, tmp_path):
    """Of clients 0 to 3 the even ones are silent in even rounds, the odd ones in odd rounds; the run ends all the same."""
    channel = FakeChannel(tmp_path / "sites", 4)
    first = ALONE.get(name, 0)
    channel.fault = lambda k, n, packet: None if (t := round_of(packet)) >= first and (k + t) % 2 == 0 else packet
    algorithm = ALGORITHMS[name]
    if getattr(algorithm, "cohort", None) is not None:
        algorithm = dataclasses.replace(algorithm, cohort=None)
    run_over(channel, recipe_of(algorithm=algorithm), tmp_path / "run", Terms(quorum=1, deadline=0.3))
    asked = [set(record.traffic.clients) for record in RunFolder(tmp_path / "run").records()]
    assert set.union(*asked) == {"0", "1", "2", "3"}
    log = log_of(tmp_path / "run")
    assert log.count("silent: ") >= sum(len(clients) == 4 for clients in asked[first:]) > 0 and "rejected" not in log


def test_half_of_a_cohort_counts_for_the_answers_that_came(tmp_path):
    """Each round has two of four answers, and each client's state is that of its last accepted round."""
    channel = FakeChannel(tmp_path / "sites", 4)
    channel.fault = lambda client, n, packet: None if (client + round_of(packet)) % 2 == 0 else packet
    run_over(channel, recipe_of(), tmp_path / "run", HALF)
    assert [r.traffic.messages.up for r in RunFolder(tmp_path / "run").records()] == [2, 2, 2, 2]
    assert RunFolder(tmp_path / "run").load_checkpoint().snapshots == {0: "3_0", 1: "2_0", 2: "3_0", 3: "2_0"}


def test_replies_that_are_always_late_are_always_discarded(tmp_path):
    """Client 1's answer to every round comes when the next one has begun: the weights are those of a run without it."""

    class Late(FakeChannel):
        def collect(self, tickets, patience):
            for ticket, reply in super().collect(tickets, patience):
                if reply.kind == "answer" and reply.head and self.packets_of[ticket] == 101 and ticket not in self.kept:
                    self.kept.add(ticket)
                    self.waiting.append((ticket, reply))
                else:
                    yield ticket, reply

        def send(self, node, packet, life):
            if packet.kind == "order" and node == 100:  # a new round
                self.held += self.waiting
                self.waiting.clear()
            ticket = super().send(node, packet, life)
            self.packets_of[ticket] = node
            return ticket

    channel = Late(tmp_path / "sites", 4)
    channel.packets_of, channel.kept, channel.waiting = {}, set(), []
    result = run_over(channel, recipe_of(), tmp_path / "run", HALF)
    log = log_of(tmp_path / "run")
    assert log.count("came after the deadline and is discarded") == 3 and log.count("silent: 1") == 4
    assert result.weights_sha256 == losing(tmp_path, {(1, t) for t in range(4)})


def test_a_reply_that_comes_twice_counts_once(tmp_path):
    class Twice(FakeChannel):
        def collect(self, tickets, patience):
            for ticket, reply in super().collect(tickets, patience):
                yield ticket, reply
                yield ticket, reply

    twice = run_over(Twice(tmp_path / "sites", 4), recipe_of(), tmp_path / "run", HALF)
    assert twice.weights_sha256 == losing(tmp_path, set())
    assert [r.traffic.messages.up for r in RunFolder(tmp_path / "run").records()] == [4, 4, 4, 4]


@pytest.mark.parametrize("joins", [1, 3])
def test_a_client_that_joins_late_takes_part_from_then_on(joins, tmp_path):
    """Client 2 is not there when the run starts, and joins while the round before `joins` is under way."""
    channel = FakeChannel(tmp_path / "sites", 4)
    channel.leave(2)

    def fault(client, n, packet):
        if client == 3 and round_of(packet) == joins and 102 in channel.away:
            channel.come_back(2)
        return packet

    channel.fault = fault
    result = run_over(channel, recipe_of(), tmp_path / "run", HALF)
    assert "starting without clients 2" in log_of(tmp_path / "run")
    assert result.weights_sha256 == losing(tmp_path, {(2, t) for t in range(joins)})


def test_a_client_that_leaves_for_good_is_left_out(tmp_path, slept):
    """Client 2 goes in round 1. Round 1 waits for its grace; the rounds after it wait for nobody."""
    channel = FakeChannel(tmp_path / "sites", 4)

    def fault(client, n, packet):
        if client == 1 and round_of(packet) == 1:
            channel.leave(2)
        return packet

    channel.fault = fault
    result = run_over(channel, recipe_of(), tmp_path / "run", Terms(quorum=2, deadline=3600.0, grace=5.0))
    assert result.weights_sha256 == losing(tmp_path, {(2, t) for t in (1, 2, 3)})
    assert sum(slept) < 30
