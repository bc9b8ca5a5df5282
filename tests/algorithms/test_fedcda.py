"""FedCDA by hand: the objective of a choice, the cache, and how rounds go on from the chosen models."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hand import HandNet, one_weight_recipe, trained
from torch import Tensor
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedcda import Cached, FedCDA, gram_of, objectives, product, selected
from effuse.core.errors import RecipeError
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.reducers import Median
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.core.task import Batch, Prediction
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder

STEP = SGD(lr=0.25, batch=4, steps=1)


def cached(client: int, w: float, objective: float) -> Cached:
    return Cached(client, Model(HandNet(), Params({"w": torch.tensor(w)}), Buffers({})), objective)


@spec
class HandPrediction(Prediction):
    """The hand task with an error for each image."""

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.x,)

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        return (output - batch.x.flatten()) ** 2


# the newest first
A_AND_B = (cached(0, 0.0, 0.1), cached(0, 2.0, 0.2), cached(1, 3.0, 0.1), cached(1, 1.0, 0.3))


def test_the_objective_by_hand():
    """A has w 0 (loss 0.1) and 2 (0.2), B has 3 (0.1) and 1 (0.3); L 1.

    0 and 3: 0.1 + (4.5 - 2.25) / 2 = 1.225. 0 and 1: 0.2 + (0.5 - 0.25) / 2 = 0.325. 2 and 3: 0.15 + (6.5 - 6.25) / 2 =
    0.275. 2 and 1: 0.25 + (2.5 - 2.25) / 2 = 0.375.
    """
    F, gram = np.array([c.objective for c in A_AND_B]), gram_of(A_AND_B, {}).numpy()
    choices = np.array([[0, 2], [0, 3], [1, 2], [1, 3]])
    assert objectives(F, gram, [], choices, 1.0).tolist() == pytest.approx([1.225, 0.325, 0.275, 0.375])
    # the same with B's model held, and without the spread
    assert objectives(F, gram, [2], np.array([[0], [1]]), 1.0).tolist() == pytest.approx([1.225, 0.275])
    assert objectives(F, gram, [], choices, 0.0).tolist() == pytest.approx([0.1, 0.2, 0.15, 0.25])


def test_clients_are_chosen_together_or_one_after_the_other():
    """Together 2 and 3. With B first and A held at 0, B's best is 1 (0.325); then A has 0.325 or 0.375 and stays at 0."""
    newest = {0: 0, 1: 2}
    gram = gram_of(A_AND_B, {})
    assert selected(A_AND_B, gram, newest, [[0, 1]], 1.0) == {0: 1, 1: 2}
    assert selected(A_AND_B, gram, newest, [[1], [0]], 1.0) == {0: 0, 1: 3}
    assert selected(A_AND_B, gram, newest, [[0]], 1.0) == {0: 1, 1: 2}, "B is away and keeps its model"


def test_of_equal_choices_the_newest_is_taken():
    cache = (cached(0, 1.0, 0.5), cached(0, 1.0, 0.5))
    assert selected(cache, gram_of(cache, {}), {0: 0}, [[0]], 1.0) == {0: 0}


def random_cache(clients: int, models: int):
    generator = torch.Generator().manual_seed(0)

    def one(client: int) -> Cached:
        params = Params({"a": torch.randn(5, generator=generator), "b": torch.randn(2, 3, generator=generator)})
        return Cached(client, Model(HandNet(), params, Buffers({})), float(torch.rand((), generator=generator)))

    return tuple(one(k) for k in range(clients) for _ in range(models))


def test_the_choice_is_that_of_the_models_themselves():
    """Every choice of three clients beside a fourth that is held, by models instead of their products."""
    cache = random_cache(4, 3)
    flat = [torch.cat([t.flatten() for t in c.model.params.tensors]).double() for c in cache]

    def value(rows) -> float:
        spread = (
            torch.stack([flat[r].square().sum() for r in rows]).mean() - sum(flat[r] for r in rows).div(4).square().sum()
        )
        return float(sum(cache[r].objective for r in rows) / 4 + 0.1 / 2 * spread)

    best = min(itertools.product(range(3), range(3, 6), range(6, 9), [10]), key=value)
    found = selected(cache, gram_of(cache, {}), {0: 0, 1: 3, 2: 6, 3: 10}, [[0, 1, 2]], 0.1)
    assert tuple(found.values()) == best and best != (0, 3, 6, 10)


def test_known_products_are_not_computed_again():
    cache = random_cache(2, 2)
    whole = gram_of(cache, {})
    assert torch.equal(whole, whole.T) and whole[1, 2].item() == product(cache[1].model.params, cache[2].model.params)
    assert gram_of(cache, {(0, 1): 7.0})[1, 0] == 7.0


def test_warm_up_is_fedavg(tmp_path):
    """To the bit, while the cache fills: of three rounds none chooses."""
    recipes = [toy_recipe(algorithm=a, rounds=3) for a in (FedCDA(local=ADAM, warmup=1.0), FedAvg(local=ADAM))]
    a, b = (run(recipe, tmp_path / recipe.algorithm.name) for recipe in recipes)
    assert a.weights_sha256 == b.weights_sha256 and a.traffic.bytes == b.traffic.bytes
    ended = RunFolder(tmp_path / "fedcda").load_checkpoint().server
    assert [c.client for c in ended.cache] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and ended.gram is None
    assert ended.chosen == {0: 0, 1: 3, 2: 6}, "the newest"
    (told,) = recipes[0].algorithm.warnings(3)
    assert "all 3 rounds are FedAvg's" in told and FedCDA(local=ADAM).warnings(100) == []


def test_two_rounds_by_hand(tmp_path):
    """One step of lr 0.25 moves half way to 1 and -1. Round 1 is FedAvg's: 0.5 and -0.5, by size 0.25.

    Round 2: 0.625 and -0.375. The losses (w - x)^2: client 0 has 0.140625 now and 0.25 before, client 1 0.390625 and 0.25.
    Now and now: 0.265625 + 1/2 (0.265625 - 0.015625) = 0.390625. Now and before: 0.195313 + 1/2 (0.320313 - 0.003906) =
    0.353516. Before and now: 0.320313 + 1/2 (0.195313 - 0.003906) = 0.416016. Both before: 0.25 + 1/2 0.25 = 0.375.
    The second is the least: (0.625 - 0.5) / 2 = 0.0625.
    """
    recipe = one_weight_recipe(FedCDA(local=STEP, warmup=1, batches=1), rounds=2, task=HandPrediction())
    assert trained(recipe, tmp_path) == pytest.approx(0.0625)
    records = RunFolder(tmp_path).records()
    assert not records[0].noted and records[1].noted["age"] == {"0": 0, "1": 1}


def test_the_cache_keeps_the_last_models_and_who_is_away_keeps_its_own(tmp_path):
    """Two of three clients a round and two models each: never more than two, the newest first, and the mean is plain."""
    algorithm = FedCDA(local=ADAM, cohort=2, cache=2, batches=1, warmup=2)
    run(toy_recipe(algorithm=algorithm, rounds=6), tmp_path / "run")
    ended = RunFolder(tmp_path / "run").load_checkpoint().server
    clients = [c.client for c in ended.cache]
    assert clients == sorted(clients) and {clients.count(k) for k in range(3)} == {2}
    assert {k: ended.cache[place].client for k, place in ended.chosen.items()} == {0: 0, 1: 1, 2: 2}
    torch.testing.assert_close(ended.gram, gram_of(ended.cache, {}), rtol=0, atol=0)
    chosen = [ended.cache[place].model.params for place in ended.chosen.values()]
    mean = (chosen[0] + chosen[1] + chosen[2]) / 3.0
    assert (mean - ended.model.params).norm() < 1e-6 * mean.norm()
    ages = [r.noted["age"] for r in RunFolder(tmp_path / "run").records() if r.noted]
    assert len(ages) == 4 and {age for each in ages for age in each.values()} <= {0, 1}


def test_places_in_the_cache_follow_their_models():
    """Client 1 answers: its oldest model goes, and the others' models are found at their new places."""
    cache = tuple(dataclasses.replace(c, objective=float(i)) for i, c in enumerate(random_cache(3, 2)))
    new = cached(1, 0.0, 9.0)
    found, now = FedCDA(local=ADAM, cache=2).renewed(cache, {1: new})
    assert [c.objective for c in found] == [0.0, 1.0, 9.0, 2.0, 4.0, 5.0] and found[2] is new
    assert now == {0: 0, 1: 1, 2: 3, 4: 4, 5: 5}
    first, now = FedCDA(local=ADAM, cache=2).renewed((), {2: new, 0: new})
    assert len(first) == 2 and now == {}


def test_a_share_of_the_rounds_can_be_warm_up():
    assert FedCDA(local=ADAM).rounds_before(40) == 20 and FedCDA(local=ADAM, warmup=50).rounds_before(100) == 50


def test_too_many_choices_and_other_means_are_refused(tmp_path):
    """Twelve clients in one batch with three models each: 3^12 = 531,441 choices."""
    recipe = toy_recipe(algorithm=FedCDA(local=ADAM, batches=1), clients=12)
    with pytest.raises(RecipeError, match="12 clients with 3 models each have 3.12 choices, of at most 100,000; raise"):
        run(recipe, tmp_path / "run")
    with pytest.raises(RecipeError, match="median.., but fedcda takes the plain mean of models that it chooses"):
        run(toy_recipe(algorithm=FedCDA(local=ADAM, aggregate=Median())), tmp_path / "run")
