"""What an algorithm can rely on, and what the engine refuses."""

import json
import os
import stat

import pytest
import torch
from toy import ADAM, ALGORITHMS, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.localonly import LocalOnly
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.capabilities import StopsEarly
from effuse.core.errors import EffuseError, FederationError, RunError, WireError
from effuse.core.federation import Federation, Order
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Params, mean
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.runs.driver import resume, run
from effuse.tools.check import check
from effuse.transport.state import Snapshots
from effuse.transport.worker import Worker


@pytest.mark.parametrize(
    "name",
    [
        "fedddpm, parts, kept optimisers, one warm-up at a time",
        "localaug",
        "fedphd, pruned in the middle",
        "moon",
        "feddiffuse, udec, part of the clients",
    ],
)
def test_all_methods_ask_the_same_cohorts(name, tmp_path, monkeypatch):
    """With one seed, a method asks the clients of FedAvg in each federated round, whatever it does before."""
    cohorts = []
    sample = Federation.sample

    def recording(fed, cohort):
        cohorts.append((fed.federated, sample(fed, cohort)))
        return cohorts[-1][1]

    monkeypatch.setattr(Federation, "sample", recording)
    runs = []
    for algorithm in (FedAvg(local=ADAM, cohort=2), ALGORITHMS[name]):
        run(toy_recipe(algorithm=algorithm, clients=5, rounds=4), tmp_path / algorithm.name)
        runs.append(cohorts[:])
        cohorts.clear()
    assert runs[0] == runs[1] and len(runs[0]) == 4 and len({tuple(cohort) for _, cohort in runs[0]}) > 1


@spec
class RuleServerFirst(FedAvg):
    """Loads a network for the server, asks clients, and then trains it."""

    def round(self, server: Server, fed: Federation) -> Server:
        net = fed.workbench.load(server.model)
        for _ in fed.ask(self.train, fed.clients, model=server.model):
            pass
        assert Params.of(net).digest() == server.model.params.digest(), "a client's job wrote on the server's network"
        fed.workbench.fit(net, self.local, fed.pool())
        return Server(fed.workbench.unload(net))


@spec
class RuleFreezes(FedAvg):
    """Client 0 freezes a part of its network, which must not affect the other clients."""

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        assert all(p.requires_grad for p in net.params.values())
        if client.id == 0:
            net.module.down.requires_grad_(False)
        fit = client.fit(net, self.local, client.data)
        return Update(client.unload(net), 1.0, fit.loss)


@spec
class RuleAddsInPlace(FedAvg):
    """Changes a tensor of its state in place."""

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        if "c" in client.state:
            client.state["c"].add_(1.0)
        else:
            client.state["c"] = torch.zeros(1)
        return Update(model, 1.0, 0.0)


def _captures(limit: float):
    def direction(grads, params, given):
        return {k: g.clamp(-limit, limit) for k, g in grads.items()}

    return direction


@spec
class RuleClosure(FedAvg):
    """Hides a number in its direction."""

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, direction=_captures(0.1))
        return Update(client.unload(net), 1.0, fit.loss)


@spec
class RuleRepeats(FedAvg):
    """Asks a client twice at once."""

    def round(self, server: Server, fed: Federation) -> Server:
        return Server(mean((u.model, u.weight) for _, u in fed.ask(self.train, [0, 0, 1], model=server.model)))


@message
class Momentum(Server):
    momentum: Params


@spec
class RuleDiverges(FedAvg):
    """Its model is finite, its momentum is not."""

    def setup(self, model: Model, fed: Federation) -> Server:
        return Momentum(model, model.params.zeros())

    def round(self, server: Momentum, fed: Federation) -> Server:
        model = mean((u.model, u.weight) for _, u in fed.ask(self.train, fed.clients, model=server.model))
        return Momentum(model, server.momentum * float("inf"))


@spec
class RulePhases(FedAvg, StopsEarly):
    """A warm-up round before the federated ones, a correction after the last, and a stop as soon as the loss is low."""

    early_stop = "the loss decides"
    enough: float = 0.0

    def setup(self, model: Model, fed: Federation) -> Server:
        return Server(model, phase="warm up")

    def round(self, server: Server, fed: Federation) -> Server:
        after = super().round(server, fed)
        last = server.phase == "federate" and fed.federated + 1 == fed.rounds
        phase = {"warm up": "federate", "correct": "over"}.get(server.phase, "correct" if last else "federate")
        low = not fed.rehearsing and server.phase == "federate" and max(loss for loss, _ in fed.log.losses) < self.enough
        return Server(after.model, phase="over" if low else phase)

    def done(self, server: Server) -> bool:
        return server.phase == "over"


def phases(folder):
    return [json.loads(line)["phase"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_the_servers_network_is_not_shared_with_clients(engine, tmp_path):
    run(toy_recipe(algorithm=RuleServerFirst(local=ADAM)), tmp_path / "run", engine=engine)


def test_a_loaded_network_is_unfrozen(tmp_path):
    run(toy_recipe(algorithm=RuleFreezes(local=ADAM)), tmp_path / "run")


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (RuleAddsInPlace(local=ADAM), "changed a tensor of client.state in place; copy it first"),
        (RuleClosure(local=ADAM), "holds values of its own; .* what it needs goes through `given`"),
        (RuleRepeats(local=ADAM), r"a client is asked twice in \[0, 0, 1\]"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_refused(algorithm, words, tmp_path):
    with pytest.raises(FederationError, match=words):
        run(toy_recipe(algorithm=algorithm), tmp_path / "run")


def test_state_that_could_not_be_read_again_is_not_saved(tmp_path):
    """A non-finite number in any field of the server's state ends the run."""
    with pytest.raises(WireError, match="non-finite"):
        run(toy_recipe(algorithm=RuleDiverges(local=ADAM)), tmp_path / "run")


def test_phases_are_rounds_and_only_federated_ones_count(tmp_path):
    recipe = toy_recipe(algorithm=RulePhases(local=ADAM), rounds=3)
    result = run(recipe, tmp_path / "run")
    assert phases(tmp_path / "run") == ["warm up", "federate", "federate", "federate", "correct"]
    assert result.rounds == 3
    traffic = check(recipe)["traffic"]
    assert not traffic["exact"] and "the loss decides" in traffic["reason"] and len(traffic["per_round"]) == 5


def test_an_early_stop_is_rehearsed_to_the_longest_end(tmp_path):
    """The run stops after its first federated round; the rehearsal has no losses and does all five rounds."""
    recipe = toy_recipe(algorithm=RulePhases(local=ADAM, enough=1e9), rounds=3)
    run(recipe, tmp_path / "run")
    assert phases(tmp_path / "run") == ["warm up", "federate"]
    traffic = check(recipe)["traffic"]
    assert len(traffic["per_round"]) == 5
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert traffic["per_round"][:2] == ledger["per_round"]


def test_an_order_that_names_a_missing_snapshot_deletes_none(tmp_path):
    """The client refuses it and keeps its state."""
    snapshots = Snapshots(tmp_path)
    snapshots.write("3_0", {"visits": 1})
    order = Order(job="train", t=5, federated=5, call=0, client=0, base="2_0", durable="")
    with pytest.raises(FederationError, match="has no snapshot '2_0'"):
        worker_in(tmp_path).perform(order, None)
    assert snapshots.read("3_0") == {"visits": 1}


@pytest.mark.parametrize("at", [0.3, 0.9, 0.999])
def test_a_flipped_bit_in_a_clients_state_is_refused(tmp_path, at):
    """Most of these parse: the value would only be another one."""
    snapshots = Snapshots(tmp_path, run="ab" * 32)
    snapshots.write("3_0", {"w": Params({"w": torch.ones(100)}), "visits": 1})
    assert Snapshots(tmp_path).read("3_0")["visits"] == 1, "who names no run reads states of any"
    with pytest.raises(FederationError, match="belongs to the manifest abababababab, .* here is cdcdcdcdcdcd"):
        Snapshots(tmp_path, run="cd" * 32).read("3_0")
    file = tmp_path / "3_0.state"
    blob = bytearray(file.read_bytes())
    blob[int(at * len(blob))] ^= 1
    file.write_bytes(blob)
    with pytest.raises(FederationError, match="damaged|cannot be read"):
        snapshots.read("3_0")


def test_the_states_of_the_last_two_checkpoints_stay(tmp_path):
    """A client is told of the last checkpoint only: 1_0, then 3_0; states between them belong to no checkpoint."""
    snapshots = Snapshots(tmp_path)
    for name, durable in (("1_0", None), ("2_0", "1_0"), ("3_0", "1_0"), ("4_0", "3_0"), ("5_0", "3_0")):
        snapshots.write(name, {"visits": 1})
        Snapshots(tmp_path).prune({name}, durable)
    assert {path.stem for path in tmp_path.glob("*.state")} == {"1_0", "3_0", "5_0"}


def worker_in(folder):
    from effuse.core.data import Shard
    from effuse.machines.eager import Eager

    recipe = toy_recipe()
    train = recipe.data.load("train")
    machine = Eager(torch.device("cpu"))
    return Worker(
        recipe.algorithm, 0, lambda k: Client(machine, recipe.task, 1, k, Shard.whole(train)), lambda k: Snapshots(folder)
    )


def test_there_is_no_client_minus_one(tmp_path):
    from effuse.machines.eager import Eager
    from effuse.transport.simulator import Simulator, on_disk

    recipe = toy_recipe()
    train = recipe.data.load("train")
    machine = Eager(torch.device("cpu"))
    fed = Simulator(recipe, recipe.shards(train), machine, snapshots=on_disk(tmp_path))
    with pytest.raises(FederationError, match="no client -1 here"):
        fed.worker.client(-1)


def test_a_truncated_list_of_rounds_is_refused(tmp_path):
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM))
    run(recipe, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with open(tmp_path / "run" / "rounds.jsonl", "r+b") as file:
        file.truncate(10)
    with pytest.raises(RunError, match="has 10 bytes, but the checkpoint counts"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "rounds.jsonl").stat().st_size == 10


def test_changed_data_is_noticed(tmp_path):
    recipe = toy_recipe()
    run(recipe, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["data_sha256"]["train"] = "0" * 64
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="the train data has changed since this run started"):
        resume(tmp_path / "run")


def test_colleagues_can_read_a_run(tmp_path):
    """The files of a run follow the umask."""
    old = os.umask(0o022)
    try:
        run(toy_recipe(), tmp_path / "run")
    finally:
        os.umask(old)
    for name in ("manifest.json", "result.json", "rounds.jsonl"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o644


def test_averages_of_personal_models(tmp_path):
    """LocalOnly with a per-step average: raw and averaged models are both evaluated."""
    from effuse.core.recipe import Evaluate
    from effuse.diffusion.samplers import Ancestral

    solver = Adam(lr=1e-2, batch=8, epochs=1, ema=0.9)
    recipe = toy_recipe(algorithm=LocalOnly(local=solver), evaluate=Evaluate(grid=2), sampler=Ancestral(batch=2))
    run(recipe, tmp_path / "run")
    pictures = {p.name for p in (tmp_path / "run" / "samples").iterdir()}
    assert {"round-00002-client-0.png", "round-00002-ema-client-0.png"} <= pictures
    with pytest.raises(EffuseError, match="average those by algorithm.local.ema"):
        run(toy_recipe(algorithm=LocalOnly(local=ADAM), ema=0.9), tmp_path / "refused")
    assert issubclass(LocalOnly, Algorithm)


@spec
class RuleWritesWhenEvaluated(LocalOnly):
    """Changes its state while being evaluated."""

    def own(self, client: Client, model: Model | None) -> Model:
        client.state["evaluations"] = client.state.get("evaluations", 0) + 1
        return super().own(client, model)


def test_an_evaluation_changes_no_state(tmp_path):
    with pytest.raises(FederationError, match="job 'draw': client 0 changed its state while being evaluated"):
        run(toy_recipe(algorithm=RuleWritesWhenEvaluated(local=ADAM)), tmp_path / "run")
