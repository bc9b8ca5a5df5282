"""The server's side of a real federation, on a channel without a network: equal bits, quorum, deadline, and every kind of bad answer."""

import dataclasses
import json
import os
import re
import stat

import pytest
import torch
from fake import FakeChannel, over, run_over
from toy import ADAM, ALGORITHMS, SYNTHESIS, ToyStateful, ToyUnet, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.fedddpm import FedDDPM, FedDDPMPlus, QuickTest
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.moon import Moon
from effuse.core.errors import FederationError, QuorumError, RecipeError, RunError
from effuse.core.params import Params
from effuse.core.recipe import Evaluate
from effuse.core.spec import spec
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.encoders import Pixels
from effuse.models.unet import Unet
from effuse.runs import driver
from effuse.transport.flower import server as federation
from effuse.transport.flower.messages import INVITATION, UNDELIVERED, Invitation, Packet
from effuse.transport.flower.terms import Terms
from effuse.transport.worker import Receipt

PATIENT = Terms(quorum=2, deadline=0.3)
pytestmark = pytest.mark.usefixtures("slept")


@spec
class Featureless(ToyUnet):
    """A network that shows nothing of what it thinks."""

    featured = False


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for name in ("POLL", "ROLL_CALL", "KNOCK"):
        monkeypatch.setattr(federation, name, 0.01)


def log_of(folder) -> str:
    return (folder / "federation.log").read_text()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_simulators_bits(name, tmp_path):
    recipe = toy_recipe(algorithm=ALGORITHMS[name], rounds=3, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    if isinstance(recipe.algorithm, Centralised):
        with pytest.raises(FederationError, match="all data in one place, which a real federation never has"):
            run_over(channel, recipe, tmp_path / "flower")
        return
    a, b = driver.run(recipe, tmp_path / "simulator"), run_over(channel, recipe, tmp_path / "flower")
    assert a.weights_sha256 == b.weights_sha256
    assert a.traffic.bytes == b.traffic.bytes and a.traffic.parameters == b.traffic.parameters


ORACLE = QuickTest(encoder=Pixels(side=2), reference="oracle")
POOLED = (
    Centralised(local=ADAM),
    FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=ORACLE),
    FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM, real=True),
)


@pytest.mark.parametrize("algorithm", POOLED, ids=lambda algorithm: algorithm.name)
def test_who_needs_all_data_in_one_place_is_refused_before_anybody_is_waited_for(algorithm, tmp_path):
    """At a server, on one machine, and on resuming what an older version had begun: no connection, no folder, no process."""
    recipe = toy_recipe(algorithm=algorithm, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    told = f"{algorithm.name} needs all data in one place, which a real federation never has"
    with pytest.raises(FederationError, match=told):
        run_over(channel, recipe, tmp_path / "run")
    with pytest.raises(FederationError, match=told):
        driver.run(recipe, tmp_path / "run", engine="flower")
    assert not (tmp_path / "run").exists()
    (tmp_path / "old").mkdir()
    resolved = recipe.resolved(recipe.data.load("train"))
    driver.RunFolder(tmp_path / "old").create(resolved, "toy", driver.SERVED, "cpu", None, {})
    with pytest.raises(FederationError, match=told):
        driver.resume(tmp_path / "old", served=over(channel, Terms()))
    assert channel.opened == 0


def test_what_an_algorithm_refuses_when_it_begins_is_refused_before_anybody_is_waited_for(tmp_path):
    """MOON compares features, which this network does not show."""
    channel, recipe = FakeChannel(tmp_path / "sites", 3), toy_recipe(algorithm=Moon(local=ADAM), model=Featureless())
    with pytest.raises(RecipeError, match="featureless shows no features, which MOON compares"):
        run_over(channel, recipe, tmp_path / "run")
    assert channel.opened == 0 and not (tmp_path / "run").exists()


# whoever is asked alone cannot be spared, nor anybody by Krum, which needs three
SPARED = [
    n for n, a in ALGORITHMS.items() if not isinstance(a, Centralised) and getattr(a, "group", 2) > 1 and "krum" not in n
]


@pytest.mark.parametrize("name", SPARED)
def test_every_algorithm_goes_on_without_a_silent_client(name, tmp_path):
    """Client 1's first two answers are lost: whatever round they belong to is made of the others', and the run ends."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n <= 2 else packet
    recipe = toy_recipe(algorithm=ALGORITHMS[name], rounds=4, reproducible=True)
    result = run_over(channel, recipe, tmp_path / "run", Terms(quorum=1, deadline=0.2))
    assert result.rounds == 4
    assert "silent: 1" in log_of(tmp_path / "run")


def test_krum_says_how_many_replies_it_needs(tmp_path):
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 else packet
    with pytest.raises(
        FederationError, match=r"round 0, job 'train': krum\(f=0\) needs 2 f \+ 3 = 3 replies, not 2; lower f"
    ):
        run_over(channel, toy_recipe(algorithm=ALGORITHMS["fedavg, krum"]), tmp_path / "run", Terms(quorum=1, deadline=0.2))


def test_a_mean_is_over_those_who_answered(tmp_path):
    """Three clients of 13 or 14 images; without client 1 the model is the weighted mean of the others' updates, no more and no less."""
    recipe = toy_recipe(rounds=1, reproducible=True)
    channel = FakeChannel(tmp_path / "sites", 3)
    seen: dict[int, Update] = {}

    def fault(client, n, packet):
        seen[client] = decode(packet.body, Update)
        return None if client == 1 else packet

    channel.fault = fault
    run_over(channel, recipe, tmp_path / "run", PATIENT)
    a, b = seen[0], seen[2]
    expected = a.model.params.lerp(b.model.params, b.weight / (a.weight + b.weight))
    saved = driver.RunFolder(tmp_path / "run").load_checkpoint().server.model.params
    assert saved.digest() == expected.digest()


def spoilt(change):
    """Client 1's second answer, changed."""

    def fault(client, n, packet):
        return change(packet) if client == 1 and n == 2 else packet

    return fault


def update(change):
    """An answer whose update is changed."""

    def changed(packet):
        made = decode(packet.body, Update)
        return packet._replace(body=encode(change(made), Update))

    return changed


def with_params(change):
    def changed(u):
        return dataclasses.replace(u, model=dataclasses.replace(u.model, params=Params(change(dict(u.model.params)))))

    return update(changed)


def nan(packet):
    """A NaN cannot even be encoded by our own code: it is written over the last number of the message."""
    return packet._replace(body=packet.body[:-4] + bytes.fromhex("0000c07f"))


BAD = {
    "nan": (nan, "non-finite number"),
    "wrong shape": (with_params(lambda p: p | {"up.bias": torch.zeros(7)}), r"'up\.bias' has the shape \(7,\), not \(1,\)"),
    "missing key": (with_params(lambda p: {k: v for k, v in p.items() if k != "up.bias"}), r"'up\.bias' is missing"),
    "extra key": (with_params(lambda p: p | {"extra": torch.zeros(1)}), "'extra' is not asked for"),
    "another network": (
        update(
            lambda u: dataclasses.replace(
                u, model=dataclasses.replace(u.model, arch=dataclasses.replace(u.model.arch, width=5))
            )
        ),
        "it brings the networks toy_unet",
    ),
    "no weight": (update(lambda u: dataclasses.replace(u, weight=-1.0)), r"its weight is -1\.0; weights are positive"),
    "unknown type": (lambda packet: packet._replace(kind="gossip"), "unknown type 'gossip'"),
    "another message": (lambda packet: packet._replace(body=encode(Receipt(1, None), Receipt)), "is not a fedavg.update"),
    "no message": (lambda packet: packet._replace(body=b"\x00" * 50), "cannot be read"),
    "too many bytes": (lambda packet: packet._replace(body=packet.body + b"\x00" * 2_000_000), r"is over its limit of \d+"),
    "another's name": (lambda packet: packet._replace(head=encode(Receipt(0, None), Receipt)), "it is client 0's"),
    "no receipt": (lambda packet: packet._replace(head=b"junk"), "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_rejected_with_a_reason_and_the_round_goes_on(kind, tmp_path):
    """The same as if client 1 had been silent in round 1."""
    change, reason = BAD[kind]
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    digests = []
    for name, fault in (("bad", spoilt(change)), ("silent", spoilt(lambda packet: None))):
        channel = FakeChannel(tmp_path / name / "sites", 3)
        channel.fault = fault
        digests.append(run_over(channel, recipe, tmp_path / name / "run", PATIENT).weights_sha256)
    assert digests[0] == digests[1]
    assert re.search(f"round 1, job 'train': client 1's answer is rejected: .*{reason}", log_of(tmp_path / "bad" / "run"))
    undisturbed = driver.run(recipe, tmp_path / "undisturbed").weights_sha256
    assert undisturbed != digests[0]


def test_a_client_that_claims_another_state_while_being_evaluated_is_left_out(tmp_path):
    """LocalOnly's clients are looked at after the last round; client 1's receipt names a state that it should not have."""
    recipe = toy_recipe(
        algorithm=ALGORITHMS["localonly"], rounds=1, evaluate=Evaluate(grid=2), sampler=Ancestral(batch=2), reproducible=True
    )
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = spoilt(lambda packet: packet._replace(head=encode(Receipt(1, "9_9"), Receipt)))
    run_over(channel, recipe, tmp_path / "run", PATIENT)
    assert "job 'draw': client 1's answer is rejected: the client changed its state" in log_of(tmp_path / "run")


def test_too_few_answers_end_the_run_in_one_sentence(tmp_path):
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client != 0 else packet
    with pytest.raises(
        QuorumError, match=r"round 0, job 'train': 1 of 3 replied, quorum 2; silent: 1, 2; lower quorum or raise deadline"
    ):
        run_over(channel, toy_recipe(), tmp_path / "run", PATIENT)


def test_a_client_that_is_shut_out_is_neither_asked_nor_waited_for(tmp_path):
    """The weights are those of a run in which client 1 stays silent; but nobody waits for it, at the beginning or in a round."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    silent = FakeChannel(tmp_path / "silent", 3)
    silent.fault = lambda client, n, packet: None if client == 1 else packet
    expected = run_over(silent, recipe, tmp_path / "expected", PATIENT)
    channel = FakeChannel(tmp_path / "sites", 3)
    del channel.sites[101]
    result = run_over(channel, recipe, tmp_path / "run", PATIENT._replace(shut_out=frozenset({1})))
    assert result.weights_sha256 == expected.weights_sha256 and channel.orders == [0, 2] * 3
    told = log_of(tmp_path / "run")
    assert "waiting for 2 clients" in told and "shut out, for want of a key: 1" in told
    assert "beginning without" not in told and "silent" not in told


def test_who_is_shut_out_is_not_drawn_and_two_others_may_not_be_silent_in_its_place(tmp_path):
    """One client a round of three; a warm-up group of the missing one alone; and a quorum of two, with one of the other two silent."""
    out = Terms(quorum=2, deadline=0.3, shut_out=frozenset({1}))
    for name, algorithm in (
        ("one", FedAvg(local=ADAM, cohort=1)),
        ("group", FedDDPM(**SYNTHESIS | {"group": 1}, local=ADAM, central=ADAM)),
    ):
        channel = FakeChannel(tmp_path / name, 3)
        del channel.sites[101]
        result = run_over(channel, toy_recipe(rounds=6, reproducible=True, algorithm=algorithm), tmp_path / f"run-{name}", out)
        assert result.rounds == 6 and {*channel.orders} == {0, 2}
    channel = FakeChannel(tmp_path / "silent", 3)
    del channel.sites[101]
    channel.fault = lambda client, n, packet: None if client == 2 else packet
    with pytest.raises(QuorumError, match=r"1 of 2 replied, quorum 2; silent: 2; lower quorum"):
        run_over(channel, toy_recipe(reproducible=True), tmp_path / "run-silent", out)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM),
        FedPhD(local=ADAM, cohort=2, r_g=1, variant="none", q_u=(0.5, 0.5)),
    ],
    ids=["fedddpm", "fedphd"],
)
def test_a_network_may_have_more_classes_than_the_data(algorithm, tmp_path):
    """Histograms are of the data's two classes, whatever the network could be told."""
    model = Unet(widths=(8,), layers=1, attention=(), groups=4, conditional=True, classes=5)
    recipe = toy_recipe(algorithm=algorithm, model=model, rounds=1, reproducible=True)
    found = run_over(FakeChannel(tmp_path / "sites", 3), recipe, tmp_path / "flower")
    assert found.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256


def test_without_a_quorum_everyone_must_answer_and_the_run_can_be_resumed(tmp_path):
    """Client 2 fails once in round 1; the resumed run ends as the undisturbed one, although clients 0 and 1 had answered already."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: nan(packet) if client == 2 and n == 2 else packet
    with pytest.raises(QuorumError, match=r"2 of 3 replied, quorum 3; rejected: 2 \(.*non-finite"):
        run_over(channel, recipe, tmp_path / "run")
    result = driver.resume(tmp_path / "run", served=over(channel, Terms()))
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256
    with pytest.raises(RunError, match="effuse resume"):
        driver.resume(tmp_path / "simulator", served=over(channel, Terms()))
    with pytest.raises(RunError, match="effuse serve --resume"):
        driver.resume(tmp_path / "run")


def test_a_late_answer_is_discarded_and_its_clients_state_rolls_back(tmp_path):
    """Client 1's answer of round 1 comes during round 2: it counts nowhere, and client 1 goes on from its state of round 0."""
    recipe = toy_recipe(rounds=4, reproducible=True, algorithm=ToyStateful(local=ADAM))
    results = {}
    for name in ("late", "never"):
        channel = FakeChannel(tmp_path / name / "sites", 3)
        late: list[Packet] = []

        def fault(client, n, packet, channel=channel, late=late, name=name):
            if client == 1 and n == 2:
                late.append(packet)
                return None
            if late and name == "late" and channel.fed._late:  # an answer of the next round
                channel.held.append((next(iter(channel.fed._late)), late.pop()))
            return packet

        channel.fault = fault

        def engine(context, channel=channel):
            channel.fed = over(channel, PATIENT)(context)
            return channel.fed

        results[name] = driver.run(recipe, tmp_path / name / "run", served=engine)
        snapshots = {p.stem for p in (tmp_path / name / "sites" / "1").glob("*.state")}
        assert "3_0" in snapshots and "1_0" not in snapshots
    assert results["late"].weights_sha256 == results["never"].weights_sha256
    assert "client 1's answer to round 1, job 'train' came past its deadline and is discarded" in log_of(
        tmp_path / "late" / "run"
    )


def test_a_site_that_is_started_again_is_sent_its_order_again(tmp_path):
    """Client 1 dies at work in round 1 and comes back with its state; nothing is lost."""
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
    assert "client 1 is back" in log_of(tmp_path / "run")


def test_a_site_that_is_gone_is_waited_for(tmp_path):
    """The transport says that client 1's order of round 1 found nobody; the site comes back and is sent it again."""
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: Packet(UNDELIVERED) if client == 1 and n == 2 else packet
    result = run_over(channel, recipe, tmp_path / "run", Terms(deadline=5))
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256
    assert "client 1 is gone" in log_of(tmp_path / "run")


@pytest.mark.parametrize("after", [2, 5])
def test_a_broken_connection_is_opened_again_and_orders_sent_again(after, tmp_path):
    recipe = toy_recipe(rounds=3, reproducible=True, algorithm=ToyStateful(local=ADAM))
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.breaks = after
    result = run_over(channel, recipe, tmp_path / "run", Terms(deadline=5))
    assert channel.opened == 2 and "connection is lost (the cable was pulled)" in log_of(tmp_path / "run")
    assert result.weights_sha256 == driver.run(recipe, tmp_path / "simulator").weights_sha256


def test_a_key_is_bound_to_its_client(tmp_path):
    """Node 101 holds client 2's key and says that it is client 1: it gets no connection, and the run begins without client 1."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.owners = {100: 0, 101: 2, 102: 2}
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", PATIENT)
    log = log_of(tmp_path / "run")
    assert "says that it is client 1, but it holds the key of client 2" in log
    assert "beginning without clients 1" in log and 1 not in channel.orders
    assert channel.refused == {1: "it says that it is client 1, but it holds the key of client 2"}  # its operator is told, too


@pytest.mark.parametrize("owners", [None, {100: 0, 101: 1, 102: 2}])
def test_terms_tell_a_node_whose_key_it_holds(owners, tmp_path):
    """So that a dry run, which never says who it is, can be told that it looks with another client's key."""
    channel, told = FakeChannel(tmp_path / "sites", 3), {}
    channel.owners, send = owners, channel.send

    def noting(node, packet, life):
        if packet.kind == INVITATION:
            told[node] = decode(packet.head, Invitation).owner
        return send(node, packet, life)

    channel.send = noting
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", PATIENT)
    assert told == (owners or dict.fromkeys((100, 101, 102)))


def test_answers_wait_for_their_turn_on_disk(tmp_path, monkeypatch):
    """While the first answer is being waited for, the others are files and not memory; afterwards the spool is gone."""
    channel = FakeChannel(tmp_path / "sites", 3)
    held, waiting = [], []

    def fault(client, n, packet):
        waiting.append(sorted(p.name for p in (tmp_path / "run" / "spool").glob("*")))
        if client == 0 and not held:
            held.append(packet)
            return None
        if client == 2 and n == 1:
            channel.held.append(("3", held[0]))  # the ticket of client 0's order: 0 to 2 were greetings
        return packet

    channel.fault = fault
    run_over(channel, toy_recipe(rounds=1, reproducible=True), tmp_path / "run", Terms(deadline=5))
    assert waiting == [[], [], ["0_0_1"]]
    assert not (tmp_path / "run" / "spool").exists()


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there", [False, True], ids=["made", "there already"])
def test_who_holds_clients_models_shows_them_to_nobody_else(there, tmp_path):
    """Answers wait in the spool: both folders are their owner's alone, as they would be with any umask."""
    if there:
        (tmp_path / "run").mkdir()
    channel, seen = FakeChannel(tmp_path / "sites", 3), []

    def fault(client, n, packet):
        seen.extend(mode(path) for path in (tmp_path / "run" / "spool", tmp_path / "run") if path.exists())
        return None if client == 0 else packet  # the others' wait for its turn

    channel.fault = fault
    before = os.umask(0)
    try:
        run_over(channel, toy_recipe(rounds=1), tmp_path / "run", PATIENT)
    finally:
        os.umask(before)
    assert set(seen) == {0o700} and len(seen) == 4  # with the last answer there is a spool
    assert mode(tmp_path / "run") == 0o700


def test_a_run_of_ones_own_is_as_open_as_its_user_wants(tmp_path):
    """Nobody else's models are in it; and an operator who has opened a served run to colleagues may resume it."""
    driver.run(toy_recipe(rounds=1), tmp_path / "simulator")
    (tmp_path / "plain").mkdir()
    assert mode(tmp_path / "simulator") == mode(tmp_path / "plain")
    channel = FakeChannel(tmp_path / "sites", 3)
    run_over(channel, toy_recipe(rounds=1), tmp_path / "served")
    (tmp_path / "served").chmod(0o750)
    driver.resume(tmp_path / "served", served=over(channel, Terms()))
    assert mode(tmp_path / "served") == 0o750


def test_a_deadline_is_kept(tmp_path, slept):
    """Silence is waited for until the deadline, and hardly longer."""
    channel = FakeChannel(tmp_path / "sites", 3)
    channel.fault = lambda client, n, packet: None if client == 1 and n == 1 else packet
    run_over(channel, toy_recipe(rounds=1), tmp_path / "run", Terms(quorum=2, deadline=20.0))
    assert 20.0 <= sum(slept) < 20.0 + 3 * federation.POLL
    record = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert record["traffic"]["messages"] == {"up": 2, "down": 3, "total": 5}


def test_what_a_site_refuses_is_told(tmp_path):
    """Site 1 has agreed to another manifest: it declines, the server says why, and the others go on."""
    run_over(FakeChannel(tmp_path / "sites", 3), toy_recipe(rounds=1), tmp_path / "first")
    for client in (0, 2):
        (tmp_path / "sites" / str(client) / "manifest.json").unlink()
    run_over(FakeChannel(tmp_path / "sites", 3), toy_recipe(rounds=1, seed=1), tmp_path / "second", PATIENT)
    assert re.search("declines: client 1 has agreed to the manifest [0-9a-f]{12} and not to", log_of(tmp_path / "second"))


def test_worker_processes_are_refused_at_the_beginning_and_on_resuming(tmp_path):
    engine = over(FakeChannel(tmp_path / "sites", 3), Terms())
    with pytest.raises(RecipeError, match="--workers 2: over Flower every client has a process of its own"):
        driver.run(toy_recipe(), tmp_path / "run", workers=2, served=engine)
    driver.run(toy_recipe(rounds=1), tmp_path / "run", served=engine)
    with pytest.raises(RecipeError, match="--workers 2: over Flower"):
        driver.resume(tmp_path / "run", workers=2, served=engine)
