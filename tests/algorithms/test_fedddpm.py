"""FedDDPM, FedDDPM+ and LocalAug by hand: two clients, one weight, and a model that draws its own weight."""

import dataclasses
import json
import math

import pytest
import torch
from hand import one_weight_recipe, trained
from toy import ADAM, ALGORITHMS, SYNTHESIS, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedddpm import AuxOnly, FedDDPM, FedDDPMPlus, QuickTest
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.shared.quick_test import leading
from effuse.core.errors import EffuseError, RecipeError
from effuse.core.federation import Federation
from effuse.core.recipe import Evaluate
from effuse.core.sampler import Sampler
from effuse.core.solvers import SGD, Adam, CosineDecay
from effuse.core.spec import spec
from effuse.diffusion.samplers import Ddim
from effuse.metrics.classifier import Classifier
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tools.check import check, rehearse
from effuse.transport.refusals import hollow_model
from effuse.transport.rehearsal import Rehearsal
from effuse.transport.simulator import InProcess
from effuse.transport.state import Snapshots


@spec
class HandSampler(Sampler):
    """Draws images of the colour that the weight says."""

    batch: int = 2

    def draw(self, net, task, shape, labels, generator, tick):
        tick()
        return net(torch.zeros(shape)).reshape(-1, 1, 1, 1).clamp(-1, 1)

    def scheduler(self, task):
        return None


HALF, WHOLE = SGD(lr=0.25, batch=4, steps=1), SGD(lr=0.5, batch=4, steps=1)
PREPARED = {"warmup": HALF, "sampler": HandSampler(), "share": 1.0}
# a half is stored as 191 of 255, which is read as
C = 191 / 127.5 - 1


def server(folder):
    return RunFolder(folder).load_checkpoint().server


def phases(folder) -> list[str]:
    return [record.phase for record in RunFolder(folder).records()]


def test_one_round_of_fedddpm(tmp_path):
    """loss (w - x)^2; lr 1/4 goes half way to the data, lr 1/2 all the way.

    Warm-up from 0: models .5 and -.5. A: three images of c = .498 from client 0, which holds three, one of -c from client 1.
    Round: the clients reach 1 and -1, uniformly 0. Correction, half way to A's mean: (3c - c) / 4 / 2 = c / 4.
    """
    recipe = one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF))
    assert trained(recipe, tmp_path) == pytest.approx(C / 4)
    A = server(tmp_path).auxiliary
    assert A.pixels.flatten().tolist() == [191, 191, 191, 64] and A.origin.tolist() == [0, 0, 0, 1]
    assert phases(tmp_path) == ["warm-up", "synthesis", "federate"]


def test_a_correction_may_end_in_the_average_of_its_steps(tmp_path):
    """As above, in two half steps from 0 to A's mean c/2: c/4, then 3c/8; averaged with a half, from 0 over c/8 to c/4."""
    for ema, end in ((None, 3 * C / 8), (0.5, C / 4)):
        central = SGD(lr=0.25, batch=4, steps=2, ema=ema)
        recipe = one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=central))
        assert trained(recipe, tmp_path / str(ema)) == pytest.approx(end)


def test_weights_by_size_and_several_rounds(tmp_path):
    """By size the clients' mean is .5 in every round, whatever the correction did; half way to A's c/2 is .25 + c/4."""
    recipe = one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF, weights="size"), rounds=3)
    assert trained(recipe, tmp_path) == pytest.approx(0.25 + C / 4)


def test_groups_take_turns_and_change_nothing_here(tmp_path):
    recipe = one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF, group=1))
    assert trained(recipe, tmp_path) == pytest.approx(C / 4)
    assert phases(tmp_path) == ["warm-up", "synthesis", "warm-up", "synthesis", "federate"]


def test_nobody_is_left_to_a_group_of_its_own(tmp_path):
    """Three clients by two: the third goes with the first two, or its lost answer would end the run whatever the quorum."""
    algorithm = FedDDPM(warmup=ADAM, local=ADAM, central=ADAM, sampler=Ddim(steps=2, batch=4), group=2)
    run(toy_recipe(algorithm=algorithm, rounds=1), tmp_path / "three")
    assert phases(tmp_path / "three") == ["warm-up", "synthesis", "federate"]
    run(toy_recipe(algorithm=algorithm, clients=4, rounds=1), tmp_path / "four")
    assert phases(tmp_path / "four") == ["warm-up", "synthesis"] * 2 + ["federate"]


def test_a_decay_of_the_warm_up_is_refused():
    """It would follow federated rounds, of which there is none yet, and stay at its first value."""
    warmup = Adam(lr=1e-3, steps=1, schedule=CosineDecay())
    # the recipe itself can be built, so that an old run can be opened
    recipe = one_weight_recipe(FedDDPM(**PREPARED | {"warmup": warmup}, local=WHOLE, central=HALF))
    with pytest.raises(RecipeError, match="algorithm.warmup.schedule: .* rounds, which follow the warm-up"):
        check(recipe)


def test_a_histogram_is_charged(tmp_path):
    """A network conditional on two classes: each of three clients sends two numbers of eight bytes beside its model."""
    model = Unet(widths=(8,), layers=1, attention=(), groups=4, conditional=True)
    algorithm = FedDDPM(warmup=ADAM, local=ADAM, central=ADAM, sampler=Ddim(steps=2, batch=4))
    recipe = toy_recipe(algorithm=algorithm, model=model, rounds=1)
    result = run(recipe, tmp_path / "run")
    sent = [r.traffic.bytes.up for r in RunFolder(tmp_path / "run").records()]
    assert sent[1] == 3 * (4 * result.parameters + 2 * 8)
    assert check(recipe)["traffic"]["per_round"][1]["bytes"]["up"] == sent[1]


def test_a_part_of_the_auxiliary_set(tmp_path):
    """Half of A's four images, drawn for each correction: two of c, or one of each. It ends at c/2 or at 0."""
    ends = set()
    for seed in range(6):
        algorithm = FedDDPM(**PREPARED, local=WHOLE, central=HALF, part=0.5)
        ends.add(round(trained(one_weight_recipe(algorithm, seed=seed), tmp_path / str(seed)), 4))
    assert ends == {round(C / 2, 4), 0.0}


def test_a_part_is_rounded_and_drawn_in_every_round(tmp_path):
    """.4 of four images are 1.6, rounded to two. By size every round's mean is .5.

    Two images of c have a loss of (.5 - c)^2; c and -c have the mean of that and of (.5 + c)^2.
    """
    algorithm = FedDDPM(**PREPARED, local=WHOLE, central=HALF, weights="size", part=0.4)
    trained(one_weight_recipe(algorithm, rounds=8), tmp_path)
    seen = [record.noted["correction"] for record in RunFolder(tmp_path).records()[2:]]
    near, far = (0.5 - C) ** 2, (0.5 + C) ** 2
    assert {s["images"] for s in seen} == {2}
    losses = {round(s["loss"], 4) for s in seen}
    assert losses == {round(near, 4), round((near + far) / 2, 4)}, "the two images differ between rounds"


def test_the_average_of_a_warm_up_is_uploaded_where_one_is_kept(tmp_path):
    """EMA with decay .5 of a first step to .5, from 0: .25, stored as 159."""
    warmup = SGD(lr=0.25, batch=4, steps=1, ema=0.5)
    trained(one_weight_recipe(FedDDPM(**PREPARED | {"warmup": warmup}, local=WHOLE, central=HALF)), tmp_path)
    assert server(tmp_path).auxiliary.pixels.flatten().tolist() == [159, 159, 159, 96]


def test_auxiliary_images_and_warm_up_models_do_not_stay_with_clients(tmp_path):
    """The ledger has one model up for each client's warm-up, and nothing but models after that."""
    run(one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF), rounds=2), tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    sent = [(r["phase"], r["parameters"]["up"], r["parameters"]["down"], r["bytes"]["total"]) for r in ledger["per_round"]]
    assert sent == [("warm-up", 0, 0, 0), ("synthesis", 2, 0, 8), ("federate", 2, 2, 16), ("federate", 2, 2, 16)]
    ended = RunFolder(tmp_path / "run").load_checkpoint()
    for k in (0, 1):
        assert Snapshots(tmp_path / "run" / "clients" / str(k)).read(ended.snapshots[k]) == {}


def test_localaug_sends_each_client_a_share_and_charges_it(tmp_path):
    """A of four bytes is split two and two. Whole-way steps end at the mean of own and shared images.

    Client 0: (3 + its two) / 5, client 1: (-1 + its two) / 3, where one of them gets {c, c} and the other {c, -c}.
    """
    algorithm = LocalAug(**PREPARED, local=SGD(lr=0.5, batch=8, steps=1), weights="uniform")
    mixed = ((3 + 2 * C) / 5 + (-1 + 0) / 3) / 2, ((3 + 0) / 5 + (-1 + 2 * C) / 3) / 2
    assert trained(one_weight_recipe(algorithm), tmp_path / "run") in [pytest.approx(m) for m in mixed]
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    sharing = next(r for r in ledger["per_round"] if r["phase"] == "sharing")
    # two images of a byte for each of two clients: no labels for an unconditional model, and no origins
    assert sharing["bytes"] == {"up": 0, "down": 4, "total": 4} and sharing["parameters"]["total"] == 0
    assert ledger["per_round"][-1]["bytes"] == {"up": 8, "down": 8, "total": 16}, "a share is sent once; then models alone"
    assert phases(tmp_path / "run") == ["warm-up", "synthesis", "sharing", "federate"]


def test_localaug_deals_shuffled_shares_and_weighs_by_real_images(tmp_path):
    """By size three to one, whatever was added: (3 y_0 + y_1) / 4 with y_0 and y_1 as above. Who gets {c, -c} is random."""
    ends = set()
    for seed in range(6):
        algorithm = LocalAug(**PREPARED, local=SGD(lr=0.5, batch=8, steps=1), weights="size")
        ends.add(round(trained(one_weight_recipe(algorithm, seed=seed), tmp_path / str(seed)), 5))
    first, second = (3 * (3 + 2 * C) / 5 + (-1 + 0) / 3) / 4, (3 * (3 + 0) / 5 + (-1 + 2 * C) / 3) / 4
    assert ends == {round(first, 5), round(second, 5)}


def test_training_on_the_auxiliary_set_alone(tmp_path):
    """Half way to A's mean c/2, twice, from 0: c/4, then 3c/8. No client takes part after the synthesis."""
    recipe = one_weight_recipe(AuxOnly(**PREPARED, central=HALF), rounds=2)
    assert trained(recipe, tmp_path) == pytest.approx(3 * C / 8)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert [r["parameters"]["total"] for r in ledger["per_round"]] == [0, 2, 0, 0]


def plus(**changes):
    return FedDDPMPlus(**PREPARED | {"local": WHOLE, "central": HALF, "weights": "size"} | changes)


def scripted(monkeypatch, *scores):
    left = list(scores)
    monkeypatch.setattr(QuickTest, "score", lambda self, model, A, sampler, fed: left.pop(0))


def test_fedddpm_plus_stops_and_corrects_once(tmp_path, monkeypatch):
    """Tests in rounds 0, 2 and 4 give 10, 9 and 9.5: federation ends with round 4, the fifth, and a correction follows.

    By size the clients' mean is .5 in every round; the correction goes half way from there to c/2.
    """
    scripted(monkeypatch, 10.0, 9.0, 9.5)
    recipe = one_weight_recipe(plus(test=QuickTest(every=2, encoder=Pixels())), rounds=9)
    assert trained(recipe, tmp_path / "run") == pytest.approx(0.25 + C / 4)
    assert phases(tmp_path / "run") == ["warm-up", "synthesis", *["federate"] * 5, "correction"]
    ended = server(tmp_path / "run")
    assert ended.scores == (10.0, 9.0, 9.5) and ended.average == pytest.approx(9.6)
    noted = [
        json.loads(line).get("noted", {}).get("quick_test")
        for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    ]
    expected = [None, None, (10.0, False), None, (9.0, False), None, (9.5, True), None]
    assert [n and (n["score"], n["stop"]) for n in noted] == expected
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["rounds"] == 5
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    recipe = recipe.resolved(recipe.data.load("train"))
    fed = Rehearsal(dataclasses.replace(recipe, rounds=9), recipe.shards(recipe.data.load("train")))
    longest = rehearse(recipe, fed, hollow_model(recipe))[0]
    assert [r["phase"] for r in longest] == ["warm-up", "synthesis", *["federate"] * 9, "correction"]
    assert ledger["per_round"][:-1] == longest[:7], "the run's ledger is the check's, cut at its last round"
    assert ledger["per_round"][-1] == longest[-1] and longest[-1]["bytes"]["total"] == 0


def test_the_quick_test_counts_federated_rounds(tmp_path, monkeypatch):
    """Every third of four federated rounds: the first and the last, which are rounds 2 and 5 of the run.

    Counted from the run's start, round 3 would be tested.
    """
    scripted(monkeypatch, 10.0, 5.0)
    trained(one_weight_recipe(plus(test=QuickTest(every=3, encoder=Pixels())), rounds=4), tmp_path)
    federated = [record.noted for record in RunFolder(tmp_path).records() if record.phase == "federate"]
    assert [noted and noted["quick_test"]["score"] for noted in federated] == [10.0, None, None, 5.0]


def test_the_check_says_that_a_run_may_be_shorter():
    predicted = check(toy_recipe(algorithm=ALGORITHMS["fedddpm+"]))["traffic"]
    reason = "the longest run is shown: its quick test may end the federated rounds earlier"
    assert not predicted["exact"] and predicted["reason"] == reason


def test_a_test_that_never_stops_ends_in_a_correction_unless_the_listing_is_taken_literally(tmp_path, monkeypatch):
    scripted(monkeypatch, *range(100, 0, -10), *range(100, 0, -10))
    ends = {}
    for at_end in (True, False):
        recipe = one_weight_recipe(plus(test=QuickTest(every=1, encoder=Pixels()), at_end=at_end), rounds=3)
        ends[at_end] = trained(recipe, tmp_path / str(at_end)), phases(tmp_path / str(at_end))[-1]
    assert ends == {True: (pytest.approx(0.25 + C / 4), "correction"), False: (0.5, "federate")}


def test_a_stop_in_the_last_round_is_corrected_too(tmp_path, monkeypatch):
    scripted(monkeypatch, 10.0, 10.0)
    recipe = one_weight_recipe(plus(test=QuickTest(every=1, encoder=Pixels()), at_end=False), rounds=2)
    assert trained(recipe, tmp_path) == pytest.approx(0.25 + C / 4) and phases(tmp_path)[-1] == "correction"


@pytest.mark.parametrize("reference", ["aux", "oracle"])
def test_the_score_is_the_distance_of_the_same_samples_to_the_reference(reference, tmp_path, monkeypatch):
    """Two tests of a model that is not trained in between give the same score to the bit: the noise is the same."""
    real = []
    monkeypatch.setattr(
        "effuse.algorithms.shared.quick_test.leading",
        lambda features, components: real.append(features) or leading(features, components),
    )
    test = QuickTest(every=1, size=6, encoder=Pixels(side=2), reference=reference, threshold=1e-9, components=3)
    no_effect = Adam(lr=1e-30, batch=8, steps=1)
    algorithm = FedDDPMPlus(**SYNTHESIS, local=no_effect, central=no_effect, test=test, share=0.5)
    run(toy_recipe(algorithm=algorithm, rounds=3), tmp_path / "run")
    scores = server(tmp_path / "run").scores
    assert len(scores) == 2 and scores[0] == scores[1] > 0, "the second is within the threshold of the first"
    assert len(real) == 1 and len(real[0]) == {"aux": 19, "oracle": 40}[reference], "14 + 13 + 13 images; 7 + 6 + 6"


@spec
class Alternating(HandSampler):
    """Draws the colour that the weight says, and its negative."""

    def draw(self, net, task, shape, labels, generator, tick):
        signs = torch.tensor([1.0, -1.0])[: shape[0]].view(-1, 1, 1, 1)
        return super().draw(net, task, shape, labels, generator, tick) * signs


@pytest.mark.parametrize(("reference", "mean", "deviation"), [("aux", 159.25, 63.5), ("oracle", 191.25, 127.5)])
@pytest.mark.parametrize(
    ("sampler", "drawn", "spread"),
    [(None, 191.0, 0.0), (Alternating(), 127.5, 63.5 * math.sqrt(4 / 3))],
    ids=["A's", "its own"],
)
def test_the_score_by_hand(reference, mean, deviation, sampler, drawn, spread, tmp_path):
    """For one pixel a Fréchet distance is (difference of means)^2 + (difference of deviations)^2, over 255^2.

    A is 191, 191, 191, 64: mean 159.25, variance (3 x 31.75^2 + 95.25^2) / 3 = 63.5^2. The data are 255, 255, 255, 0: mean
    191.25, variance (3 x 63.75^2 + 191.25^2) / 3 = 127.5^2. By size the first round's aggregate is .5, so four images are
    191. The test's own sampler draws 191, 64, 191, 64: mean 127.5, variance 4 x 63.5^2 / 3. The model before the round would
    give 128.
    """
    test = QuickTest(every=1, size=4, encoder=Pixels(), reference=reference, sampler=sampler)
    trained(one_weight_recipe(plus(test=test)), tmp_path)
    expected = ((drawn - mean) ** 2 + (spread - deviation) ** 2) / 255**2
    assert server(tmp_path).scores == (pytest.approx(expected, rel=1e-5),)


def test_a_classifier_needs_labelled_images():
    test = QuickTest(encoder=Classifier())
    with pytest.raises(EffuseError, match="what an unconditional model draws has none; use inception"):
        check(toy_recipe(algorithm=FedDDPMPlus(**SYNTHESIS, local=HALF, central=HALF, test=test)))
    oracle = QuickTest(encoder=Classifier(), reference="oracle")
    check(toy_recipe(algorithm=FedDDPMPlus(**SYNTHESIS, local=HALF, central=HALF, test=oracle)))


def test_an_oracle_outside_a_simulation_is_refused_before_the_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(InProcess, "pool", Federation.pool)
    recipe = one_weight_recipe(plus(test=QuickTest(every=1, size=2, encoder=Pixels(), reference="oracle")))
    with pytest.raises(EffuseError, match="fedddpm_plus needs all data in one place, which a real federation never has"):
        run(recipe, tmp_path / "run")
    assert phases(tmp_path / "run") == []


def test_a_test_without_its_encoder_is_refused_before_the_warm_up():
    with pytest.raises(EffuseError, match="the Inception weights for FID are looked for"):
        check(toy_recipe(algorithm=FedDDPMPlus(**SYNTHESIS, local=HALF, central=HALF)))


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(EffuseError, match="algorithm.warmup.state: a warm-up is one fit"):
        FedDDPM(warmup=Adam(lr=0.1, steps=1, state="kept"), local=HALF, central=HALF)
    decaying = SGD(lr=0.1, steps=1, schedule=CosineDecay())
    with pytest.raises(EffuseError, match="the one correction comes after them, where a decay has ended"):
        FedDDPMPlus(warmup=HALF, local=HALF, central=decaying)
    FedDDPM(warmup=HALF, local=decaying, central=decaying)
    for method in (FedDDPM, FedDDPMPlus):
        with pytest.raises(EffuseError, match="double the upload"):
            method(warmup=HALF, local=SGD(lr=0.1, steps=1, ema=0.5), central=HALF)
    with pytest.raises(EffuseError, match="sampler.steps: 99 is more than the 25 steps of task.schedule"):
        check(toy_recipe(algorithm=FedDDPM(warmup=HALF, local=HALF, central=HALF, sampler=Ddim(steps=99))))
    test = QuickTest(sampler=Ddim(steps=98), encoder=Pixels())
    with pytest.raises(EffuseError, match="sampler.steps: 98 is more than the 25 steps of task.schedule"):
        check(toy_recipe(algorithm=FedDDPMPlus(**SYNTHESIS, local=HALF, central=HALF, test=test)))


def test_the_auxiliary_set_is_measured_at_the_end(tmp_path):
    """Of 30 requested images A has three, a tenth of 14, 13 and 13. The protocol records the number."""
    metrics = (FID(n=30, encoder=Pixels(side=2)),)
    recipe = toy_recipe(
        algorithm=ALGORITHMS["fedddpm"], evaluate=Evaluate(grid=0, metrics=metrics), sampler=Ddim(steps=2), rounds=1
    )
    found = run(recipe, tmp_path / "run").metrics
    assert found["fid_pixels"].protocol["generated"] == 30
    assert found["fid_pixels_auxiliary"].protocol["generated"] == len(server(tmp_path / "run").auxiliary) == 3


def test_an_average_over_rounds_begins_with_the_first_federated_one(tmp_path):
    """FedAvg's and FedDDPM's averages start at the first federated model; the warm-up's initial model is not included."""
    from effuse.runs.save import load

    recipe = one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF, weights="size"), rounds=2, ema=0.5)
    assert trained(recipe, tmp_path) == pytest.approx(0.25 + C / 4)
    assert load(tmp_path, ema=True).model.params["w"].item() == pytest.approx(0.25 + C / 4)


def test_what_the_server_did_is_noted(tmp_path):
    """Client 0's three images take two batches of two, client 1's one image takes one.

    The correction starts at 0, with three images of c and one of -c: a loss of c^2 over four images.
    """
    trained(one_weight_recipe(FedDDPM(**PREPARED, local=WHOLE, central=HALF, group=1)), tmp_path)
    noted = [record.noted for record in RunFolder(tmp_path).records()]
    assert noted[:4] == [None, {"synthesis": {"kept": 3, "drawn": 4}}, None, {"synthesis": {"kept": 1, "drawn": 2}}]
    assert noted[4] == {"correction": {"loss": pytest.approx(C**2), "images": 4}}


def test_a_round_without_clients_reports_the_servers_loss(tmp_path, monkeypatch):
    """FedDDPM+ starts at .5, with three of c and one of -c: (3 (.5 - c)^2 + (.5 + c)^2) / 4. AuxOnly starts at 0: c^2."""
    scripted(monkeypatch, 10.0)
    trained(one_weight_recipe(plus(test=QuickTest(encoder=Pixels()))), tmp_path / "plus")
    assert RunFolder(tmp_path / "plus").records()[-1].loss == pytest.approx((3 * (0.5 - C) ** 2 + (0.5 + C) ** 2) / 4)
    trained(one_weight_recipe(AuxOnly(**PREPARED, central=HALF)), tmp_path / "alone")
    assert RunFolder(tmp_path / "alone").records()[-1].loss == pytest.approx(C**2)


def test_without_correction_it_is_fedavg(tmp_path):
    """A negligible central step leaves uniform FedAvg."""
    a = trained(one_weight_recipe(FedDDPM(**PREPARED, local=HALF, central=SGD(lr=1e-12, steps=1)), rounds=2), tmp_path / "a")
    b = trained(one_weight_recipe(FedAvg(local=HALF, weights="uniform"), rounds=2), tmp_path / "b")
    assert a == pytest.approx(b, abs=1e-6)
