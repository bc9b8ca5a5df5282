"""FedDiffuse by hand: which client reports which parts, how parts are averaged, and what never leaves a client."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hand import HandImages, HandNet, HandSplit
from torch import Tensor, nn
from toy import ADAM, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddiffuse import PARTS, Full, UDec, ULatDec, USplit
from effuse.core.errors import EffuseError
from effuse.core.federation import Federation
from effuse.core.model import Arch, Net
from effuse.core.params import Params
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD, Adam
from effuse.core.spec import spec
from effuse.core.task import Batch, Task
from effuse.core.visit import each_params
from effuse.data.partition import Iid
from effuse.diffusion.samplers import Ancestral
from effuse.models.saved import write_plain
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tools.check import check
from effuse.transport.state import Snapshots
from effuse.transport.worker import Worker

METHODS = {"full": Full, "usplit": USplit, "ulatdec": ULatDec, "udec": UDec}


class ThreeWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b, self.d = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.e, self.b, self.d]).expand(len(x), 3)


@spec
class PartsNet(Arch):
    """A weight per part, each starting at zero."""

    parts = {"encoder": ("e",), "bottleneck": ("b",), "decoder": ("d",)}

    def build(self) -> nn.Module:
        return ThreeWeights()

    def save(self, net, folder, scheduler) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class PartsTask(Task):
    """(e - x)^2 + (b - x)^2 + (d - x)^2: the weights are trained independently."""

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean(((net(batch.x) - batch.x.flatten(1)) ** 2).sum(1))


@spec
class HandSplitReports(USplit):
    """Fixed reports: both clients report the encoder, client 0 the bottleneck, and no client the decoder."""

    def reported_parts(self, cohort, rng):
        return {0: ("encoder", "bottleneck"), 1: ("encoder",)}


def by_hand(algorithm, **changes) -> Recipe:
    values = {"data": HandImages(), "clients": 2, "partition": HandSplit(), "model": PartsNet(), "task": PartsTask()}
    values |= {"algorithm": algorithm, "rounds": 1, "evaluate": Evaluate(grid=0), "threads": 1}
    return Recipe(**(values | changes))


def weights(folder, client=None) -> dict[str, float]:
    return {k: t.item() for k, t in load(folder, client=client).model.params.items()}


STEP = SGD(lr=0.5, batch=4, steps=1)  # from w to w - 0.5 * 2 (w - x) = x
HALF_STEP = SGD(lr=0.25, batch=4, steps=1)  # half of the way to x


def test_every_part_of_full_is_averaged_by_size(tmp_path):
    """Client 0 has three images of value 1, client 1 one of value -1; a step ends at 1 and -1: (3 * 1 - 1) / 4 = 0.5."""
    run(by_hand(Full(local=STEP)), tmp_path)
    assert weights(tmp_path) == {"e": 0.5, "b": 0.5, "d": 0.5}


def test_a_round_reports_the_loss_by_size(tmp_path):
    """With all weights at 0, both losses are 3 * (0 - 1)^2 = 3. Half steps lead to the mean 0.25, where client 0 loses
    3 * 0.75^2 = 1.6875 and client 1 3 * 1.25^2 = 4.6875: by images (3 * 1.6875 + 4.6875) / 4 = 2.4375.
    """
    run(by_hand(Full(local=HALF_STEP), rounds=2), tmp_path)
    assert [record.loss for record in RunFolder(tmp_path).records()] == pytest.approx([3.0, 2.4375])


def test_a_part_is_averaged_over_its_reporters(tmp_path):
    """Both report the encoder: (3 * 1 + 1 * -1) / 4 = 0.5. Only client 0 reports the bottleneck: 3 * 1 / 3 = 1.

    No client reports the decoder. It stays at 0, although both have trained it.
    """
    run(by_hand(HandSplitReports(local=STEP)), tmp_path)
    assert weights(tmp_path) == {"e": 0.5, "b": 1.0, "d": 0.0}
    traffic = json.loads((tmp_path / "ledger.json").read_text())["training"]["parameters"]
    assert traffic == {"down": 6, "up": 3, "total": 9}, "three weights to each of two clients, two and one back"


def test_usplit_of_two_clients_by_hand(tmp_path):
    """A part has one reporter, so it ends at 1 or at -1. Encoder and decoder always come from different clients."""
    ends = set()
    for seed in range(8):
        run(by_hand(USplit(local=STEP), seed=seed), tmp_path / str(seed))
        found = weights(tmp_path / str(seed))
        assert found["e"] == -found["d"] and set(map(abs, found.values())) == {1.0}
        ends.add(tuple(found.values()))
    assert len(ends) > 2, "the reporters are drawn in every round"


@pytest.mark.parametrize(("method", "shared"), [(ULatDec, ("b", "d")), (UDec, ("d",))])
def test_personal_models_by_hand(method, shared, tmp_path):
    """Half steps, two rounds. A shared weight is as in FedAvg: 0.5 and -0.5, mean (3 * 0.5 - 0.5) / 4 = 0.25; then 0.625
    and -0.375, mean 0.375. A private one continues from its client's last: 0.5, 0.75 at client 0, -0.5, -0.75 at client 1.
    """
    run(by_hand(method(local=HALF_STEP), rounds=2), tmp_path)
    for client, private in ((None, 0.0), (0, 0.75), (1, -0.75)):
        expected = {k: 0.375 if k in shared else private for k in "ebd"}
        assert weights(tmp_path, client) == pytest.approx(expected), "model/ holds the initial private parts"


def test_full_is_fedavg(tmp_path):
    """Exchanging every part gives the same bits as exchanging the model."""
    a = run(toy_recipe(algorithm=Full(local=ADAM, cohort=2), rounds=3), tmp_path / "a")
    b = run(toy_recipe(algorithm=FedAvg(local=ADAM, cohort=2), rounds=3), tmp_path / "b")
    assert a.weights_sha256 == b.weights_sha256 and a.traffic == b.traffic


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 10, 11])
def test_usplit_assignments(k):
    """Even K: K/2 reporters of each part.

    Odd K: encoders and decoders together K, bottlenecks (K+1)/2. K = 1: everything.
    """
    algorithm, cohort = USplit(local=ADAM), list(range(100, 100 + k))
    odd_encoders = 0
    chosen = Counter()
    for t in range(200):
        reports = algorithm.reported_parts(cohort, np.random.default_rng(t))
        assert list(reports) == cohort, "in cohort order"
        n = Counter(part for parts in reports.values() for part in parts)
        if k == 1:
            assert reports == {100: PARTS}
            continue
        for parts in reports.values():
            assert len({"encoder", "decoder"} & set(parts)) == 1 and set(parts) <= set(PARTS) and len(parts) <= 2
        assert n["bottleneck"] == (k + 1) // 2 and n["encoder"] + n["decoder"] == k
        assert n["encoder"] - n["decoder"] in ((0,) if k % 2 == 0 else (-1, 1))
        odd_encoders += n["encoder"] > n["decoder"]
        chosen.update((client, part) for client, parts in reports.items() for part in parts)
    if k > 1:
        assert len(chosen) == 3 * k, "every client reports every part at some time"
        assert all(60 < count < 140 for (_, part), count in chosen.items() if part != "bottleneck"), "about half the rounds"
    if k % 2 and k > 1:
        assert 60 < odd_encoders < 140


def upward(monkeypatch) -> list[tuple[int, list]]:
    """All later uploads: (client, the Params and tensors of the message)."""
    seen: list[tuple[int, list]] = []
    charge = Federation._charge

    def watch(fed, direction, client, what, wire_bytes=0):
        if direction == "up":
            seen.append((client, list(each_params(what))))
        charge(fed, direction, client, what, wire_bytes)

    monkeypatch.setattr(Federation, "_charge", watch)
    return seen


LOOKS = {"rounds": 3, "evaluate": Evaluate(grid=2, every=1), "sampler": Ancestral(batch=2)}


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
@pytest.mark.parametrize(("method", "shared"), [(ULatDec, {"middle", "up"}), (UDec, {"up"})])
def test_private_parts_never_leave_their_client(method, shared, engine, tmp_path, monkeypatch):
    """No upload, for training or evaluation, holds a parameter of a private part."""
    seen = upward(monkeypatch)
    run(toy_recipe(algorithm=method(local=ADAM), **LOOKS), tmp_path, engine=engine)
    names = [name for _, items in seen for item in items if isinstance(item, Params) for name in item]
    assert {name.partition(".")[0] for name in names} == shared
    assert len(seen) == 3 * 3 * 2, "three rounds of three clients, each trained and evaluated"


def test_the_bytes_of_a_udec_encoder_never_leave_its_client(tmp_path, monkeypatch):
    """Nor are they in other fields: the test searches every answer for the bytes."""
    answers: list[bytes] = []
    states: list[dict] = []
    handle, write = Worker.handle, Snapshots.write

    def watched_write(kept, name, state):
        states.append(dict(state))
        write(kept, name, state)

    def watched_handle(worker, head, body):
        receipt, reply = handle(worker, head, body)
        answers.append(receipt + reply)
        return receipt, reply

    monkeypatch.setattr(Worker, "handle", watched_handle)
    monkeypatch.setattr(Snapshots, "write", watched_write)
    run(toy_recipe(algorithm=UDec(local=ADAM), **LOOKS), tmp_path, engine="loopback")
    assert len(answers) == 18 and len(states) == 9
    private = [t.numpy().tobytes() for state in states for part in state.values() for t in part.tensors]
    assert set().union(*states) == {"encoder", "bottleneck"} and len(private) == 9 * 4
    assert not any(secret in answer for secret in private for answer in answers)


def test_personal_models_differ_in_private_parts_and_agree_in_shared_ones(tmp_path):
    run(toy_recipe(algorithm=UDec(local=ADAM), rounds=2), tmp_path)
    server, one, other = (load(tmp_path, client=k).model for k in (None, 0, 1))
    for k in ("up.weight", "up.bias"):
        assert torch.equal(one.params[k], other.params[k]) and torch.equal(one.params[k], server.params[k])
    for k in ("down.weight", "middle.weight"):
        assert not torch.equal(one.params[k], other.params[k]) and not torch.equal(one.params[k], server.params[k])


def sent(folder) -> list[dict[str, dict[str, int]]]:
    """Bytes by client, round after round."""
    return [r.traffic.clients for r in RunFolder(folder).records()]


@pytest.mark.parametrize(("name", "down"), [("full", 4 * 97), ("usplit", 4 * 97), ("ulatdec", 4 * 57), ("udec", 4 * 37)])
def test_first_contact_is_counted_when_a_client_first_joins(name, down, tmp_path):
    """The toy network has 40 + 20 + 37 = 97 values. A client's first message has all, later ones the shared parts."""
    run(toy_recipe(algorithm=METHODS[name](local=ADAM, cohort=1), rounds=6), tmp_path)
    met = set()
    for clients in sent(tmp_path):
        [(client, moved)] = clients.items()
        assert moved["down"] == (down if client in met else 4 * 97)
        met.add(client)
    assert len(met) > 1, "the seed must let several clients join"
    assert RunFolder(tmp_path).load_checkpoint().received == {"theta": tuple(sorted(map(int, met)))}


def test_a_client_that_never_joined_has_no_model_of_its_own(tmp_path):
    run(toy_recipe(algorithm=UDec(local=ADAM, cohort=1), **(LOOKS | {"rounds": 1})), tmp_path)
    joined = [int(k) for k in sent(tmp_path)[0]]
    absent = next(k for k in range(3) if k not in joined)
    with pytest.raises(EffuseError, match=f"has no model of client {absent}; client {absent} never took part"):
        load(tmp_path, client=absent)
    shown = [path.name for path in (tmp_path / "samples").glob("*-client-*.png")]
    assert shown == [f"round-00001-client-{joined[0]}.png"], "it is not evaluated, because its encoder is untrained"


def test_the_optimiser_is_reset_in_every_round(tmp_path):
    """As in the authors' code. Keeping its moments gives other weights."""
    kept = Adam(lr=1e-2, batch=8, epochs=1, state="kept")
    a, b = (run(toy_recipe(algorithm=Full(local=s), rounds=2), tmp_path / s.state) for s in (ADAM, kept))
    assert a.weights_sha256 != b.weights_sha256


def test_a_network_without_the_parts_is_refused():
    with pytest.raises(EffuseError, match="has no part 'encoder'"):
        check(by_hand(UDec(local=STEP), model=HandNet()))


@spec
class CountingNet(PartsNet):
    """Keeps a value that it does not train."""

    def build(self) -> nn.Module:
        net = ThreeWeights()
        net.register_buffer("seen", torch.zeros(()))
        return net


def test_a_network_with_values_of_no_part_is_refused():
    with pytest.raises(EffuseError, match="keeps values it does not train, which belong to no part; use a U-Net"):
        check(by_hand(UDec(local=STEP), model=CountingNet()))


AVERAGED = SGD(lr=0.25, batch=4, steps=1, ema=0.5)  # half of the way to x, averaged by halves


def test_the_last_report_is_the_average_over_all_steps(tmp_path):
    """Client 0: 0, 0.5 and, from the mean 0.25, 0.625; its average 0, 0.25, (0.25 + 0.625) / 2 = 0.4375. Client 1: 0, -0.5
    and -0.375; its average 0, -0.25, -0.3125. Their mean is (3 * 0.4375 - 0.3125) / 4 = 0.25, which is the average of the
    means 0.25 and 0.375: 0, 0.125, 0.25. The traffic is the same, and every mean but the last is that of the weights.
    """
    for name, local in (("averaged", AVERAGED), ("plain", HALF_STEP)):
        run(by_hand(Full(local=local), rounds=2), tmp_path / name)
    assert weights(tmp_path / "averaged") == pytest.approx({"e": 0.25, "b": 0.25, "d": 0.25})
    assert weights(tmp_path / "plain") == pytest.approx({"e": 0.375, "b": 0.375, "d": 0.375})
    sums = [json.loads((tmp_path / name / "ledger.json").read_text())["training"] for name in ("averaged", "plain")]
    assert sums[0] == sums[1]
    losses = [[r.loss for r in RunFolder(tmp_path / name).records()] for name in ("averaged", "plain")]
    assert losses[0] == losses[1], "training does not use the average"


def test_personal_models_end_as_their_averages(tmp_path):
    """The decoder ends at 0.25 as above.

    A private weight is 0.5, 0.75 at client 0, its average 0.25, 0.5; client 1 mirrors it.
    """
    run(by_hand(UDec(local=AVERAGED), rounds=2), tmp_path)
    for client, private in ((0, 0.5), (1, -0.5)):
        assert weights(tmp_path, client) == pytest.approx({"e": private, "b": private, "d": 0.25})


def test_one_client_that_averages_is_the_centralised_baseline(tmp_path):
    """A single client with all data ends at Centralised's average."""
    whole = {"clients": 1, "partition": Iid(), "rounds": 3}
    run(by_hand(Full(local=AVERAGED), **whole), tmp_path / "one")
    run(by_hand(Centralised(local=AVERAGED), **whole), tmp_path / "all")
    assert weights(tmp_path / "one") == {k: t.item() for k, t in load(tmp_path / "all", ema=True).model.params.items()}


def test_an_average_over_steps_needs_every_client_in_every_round():
    with pytest.raises(EffuseError, match="all must take part in all; leave cohort out, or use the recipe's `ema`"):
        UDec(local=AVERAGED, cohort=1)
