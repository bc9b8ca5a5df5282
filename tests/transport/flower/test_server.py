"""The server's side of a real federation, on a channel without a network: equal bits, quorum, deadline, private files."""

import json
import os
import stat

import pytest
from fake import TWO_OF_THREE, FakeChannel, log_of, nan, over, run_over
from toy import ADAM, ALGORITHMS, SYNTHESIS, ToyStateful, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import Update
from effuse.algorithms.fedddpm import FedDDPM
from effuse.algorithms.fedphd import FedPhD
from effuse.core.errors import FederationError, QuorumError, RunError
from effuse.core.wire import decode
from effuse.models.unet import Unet
from effuse.runs import driver
from effuse.transport.flower import server
from effuse.transport.flower.terms import Terms

pytestmark = pytest.mark.usefixtures("slept", "impatient")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_simulators_bits(name, tmp_path):
    """And each of its jobs can be done on shapes, so that every reply is checked against the shapes it must have."""
    recipe = toy_recipe(algorithm=ALGORITHMS[name], rounds=3, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    if isinstance(recipe.algorithm, Centralised):
        with pytest.raises(FederationError, match="all data in one place, which a real federation never has"):
            run_over(channel, recipe, tmp_path / "flower")
        return
    a, b = driver.run(recipe, tmp_path / "simulator"), run_over(channel, recipe, tmp_path / "flower")
    assert a.weights_sha256 == b.weights_sha256
    assert a.traffic.bytes == b.traffic.bytes and a.traffic.parameters == b.traffic.parameters
    assert "cannot be done on shapes" not in log_of(tmp_path / "flower")


# of three replies, these reducers need all
NEED_ALL = {
    "fedavg, krum": r"krum\(f=0\) needs 2 f \+ 3 = 3 replies, not 2; lower f",
    "scaffold, trimmed means": r"trimmed\(share=0.3\) drops 1 of 2 replies at either end, which leaves none",
}
# a client that is asked alone must answer, too
ALONE = {name for name, algorithm in ALGORITHMS.items() if getattr(algorithm, "group", 2) == 1}
SPARING = [name for name in ALGORITHMS if name not in {"centralised", *NEED_ALL, *ALONE}]


@pytest.mark.parametrize("name", SPARING)
def test_every_algorithm_goes_on_without_a_silent_client(name, tmp_path):
    """Client 1's first two answers are lost: their rounds use the others' answers, and the run ends."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n <= 2 else packet
    recipe = toy_recipe(algorithm=ALGORITHMS[name], rounds=4, reproducible=True)
    result = run_over(channel, recipe, tmp_path / "run", Terms(quorum=1, deadline=0.2))
    assert result.rounds == 4
    assert "silent: 1" in log_of(tmp_path / "run")


@pytest.mark.parametrize("name", NEED_ALL)
def test_a_reducer_says_how_many_replies_it_needs(name, tmp_path):
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 else packet
    recipe, terms = toy_recipe(algorithm=ALGORITHMS[name]), Terms(quorum=1, deadline=0.2)
    with pytest.raises(FederationError, match=f"round 1, job 'train': {NEED_ALL[name]}"):
        run_over(channel, recipe, tmp_path / "run", terms)


def test_a_mean_is_over_the_clients_that_answered(tmp_path):
    """Three clients of 13 or 14 images: without client 1 the model is exactly the weighted mean of the others' updates."""
    recipe = toy_recipe(rounds=1, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    updates: dict[int, Update] = {}

    def fault(client, n, packet):
        updates[client] = decode(packet.body, Update)
        return None if client == 1 else packet

    channel.fault = fault
    run_over(channel, recipe, tmp_path / "run", TWO_OF_THREE)
    a, b = updates[0], updates[2]
    expected = a.model.params.lerp(b.model.params, b.weight / (a.weight + b.weight))
    saved = driver.RunFolder(tmp_path / "run").load_checkpoint().server.model.params
    assert saved.digest() == expected.digest()


def test_too_few_answers_end_the_run_in_one_sentence(tmp_path):
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client != 0 else packet
    reason = "round 1, job 'train': 1 of 3 answered, but 2 must; silent: 1, 2; lower the quorum or raise the deadline"
    with pytest.raises(QuorumError, match=reason):
        run_over(channel, toy_recipe(), tmp_path / "run", TWO_OF_THREE)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM),
        FedPhD(local=ADAM, cohort=2, r_g=1, variant="none", q_u=(0.5, 0.5)),
    ],
    ids=["fedddpm", "fedphd"],
)
def test_a_network_may_have_more_classes_than_the_data(algorithm, tmp_path):
    """Histograms have the data's two classes, although the network has five."""
    model = Unet(widths=(8,), layers=1, attention=(), groups=4, conditional=True, classes=5)
    recipe = toy_recipe(algorithm=algorithm, model=model, rounds=1, reproducible=True)
    found = run_over(FakeChannel(tmp_path / "sites", 3), recipe, tmp_path / "flower")
    assert found.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256


def test_without_a_quorum_every_client_must_answer_and_the_run_can_be_resumed(tmp_path):
    """Client 2 fails once in round 1, after clients 0 and 1 answered; the resumed run ends as the undisturbed one."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: nan(packet) if client == 2 and n == 2 else packet
    with pytest.raises(QuorumError, match=r"2 of 3 answered, but 3 must; rejected: 2 \(.*non-finite"):
        run_over(channel, recipe, tmp_path / "run")
    result = driver.resume(tmp_path / "run", served=over(channel, Terms()))
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256
    with pytest.raises(RunError, match="effuse resume"):
        driver.resume(tmp_path / "simulator", served=over(channel, Terms()))
    with pytest.raises(RunError, match="effuse serve --resume"):
        driver.resume(tmp_path / "run")


@pytest.mark.parametrize("after", [2, 5])
def test_a_broken_connection_is_opened_again_and_orders_sent_again(after, tmp_path):
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.breaks = after
    result = run_over(channel, recipe, tmp_path / "run", Terms(deadline=5))
    assert channel.opened == 2 and "connection is lost (the cable was pulled)" in log_of(tmp_path / "run")
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256


def test_answers_wait_for_their_turn_on_disk(tmp_path):
    """While the server waits for the first answer, the others are files; after the run the inbox is deleted."""
    channel = FakeChannel(tmp_path / "sites", 3)
    first, waiting = [], []

    def fault(client, n, packet):
        waiting.append(sorted(p.name for p in (tmp_path / "run" / "inbox").glob("*")))
        if client == 0 and not first:
            first.append(packet)
            return None
        if client == 2 and n == 1:
            channel.held.append(("3", first[0]))  # the ticket of client 0's order: 0 to 2 were invitations
        return packet

    channel.fault = fault
    run_over(channel, toy_recipe(rounds=1, reproducible=True), tmp_path / "run", Terms(deadline=5))
    assert waiting == [[], [], ["0_0_1"]]
    assert not (tmp_path / "run" / "inbox").exists()


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "existing folder"])
def test_only_the_owner_can_read_a_folder_with_clients_models(exists, tmp_path):
    """The run folder and the inbox in it, which holds the answers that wait, with the most open umask."""
    if exists:
        (tmp_path / "run").mkdir()
    channel, modes = FakeChannel(tmp_path / "sites", 3), []

    def fault(client, n, packet):
        modes.extend(mode(path) for path in (tmp_path / "run" / "inbox", tmp_path / "run") if path.exists())
        return None if client == 0 else packet  # the other answers wait for client 0's

    channel.fault = fault
    before = os.umask(0)
    try:
        run_over(channel, toy_recipe(rounds=1), tmp_path / "run", TWO_OF_THREE)
    finally:
        os.umask(before)
    assert set(modes) == {0o700} and len(modes) == 4, "the run folder three times, and the inbox with the last answer"
    assert mode(tmp_path / "run") == 0o700


def test_a_simulation_follows_the_umask_and_a_resumed_server_changes_no_permissions(tmp_path):
    """A simulation holds no site's models; an operator may open the folder of a served run to colleagues and resume it."""
    driver.run(toy_recipe(rounds=1), tmp_path / "simulator")
    (tmp_path / "plain").mkdir()
    assert mode(tmp_path / "simulator") == mode(tmp_path / "plain")
    channel = FakeChannel(tmp_path / "sites", 3)
    run_over(channel, toy_recipe(rounds=1), tmp_path / "served")
    (tmp_path / "served").chmod(0o750)
    driver.resume(tmp_path / "served", served=over(channel, Terms()))
    assert mode(tmp_path / "served") == 0o750


def test_a_deadline_is_kept(tmp_path, slept):
    """The server waits for a silent client until the deadline, and hardly longer."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n == 1 else packet
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", Terms(quorum=2, deadline=20.0))
    assert 20.0 <= sum(slept) < 20.0 + 3 * server.POLL
    record = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert record["traffic"]["messages"] == {"up": 2, "down": 3, "total": 5}


def test_a_site_that_is_gone_costs_its_grace_once_and_no_deadline(tmp_path, slept):
    """Of three clients the second goes in round 1 of six and is back in round 4; a deadline would be an hour."""
    channel = FakeChannel(tmp_path / "sites", 3)
    rounds_of_0 = []

    def fault(client, n, packet):
        if client == 0:
            rounds_of_0.append(n)
            if n == 2:
                channel.leave(1)
            if n == 4:
                channel.come_back(1)
        return packet

    channel.fault = fault
    terms = Terms(quorum=2, deadline=3600.0, grace=30.0)
    run_over(channel, toy_recipe(rounds=6, reproducible=True), tmp_path / "run", terms)
    assert 30 <= sum(slept) < 60, "once, not in each round, and never the deadline"
    log = log_of(tmp_path / "run")
    continued = [f"round {t + 1}, job 'train': continuing with 2 of 3; silent: 1" in log for t in range(6)]
    assert continued == [False, True, True, False, False, False], log
    assert channel.answers[0] == channel.answers[2] == 6


@pytest.mark.parametrize("quorum", [None, 3])
def test_a_site_that_is_needed_is_waited_for(quorum, tmp_path, slept):
    """It is gone for 20 seconds, far more than the grace, and the round waits: without it there are too few answers."""
    channel = FakeChannel(tmp_path / "sites", 3)
    left = []

    def fault(client, n, packet):
        if (client, n) == (0, 1):
            channel.leave(1)
            left.append(sum(slept))
        return packet

    channel.fault = fault
    nodes = channel.nodes

    def listed():
        if left and 101 in channel.away and sum(slept) - left[0] > 20:
            channel.come_back(1)
        return nodes()

    channel.nodes = listed
    run_over(
        channel, toy_recipe(rounds=1, reproducible=True), tmp_path / "run", Terms(quorum=quorum, deadline=3600.0, grace=1.0)
    )
    assert "continuing" not in log_of(tmp_path / "run") and channel.answers == {0: 1, 1: 1, 2: 1}


def test_a_site_that_is_slow_but_there_has_the_whole_deadline(tmp_path, slept):
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 else packet
    run_over(channel, toy_recipe(rounds=1, reproducible=True), tmp_path / "run", Terms(quorum=2, deadline=20.0, grace=1.0))
    assert sum(slept) >= 20


def test_a_full_disk_while_the_server_reports_ends_in_one_sentence(tmp_path):
    """federation.log is a device that is always full; `writing` says so, as everywhere else."""
    channel = FakeChannel(tmp_path / "sites", 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "federation.log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="federation.log: the disk is full; free some space"):
        run_over(channel, toy_recipe(reproducible=True), tmp_path / "run")
