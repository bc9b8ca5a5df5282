"""FedPhD by hand: choices, both weightings, Eq. 19, the cycle, outages, noise, and the traffic of each link."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hand import one_weight_recipe, trained
from toy import ADAM, ToyUnet, toy_recipe

from effuse.algorithms.fedphd import (
    Edge,
    EdgeChoice,
    FedPhD,
    FedPhDUpdate,
    sparsifying,
)
from effuse.algorithms.shared.homogeneity import edge_probabilities, homogeneity
from effuse.algorithms.shared.labels import ReportedHistogram
from effuse.core.algorithm import on_client
from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import RecipeError, WireError
from effuse.core.fit import Fit
from effuse.core.grammar import parse
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.core.spec import Spec, spec
from effuse.core.workbench import Client
from effuse.diffusion.samplers import Ancestral
from effuse.privacy.histogram import Disclosure, Gaussian, Laplace
from effuse.pruning.prune import prune
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tools.check import check
from effuse.transport.state import Snapshots

UNIFORM = np.full(10, 0.1)
STEP = SGD(lr=0.5, batch=4, steps=1)  # from w to x
HALF_STEP = SGD(lr=0.25, batch=4, steps=1)  # half of the way to x


def rounds_of(folder: Path) -> list[dict]:
    """A run's records, after the round in which clients enrol."""
    return [json.loads(x) for x in (folder / "rounds.jsonl").read_text().splitlines()[1:]]


def images(*classes: int, n: int = 2500) -> np.ndarray:
    """A histogram of n images, evenly over some of ten classes."""
    counts = np.zeros(10)
    counts[list(classes)] = n / len(classes)
    return counts


class Site:
    """A client that has disclosed its histogram, with the randomness of a seed."""

    def __init__(self, told: np.ndarray, seed: int) -> None:
        self.state = {"told": ReportedHistogram(tuple(told))}
        self.stream = lambda purpose: Stream((seed, purpose))


def first_choices(algorithm: FedPhD, own: np.ndarray, *edges: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """How often each edge comes first in 400 choices."""
    q = torch.tensor(np.array(edges), dtype=torch.float32)
    first = [algorithm.choose(Site(own, seed), q, scale).edges[0] for seed in range(400)]
    return np.bincount(first, minlength=len(edges)) / 400


def test_images_as_shares_in_the_choice_of_an_edge():
    """50,000 images, a=1, b=-1: the same classes 1.367544 - 5000/50000 - 1 = 0.267544, others 1.612702 - 0.1 - 1 = 0.512702,
    so 0.342898 and 0.657102. In images, both are zero. A frequency of 400 draws has a standard deviation of 0.024.
    """
    own, edges = images(0, 1), np.array([images(0, 1), images(2, 3)])
    P = edge_probabilities(own, edges, 1.0, -1.0, UNIFORM, 50_000)
    assert pytest.approx([0.342898, 0.657102], abs=1e-6) == P
    algorithm = FedPhD(local=STEP, a=1.0, b=-1.0, normalised=True)
    assert first_choices(algorithm, own, *edges, scale=50_000.0) == pytest.approx(P, abs=0.07)


def test_a_random_choice_ignores_equation_25():
    """90,000 images leave edges 0 and 2 at zero (15000 * 2 - 92500 < 0). By Eq. 25 all go to edge 1, at random a third."""
    full, empty = images(*range(10), n=90_000), np.zeros(10)
    for selection, expected in (("homogeneity", [0, 1, 0]), ("random", [1 / 3, 1 / 3, 1 / 3])):
        found = first_choices(FedPhD(local=STEP, edges=3, selection=selection), images(0, 1), full, empty, full)
        assert found == pytest.approx(expected, abs=0.07)


def test_selection_and_weights_are_independent():
    """Weights by size do not change the choice, for which a=0 would make all three edges equally likely. A random choice
    does not change the weights: 2500 + 15000 * 1.367544 = 23013.167, where size alone is 2500.
    """
    full, empty = images(*range(10), n=90_000), np.zeros(10)
    by_size, at_random = FedPhD(local=STEP, edges=3, weights="size"), FedPhD(local=STEP, selection="random")
    assert first_choices(by_size, images(0, 1), full, empty, full).tolist() == [0, 1, 0]
    assert by_size._weight(images(0, 1), 1.0) == 2500
    assert at_random._weight(images(0, 1), 1.0) == pytest.approx(23_013.167, abs=1e-3)


def test_a_known_target_takes_the_place_of_the_uniform_one(tmp_path):
    """q_u = (1, 0), only white images. Weights at an edge: mu is 2 for client 0 and 2 - sqrt 2 for client 1, so 3 + 20
    against 1 + 5.857864, (23 - 6.857864) / 29.857864 = 0.540633. The choice of a client with four white images, a=10,
    b=-14: an edge with four more has 20 - 8 - 14 < 0, with one more 20 - 5 - 14 = 1, an empty one 20 - 4 - 14 = 2. With mu
    = 1.29 all are zero.
    """
    w = np.array([3 + 10 * 2, 1 + 10 * (2 - 2**0.5)])
    found = trained(one_weight_recipe(by_hand(q_u=(1.0, 0.0))), tmp_path / "run")
    assert found == pytest.approx((w[0] - w[1]) / w.sum(), rel=1e-6) == pytest.approx(0.540633, abs=1e-6)
    algorithm = FedPhD(local=STEP, edges=3, a=10.0, b=-14.0, q_u=(1.0, 0.0))
    white = np.array([1.0, 0.0])
    assert first_choices(algorithm, 4 * white, 4 * white, white, 0 * white) == pytest.approx([0, 1 / 3, 2 / 3], abs=0.07)


def test_the_defaults_are_those_of_the_load_balance():
    """a=15,000, b=0: 2,500 images of two classes weigh 23013.167. lambda_0 is in the paper's grid."""
    default = FedPhD(local=STEP)
    assert default._weight(images(0, 1), 1.0) == pytest.approx(23_013.167, abs=1e-3)
    assert (default.lambda_0, default.ratio, default.cohort) == (1e-4, 0.2, 0.2)


def test_equation_19_adds_images_to_images():
    """Two clients of 2500 images in two classes each. As printed, a frequency vector is added to counts.

    Its sum is (1 + 2500) / 5000 = 0.5002 instead of 1. On counts: four classes of 1250 out of 5000, mu = 2 - sqrt(1/4 -
    1/10) = 1.612702.
    """
    first, second = images(0, 1), images(2, 3)
    literal = (first / 2500 + second) / (2500 + 2500)
    assert literal.sum() == pytest.approx(0.5002)
    edge = Edge(tuple(first), waiting="theta", weight=1.0, waiting_counts=tuple(second))
    after = FedPhD(local=STEP)._aggregate_at_edge(edge)
    assert sum(after.counts) == 5000 and (after.theta, after.waiting, after.waiting_counts) == ("theta", None, ())
    assert homogeneity(np.array(after.counts), UNIFORM) == pytest.approx(1.612702, abs=1e-6)


def by_hand(**options) -> FedPhD:
    values = {"local": STEP, "cohort": None, "edges": 1, "r_g": 1, "variant": "none", "a": 10.0}
    return FedPhD(**(values | options))


MU = 2 - 0.5**0.5  # of one class out of two


def test_the_weights_at_an_edge(tmp_path):
    """Client 0 has three images of value 1, client 1 one of -1; a step ends there. Both have one class of two: mu =
    1.292893.

    With a=10 the weights are 3 + 12.93 and 1 + 12.93: (15.93 - 13.93) / 29.86 = 0.066984. With a=0: (3 - 1) / 4.
    """
    w = np.array([3 + 10 * MU, 1 + 10 * MU])
    expected = (w[0] - w[1]) / w.sum()
    assert expected == pytest.approx(0.066984, abs=1e-6)
    assert trained(one_weight_recipe(by_hand()), tmp_path / "a") == pytest.approx(expected, rel=1e-6)
    assert trained(one_weight_recipe(by_hand(weights="size")), tmp_path / "b") == 0.5
    assert trained(one_weight_recipe(by_hand(b=-14.5)), tmp_path / "c") == 1.0, "1 + 12.93 - 14.5 < 0: ReLU drops client 1"
    assert rounds_of(tmp_path / "c")[0]["noted"]["n_e"] == [3 + 1], "Eq. 19 adds the images of all clients at the edge"
    assert trained(one_weight_recipe(by_hand(b=-99.0)), tmp_path / "d") == 0.0, "ReLU leaves no client: equal weights"
    shares = np.array([3 / 4 + 10 * MU, 1 / 4 + 10 * MU])
    found = trained(one_weight_recipe(by_hand(normalised=True)), tmp_path / "e")
    assert found == pytest.approx((shares[0] - shares[1]) / shares.sum(), rel=1e-5)


@spec
class HandChosen(FedPhD):
    """Client 0 goes to edge 0, client 1 to edge 1."""

    @on_client
    def choose(self, client: Client, q: torch.Tensor, scale: float) -> EdgeChoice:
        return EdgeChoice((client.id, 1 - client.id))


def chosen(**options) -> HandChosen:
    return HandChosen(**({"local": STEP, "cohort": None, "edges": 2, "r_g": 1, "variant": "none", "a": 10.0} | options))


def test_the_weights_in_the_cloud(tmp_path):
    """One client at each edge: the edges' models are 1 and -1, and the cloud weighs 3 + 12.93 against 1 + 12.93.

    In shares of all four images: 0.75 + 12.93 against 0.25 + 12.93, 0.5 / 26.857864 = 0.018617.
    """
    w = np.array([3 + 10 * MU, 1 + 10 * MU])
    assert trained(one_weight_recipe(chosen()), tmp_path / "a") == pytest.approx((w[0] - w[1]) / w.sum(), rel=1e-6)
    assert trained(one_weight_recipe(chosen(weights="size")), tmp_path / "b") == 0.5
    assert trained(one_weight_recipe(chosen(normalised=True)), tmp_path / "c") == pytest.approx(0.018617, abs=1e-6)


def test_relu_applies_to_each_edge_separately(tmp_path):
    """b=-14.5: client 0 weighs 3 + 12.93 - 14.5 = 1.43 at edge 0. Client 1 weighs zero at edge 1, but is alone, so it
    counts.

    After a cycle of two rounds the edges weigh 6 + 12.93 - 14.5 = 4.43 and 2 + 12.93 - 14.5 = 0.43: 4 / 4.86.
    """
    w = np.array([6 + 10 * MU - 14.5, 2 + 10 * MU - 14.5])
    assert w[1] > 0 > 1 + 10 * MU - 14.5
    found = trained(one_weight_recipe(chosen(r_g=2, b=-14.5), rounds=2), tmp_path / "run")
    assert found == pytest.approx((w[0] - w[1]) / w.sum(), rel=1e-6) == pytest.approx(0.823408, abs=1e-6)
    assert rounds_of(tmp_path / "run")[0]["noted"]["n_e"] == [3, 1]


@spec
class Drowned(Disclosure):
    """Noise that makes the count of a single image zero."""

    charge = release = None

    def noise(self, classes: int, rng: np.random.Generator) -> np.ndarray:
        return np.full(classes, -1.0)


def test_work_counts_where_noise_leaves_no_images(tmp_path):
    """The histograms are 3 - 1 and 1 - 1 images. The cloud weighs edge 0 by 2 + 10 mu = 14.93, edge 1 by 0 + 10 * 2, since
    an empty histogram counts as the target: -5.07 / 34.93. With a=0 edge 1 has no weight, by Eq. 21.
    """
    w = np.array([2 + 10 * MU, 20])
    found = trained(one_weight_recipe(chosen(histogram=Drowned())), tmp_path / "a")
    assert found == pytest.approx((w[0] - w[1]) / w.sum(), rel=1e-6) == pytest.approx(-0.145182, abs=1e-6)
    assert trained(one_weight_recipe(chosen(histogram=Drowned(), weights="size")), tmp_path / "b") == 1.0
    ledger = json.loads((tmp_path / "a" / "ledger.json").read_text())
    assert ledger["training"]["edges"]["1"]["up"] == 4, "its work was sent"


@spec
class Louder(Disclosure):
    """Ten more images of every class."""

    charge = release = None

    def noise(self, classes: int, rng: np.random.Generator) -> np.ndarray:
        return np.full(classes, 10.0)


@pytest.mark.parametrize(
    "options",
    [{"b": 5.0}, {"b": 1.25, "normalised": True}, {"b": 45.0, "histogram": Louder()}],
    ids=["images", "shares of four", "with noise"],
)
def test_clients_choose_by_the_edges_and_their_disclosed_histograms(tmp_path, options):
    """a=0, so an edge's numerator is b minus the images it would have. Clients of 3 and 1, cycles of two rounds, b=5.

    The edge where client 0 was has 3 + 3 > 5; the other has at most 1 + 3 < 5. So client 0 changes edge in every second
    round, whatever client 1 did. Shares of 4 with b=5/4 give the same. With noise, 23 and 21: 46 > 45 and 21 + 23 < 45,
    where the true 3 would fit at both edges.
    """
    algorithm = FedPhD(local=STEP, cohort=None, r_g=2, variant="none", a=0.0, **options)
    run(one_weight_recipe(algorithm, rounds=16), tmp_path / "run")
    at = [x["noted"]["edges"]["0"] for x in rounds_of(tmp_path / "run")]
    assert [first + second for first, second in zip(at[::2], at[1::2])] == [1] * 8
    assert {*at[::2]} == {0, 1}, "in the first round of a cycle both edges are empty"


def test_unaggregated_work_does_not_influence_choices(tmp_path):
    """As above with b=5, but edges aggregate at a cycle's end. In its second round both still appear empty, with 5 - 3 = 2.

    Client 0 may stay or go. If unaggregated work counted, it would change edge in all eight cycles.
    """
    algorithm = FedPhD(local=STEP, cohort=None, r_e=2, r_g=2, variant="none", a=0.0, b=5.0)
    run(one_weight_recipe(algorithm, rounds=16), tmp_path / "run")
    at = [x["noted"]["edges"]["0"] for x in rounds_of(tmp_path / "run")]
    assert {first == second for first, second in zip(at[::2], at[1::2])} == {True, False}


def test_a_cycle_of_two_rounds(tmp_path):
    """r_g=2, half steps: edge 0 is 0, 0.5, 0.75, edge 1 is 0, -0.5, -0.75; by size (3 * 0.75 - 0.75) / 4 = 0.375.

    An edge counts its client twice, so n_e = 6 and 2. It restarts at zero in the next cycle.
    """
    recipe = one_weight_recipe(chosen(local=HALF_STEP, r_g=2, weights="size"), rounds=3)
    assert trained(recipe, tmp_path / "run") == 0.375, "the third round has not come to the cloud"
    lines = [json.loads(x) for x in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [x["phase"] for x in lines] == ["enrol", "federate", "federate", "federate"]
    assert [x["noted"]["n_e"] for x in lines[1:]] == [[3, 1], [6, 2], [3, 1]]
    assert lines[1]["noted"]["edges"] == {"0": 0, "1": 1} and lines[1]["noted"]["mu_e"] == pytest.approx([MU, MU])


def test_edges_that_aggregate_every_second_round(tmp_path):
    """One edge, half steps, by size. r_e=1: (3 * 0.5 - 0.5) / 4 = 0.25, then (3 * 0.625 - 0.375) / 4 = 0.375.

    r_e=2: both rounds start from 0 and give 0.5 and -0.5, with the mean 0.25.
    """
    for r_e, expected, n_e in ((1, 0.375, [[4], [8]]), (2, 0.25, [[0], [8]])):
        recipe = one_weight_recipe(by_hand(local=HALF_STEP, r_e=r_e, r_g=2, weights="size"), rounds=2)
        assert trained(recipe, tmp_path / str(r_e)) == expected
        assert [x["noted"]["n_e"] for x in rounds_of(tmp_path / str(r_e))] == n_e


def test_an_unreachable_edge_does_not_aggregate(tmp_path):
    """r_e=2, r_g=4, half steps, by size; edge 1 is out in round 2.

    Edge 0 has 0.5 (3 images), then 0.5 and -0.5 (3 and 1) of both clients: 2.5 / 7 from 7 images. From there client 0 goes
    half of the way to 1 twice: x = (2.5 / 7 + 1) / 2, n = 13. Edge 1 has not aggregated, so client 1 starts from 0 in rounds
    1, 3 and 4: -0.5, n = 3. Cloud: (13 x - 1.5) / 16 = 0.457589.
    """
    algorithm = chosen(local=HALF_STEP, r_e=2, r_g=4, weights="size", outages=((2, 1),))
    found = trained(one_weight_recipe(algorithm, rounds=4), tmp_path / "run")
    assert [x["noted"]["n_e"] for x in rounds_of(tmp_path / "run")] == [[0, 0], [7, 0], [7, 0], [13, 3]]
    assert found == pytest.approx((13 * (2.5 / 7 + 1) / 2 - 1.5) / 16, rel=1e-6) == pytest.approx(0.457589, abs=1e-6)


def test_the_regulariser():
    """lambda 0.1, theta 3: the gradient grows by 2 * 0.1 * 3. lambda_g is broadcast."""
    given = {"lambda_g": {"w": torch.tensor([[0.1], [0.0]])}}
    found = sparsifying({"w": torch.ones(2, 2)}, {"w": torch.full((2, 2), 3.0)}, given)
    assert found["w"].flatten().tolist() == pytest.approx([1.6, 1.6, 1.0, 1.0])


def test_clients_regularise_by_lambda_0():
    """lambda_0 = 1/4, and Q is clamped to 1 in both groups of three layers: 1/4 for the first layer, 1/2 for the middle one,
    which is in both. After pruning there is no regulariser.
    """
    model = ToyUnet().resolved(Shape(4, 1, 2)).initial(Stream((0,)))
    calls = []

    class Bench:
        data = None

        def load(self, theta):
            return theta

        def fit(self, net, solver, data, **how):
            calls.append(how)
            return Fit(1, 1, 0.0)

        unload = load

    for sparse in (True, False):
        FedPhD(local=ADAM, lambda_0=0.25).train(Bench(), model, sparse)
    given = calls[0]["given"]["lambda_g"]
    assert [given[k].unique().tolist() for k in ("down.weight", "middle.weight")] == [[0.25], [0.5]]
    assert calls[0]["direction"] is sparsifying and calls[1] == {}


def test_sparse_training_shrinks_what_will_be_cut(tmp_path):
    digests, norms = {}, {}
    for lambda_0 in (0.0, 1.0):
        algorithm = FedPhD(local=ADAM, cohort=None, r_g=1, R_s=9, lambda_0=lambda_0)
        digests[lambda_0] = run(toy_recipe(algorithm=algorithm, rounds=3), tmp_path / str(lambda_0)).weights_sha256
        norms[lambda_0] = load(tmp_path / str(lambda_0)).model.params["middle.weight"].norm().item()
    assert norms[1.0] < 0.8 * norms[0.0]
    never = FedPhD(local=ADAM, cohort=None, r_g=1, variant="none")
    assert run(toy_recipe(algorithm=never, rounds=3), tmp_path / "n").weights_sha256 == digests[0.0]


@spec
class Watched(FedPhD):
    """Clients do nothing, and report as their loss whether they are to regularise."""

    @on_client
    def train(self, client: Client, theta: Model, sparse: bool) -> FedPhDUpdate:
        return FedPhDUpdate(theta, float(sparse))


@pytest.mark.parametrize(("variant", "regularised"), [("sparse", [1, 1, 1, 1, 0, 0]), ("os", [0] * 6), ("none", [0] * 6)])
def test_it_is_regularised_until_the_cut(variant, regularised, tmp_path):
    """R_s=3, r_g=2: pruned at the end of round 4, which is a sparse round. Other variants are never regularised."""
    algorithm = Watched(local=ADAM, cohort=None, r_g=2, R_s=3, variant=variant, ratio=0.5)
    run(toy_recipe(algorithm=algorithm, rounds=6), tmp_path / "run")
    assert [x["loss"] for x in rounds_of(tmp_path / "run")] == regularised


def test_the_cloud_cuts_by_norm(tmp_path):
    """With lambda_0 = 0 the model before the cut is that of a run without pruning; the largest norms of it stay."""
    options = {"local": ADAM, "cohort": None, "r_g": 1, "R_s": 1, "lambda_0": 0.0, "ratio": 0.5}
    left = {}
    for variant in ("sparse", "none"):
        recipe = toy_recipe(algorithm=FedPhD(**options, variant=variant), rounds=1, model=ToyUnet(width=16))
        run(recipe, tmp_path / variant)
        left[variant] = load(tmp_path / variant).model
    expected = prune(left["none"], 0.5, "norm", Stream(("any",)))
    assert left["sparse"].arch == expected.arch and left["sparse"].params.digest() == expected.params.digest()


def test_one_shot_cuts_at_random():
    """Channels have norms in proportion 1, 2, 3, 4: by norm 3 and 4 would always stay. In thirty draws all six pairs do."""
    arch, size = ToyUnet().resolved(Shape(4, 1, 2)), torch.arange(1.0, 5.0)
    params = {k: torch.ones_like(t) for k, t in arch.initial(Stream((0,))).params.items()} | {"down.bias": size}
    params["down.weight"] = params["down.weight"] * size[:, None, None, None]
    params["middle.weight"] = params["middle.weight"] * size[None, :, None, None]
    model = Model(arch, Params(params), Buffers({}))

    class Fed:
        def __init__(self, seed):
            self.workbench = type("Workbench", (), {"stream": lambda self, purpose: Stream((seed, purpose))})()

    one_shot = FedPhD(local=STEP, variant="os", ratio=0.5)
    stayed = {tuple(one_shot.setup(model, Fed(seed)).model.params["down.bias"].tolist()) for seed in range(30)}
    assert stayed == {(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)}


def test_the_cut_in_the_middle_of_a_run(tmp_path):
    """Four channels to two: down 40 -> 20 parameters, middle 20 -> 6, up 37 -> 19. The run continues, samples and saves."""
    algorithm = FedPhD(local=ADAM, cohort=2, r_g=2, R_s=2, ratio=0.5)
    recipe = toy_recipe(
        algorithm=algorithm, rounds=4, evaluate=Evaluate(grid=2, every=1), sampler=Ancestral(batch=2), ema=0.5
    )
    result = run(recipe, tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [x["noted"].get("pruned_to") for x in lines[1:]] == [None, 45, None, None]
    sent = [x["traffic"]["links"]["client-edge"]["up"]["parameters"] for x in lines]
    assert sent == [0, 2 * 97, 2 * 97, 2 * 45, 2 * 45] and result.parameters == 45
    opened = load(tmp_path / "run")
    assert opened.model.arch.cut == "down:1>2 middle:2>2 up:2>1" and len(opened.sample(3).pixels) == 3
    assert "plain diffusers does not" in result.pruned and load(tmp_path / "run", ema=True).model.arch == opened.model.arch
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    trained = [[n > 0 for n in lines[i]["noted"]["n_e"]] for i in (2, 4)]  # the edges with work, in each of two cycles
    assert ledger["training"]["edges"] == {
        str(e): {"up": 4 * (97 * trained[0][e] + 45 * trained[1][e]), "down": 4 * (97 + 45)} for e in (0, 1)
    }
    assert ledger["costs"]["paper"] == pytest.approx(result.figures["paper_cost"]) and ledger["costs"]["paper"] > 0


def test_when_it_is_pruned():
    """At the first aggregation in the cloud from R_s on. A misaligned R_s causes a warning before a run."""

    def warned(rounds, **options):
        return FedPhD(local=STEP, **options).warnings(rounds)

    assert warned(100, R_s=50) == [] == warned(10, variant="none", r_g=5)
    assert "R_s=52 is not a multiple of r_g=5: the network is pruned in round 55" in warned(100, R_s=52)[0]
    assert "nothing is pruned" in warned(50, R_s=52)[0]
    assert warned(100, outages=((100, 0), (101, 1))) == ["outages: round 101 is after the last one, 100"]
    assert "the last 2 of 52 rounds never reach the cloud" in warned(52, R_s=50)[0]
    report = check(toy_recipe(algorithm=FedPhD(local=ADAM, r_g=2, R_s=3), rounds=3))
    assert len(report["warnings"]) == 2


def test_the_servers_average_is_over_models_that_the_cloud_made(tmp_path):
    """r_g = 2, four rounds, decay 1/2: the models of rounds 2 and 4 weigh 1 and 2 of 3. Other rounds do not count."""
    local = FedPhD(local=HALF_STEP, edges=1, cohort=None, r_g=2, variant="none")
    first, second = (trained(one_weight_recipe(local, rounds=n), tmp_path / str(n)) for n in (2, 4))
    trained(one_weight_recipe(local, rounds=4, ema=0.5), tmp_path / "averaged")
    assert first != second
    assert load(tmp_path / "averaged", ema=True).model.params["w"].item() == pytest.approx((first + 2 * second) / 3)
    trained(one_weight_recipe(local, rounds=1, ema=0.5), tmp_path / "none")
    assert load(tmp_path / "none", ema=True).model.params["w"].item() == 0.0, "the cloud has made none yet"


@pytest.mark.parametrize(
    ("variant", "rounds", "left"), [("none", 2, 97), ("os", 1, 45), ("sparse", 1, 97), ("sparse", 2, 45)]
)
def test_the_check_reports_what_is_left(variant, rounds, left):
    algorithm = FedPhD(local=ADAM, variant=variant, r_g=1, R_s=2, ratio=0.5)
    assert check(toy_recipe(algorithm=algorithm, rounds=rounds))["after"]["parameters"] == left


def test_an_unreachable_edge_is_replaced_by_the_next_best(tmp_path):
    """Edge 1 is out in round 2, which ends a cycle. Client 1 goes to edge 0, edge 1's work of round 1 is lost, and it
    receives the new model in round 3. By size, full steps: edge 0 has (3 * 1 - 1) / 4 = 0.5 and is alone in the cloud.
    """
    algorithm = chosen(r_g=2, weights="size", outages=((2, 1),))
    assert trained(one_weight_recipe(algorithm, rounds=2), tmp_path / "two") == 0.5
    run(one_weight_recipe(algorithm, rounds=3), tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[1:]]
    assert [x["noted"]["edges"] for x in lines] == [{"0": 0, "1": 1}, {"0": 0, "1": 0}, {"0": 0, "1": 1}]
    assert lines[1]["noted"]["n_e"] == [3 + 4, 1]
    assert [x["traffic"]["edges"] for x in lines] == [
        {"0": {"up": 0, "down": 4}, "1": {"up": 0, "down": 4}},
        {"0": {"up": 4, "down": 0}},
        {"0": {"up": 0, "down": 4}, "1": {"up": 0, "down": 4}},
    ]


@spec
class Wayward(FedPhD):
    """Both clients prefer edge 1; then client 0 edge 2, and client 1 edge 0."""

    @on_client
    def choose(self, client: Client, q: torch.Tensor, scale: float) -> EdgeChoice:
        return EdgeChoice((1, 2, 0) if client.id == 0 else (1, 0, 2))


def test_each_client_has_a_next_best_of_its_own(tmp_path):
    """Edge 1 is out in round 2, edges 1 and 2 are in round 3."""
    algorithm = Wayward(local=STEP, cohort=None, edges=3, r_g=1, variant="none", outages=((2, 1), (3, 1), (3, 2)))
    run(one_weight_recipe(algorithm, rounds=3), tmp_path / "run")
    chosen_edges = [x["noted"]["edges"] for x in rounds_of(tmp_path / "run")]
    assert chosen_edges == [{"0": 1, "1": 1}, {"0": 2, "1": 0}, {"0": 0, "1": 0}]


def test_the_next_best_is_the_next_likely():
    """Three edges with 10,000, 0 and 2500 images of the client's classes: one is drawn, the others follow by probability."""
    q = torch.tensor(np.array([images(0, 1, n=10_000), np.zeros(10), images(0, 1)]))
    choices = {FedPhD(local=STEP, edges=3).choose(Site(images(0, 1), seed), q, 1.0).edges for seed in range(60)}
    assert choices == {(1, 2, 0), (2, 1, 0), (0, 1, 2)}


def test_equally_likely_edges_follow_at_random():
    """The same edges with random selection: all six orders occur, so no edge is the second choice of all clients."""
    q = torch.tensor(np.array([images(0, 1, n=10_000), np.zeros(10), images(0, 1)]))
    algorithm = FedPhD(local=STEP, edges=3, selection="random")
    assert len({algorithm.choose(Site(images(0, 1), seed), q, 1.0).edges for seed in range(60)}) == 6


def test_a_wanted_distribution_has_a_share_for_every_class():
    with pytest.raises(RecipeError, match="algorithm.q_u: 3 shares, but there are 2 classes"):
        check(toy_recipe(algorithm=FedPhD(local=ADAM, cohort=2, q_u=(0.2, 0.3, 0.5))))


def test_a_histogram_is_disclosed_once(tmp_path):
    """One message of 2 floats for each client. The client keeps its noisy counts, and its budget is charged once."""
    algorithm = FedPhD(local=ADAM, cohort=2, r_g=1, variant="none", histogram=Laplace(epsilon=0.5))
    run(toy_recipe(algorithm=algorithm, rounds=2), tmp_path / "run")
    first = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert first["phase"] == "enrol" and first["traffic"]["bytes"] == {"up": 3 * 8, "down": 0, "total": 24}
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    charge = {"mechanism": "laplace(epsilon=0.5)", "epsilon": 0.5, "delta": 0.0, "times": 1}
    assert ledger["privacy"] == {"histogram": charge}
    ended = RunFolder(tmp_path / "run").load_checkpoint()
    for k, name in ended.snapshots.items():
        kept = Snapshots(tmp_path / "run" / "clients" / str(k)).read(name)["told"].counts
        assert kept == ended.server.histograms[k] and any(x != int(x) for x in kept)
    exact = FedPhD(local=ADAM, cohort=2, r_g=1, variant="none")
    run(toy_recipe(algorithm=exact, rounds=1), tmp_path / "exact")
    assert "privacy" not in json.loads((tmp_path / "exact" / "ledger.json").read_text())
    gaussian = check(toy_recipe(algorithm=FedPhD(local=ADAM, histogram=Gaussian(epsilon=1.0))))
    assert gaussian["privacy"]["histogram"]["delta"] == 1e-5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("r_e=2, r_g=5", "is not a multiple of r_e=2"),
        ("q_u=[0.5, 0.6]", "adds up to 1"),
        ("outages=[[0, 0]]", "rounds count from 1"),
        ("outages=[[3, 2]]", "there is no round 3 with an edge 2"),
        ("outages=[[3, 0], [3, 1]]", "no edge is left in round 3"),
        ("ratio=1.0", "ratio"),
    ],
)
def test_what_cannot_be_is_refused(text, why):
    with pytest.raises(RecipeError, match=why):
        build(parse(f"fedphd(local=sgd(lr=0.1, steps=1), {text})"), Spec, "algorithm")


def test_a_cohort_of_more_than_all_is_refused():
    with pytest.raises(RecipeError, match="algorithm.cohort: 9 clients a round, but there are 3"):
        check(toy_recipe(algorithm=FedPhD(local=ADAM, cohort=9)))


def test_a_per_step_average_is_refused():
    with pytest.raises(RecipeError, match="use the recipe's `ema`"):
        build(parse("fedphd(local=sgd(lr=0.1, steps=1, ema=0.9))"), Spec, "algorithm")


@pytest.mark.parametrize("edges", [(), (0, 0), (1,), (-1, 0), (0, 2)])
def test_an_invalid_choice_of_edges_is_refused(edges):
    """It comes from a site, so the answer is rejected and the server continues."""
    with pytest.raises(WireError, match="is not an order of edges"):
        EdgeChoice(edges)
