"""Robust reducers, with numbers computed by hand."""

import dataclasses

import pytest
import torch
from replies import ARCH, Declared, Scripted, earlier, model, params, reduced, reply, w
from toy import ADAM, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddiffuse import USplit
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.core.aggregate import Average, Reducer
from effuse.core.algorithm import Algorithm
from effuse.core.build import build
from effuse.core.errors import FederationError, RecipeError
from effuse.core.grammar import parse
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.recipe import Recipe
from effuse.core.reducers import Clipped, Krum, Median, Trimmed
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.runs.driver import run
from effuse.tools.check import check
from effuse.transport import refusals

# ---- rules that compare all replies ----


def test_the_median_of_five_and_of_four():
    """Of 1 2 3 4 100 it is 3; of 1 2 4 100 the mean of 2 and 4. Weights do not matter. The counter is the largest one."""
    five = ((100.0, 50.0, 1), (1.0, 1.0, 9), (3.0, 1.0, 2), (2.0, 1.0, 3), (4.0, 7.0, 0))
    answers = [reply(w, weight, counter=n) for w, weight, n in five]
    result = reduced(answers, by=Median())
    assert w(result) == 3.0 and result.value.model.buffers["n"] == 9 and result.heard == (0, 1, 2, 3, 4)
    assert w(reduced([answers[i] for i in (0, 1, 3, 4)], by=Median())) == 3.0


def test_the_median_is_by_coordinate_and_includes_parts_and_running_means():
    three = ((1.0, 9.0, 2.0), (2.0, 8.0, None), (3.0, 1.0, 4.0))
    answers = [reply(0.0, dc=params(a, b), parts={"x": params(b)}, contrast=c, running=a) for a, b, c in three]
    result = reduced(answers, by=Median())
    assert [t.item() for t in result.value.dc.tensors] == [2.0, 8.0] and result.value.parts["x"]["p0"] == 8.0
    assert result.value.model.buffers["mean"] == 2.0 and result.value.contrast == 3.0, "single numbers are always averaged"


def test_a_trimmed_mean():
    """Of 1 2 3 4 100, a share of 0.2 drops one at either end: (2 + 3 + 4) / 3 = 3. 0.39 (1.95 replies) and 0.4 drop two.

    With one reply missing, 0.2 of four is 0.8 of a reply: one is still dropped at either end, (2 + 3) / 2 = 2.5.
    """
    answers = [reply(v) for v in (100.0, 1.0, 3.0, 2.0, 4.0)]
    for share, middle in ((0.2, 3.0), (0.39, 3.0), (0.4, 3.0)):
        assert w(reduced(answers, by=Trimmed(share=share))) == middle
    answers[2] = reply(6.0)  # of 1 2 4 6 100: (2 + 4 + 6) / 3 = 4, and 4 alone
    assert w(reduced(answers, by=Trimmed(share=0.2))) == 4.0 and w(reduced(answers, by=Trimmed(share=0.4))) == 4.0
    assert Trimmed(share=0.29).drops(100) == 29
    assert w(reduced([reply(v) for v in (1e6, 1.0, 3.0, 2.0)], by=Trimmed(share=0.2))) == 2.5
    assert Trimmed(share=0.3).lacks(3) is None and "drops 2 of 3 replies at either end" in Trimmed(share=0.34).lacks(3)
    with pytest.raises(FederationError, match="drops 1 of 2 replies at either end, which leaves none"):
        reduced([reply(1.0), reply(2.0)], by=Trimmed(share=0.3))


def test_krum():
    """Five clients, f = 1, so the distances to the two nearest others count.

    For 0 1 3 4 100 the sums of squares are 10 at 0 (1 + 9), 5 at 1 (1 + 4), 5 at 3 (1 + 4) and 10 at 4 (1 + 9).
    1 and 3 are equal, so the reply of the lower client number is taken.
    """
    values = (0.0, 3.0, 1.0, 4.0, 100.0)
    answers = [reply(v, weight=1.0 + i, running=float(i), counter=i) for i, v in enumerate(values)]
    for a in answers:  # without the running mean, which would be part of the distance
        object.__setattr__(a, "model", Model(ARCH, a.model.params, Buffers({"n": a.model.buffers["n"]})))
    result = reduced(answers, by=Krum(f=1))
    assert w(result) == 3.0 and result.value.model.buffers["n"] == 4, "client 1's weight; the largest counter"
    fed = Scripted({k: answers[k] for k in range(5)})
    reordered = fed.mean(Declared().train, [4, 2, 3, 1, 0], by=Krum(f=1), model=model(0.0))
    assert w(reordered) == 3.0, "the lowest client number, whatever the order of asking"


def test_krum_measures_all_fields_together():
    """The models 0, 0.1 and 0.2 alone would choose client 0, as all scores are 0.01.

    With differences of 5, 0 and 0, client 0 has a score above 25, so client 1 is chosen.
    """
    answers = [reply(0.1 * i, dc=params(d)) for i, d in enumerate((5.0, 0.0, 0.0))]
    result = reduced(answers, by=Krum(f=0))
    assert w(result) == pytest.approx(0.1) and result.value.dc["p0"] == 0.0
    assert w(reduced([reply(0.1 * i) for i in range(3)], by=Krum(f=0))) == 0.0


def test_krum_needs_two_f_and_three():
    with pytest.raises(
        FederationError, match=r"round 0, job 'train': krum\(f=1\) needs 2 f \+ 3 = 5 replies, not 4; lower f"
    ):
        reduced([reply(1.0)] * 4, by=Krum(f=1))


@pytest.mark.parametrize("by", [Median(), Trimmed(share=0.34), Krum(f=0)])
def test_reducers_that_compare_replies_refuse_unequal_parts(by):
    answers = [reply(0.0, parts={part: params(1.0)}) for part in "aab"]
    with pytest.raises(
        FederationError, match=r"clients 0 and 2 report different parts, and .* needs equal ones; use mean\(\)"
    ):
        reduced(answers, by=by)
    with pytest.raises(FederationError, match="cannot go on from a mean"):
        reduced(answers[:1], by=by, start=earlier(1.0, 1.0))


def test_the_bytes_of_held_replies_are_counted():
    """Three replies, each a weight, a running mean and two differences of 4 bytes and a counter of 8."""
    fed = Scripted({k: reply(1.0, dc=params(1.0, 2.0)) for k in range(3)})
    fed.mean(Declared().train, range(3), by=Median(), model=model(0.0))
    assert fed.held == 3 * 24


# ---- clipping ----


def test_clipped():
    """Sent 1; the replies 1.5 and 5 differ by 0.5 and 4. At norm 1 the second becomes 2: (3 x 1.5 + 2) / 4 = 1.625.

    Buffers are not clipped.
    """
    fed = Scripted({0: reply(1.5, 3.0), 1: reply(5.0, 1.0, running=8.0)})
    result = fed.mean(Declared().train, [0, 1], by=Clipped(norm=1.0), model=model(1.0))
    assert w(result) == 1.625 and result.value.model.buffers["mean"] == 2.0


def test_the_norm_is_over_all_fields_and_differences_are_measured_from_zero():
    """Sent 1, replied 4 and a difference of 4: sqrt(9 + 16) = 5. At norm 1 a fifth of both is left: 1.6 and 0.8."""
    fed = Scripted({0: reply(4.0, dc=params(4.0))})
    result = fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert w(result) == pytest.approx(1.6) and result.value.dc["p0"].item() == pytest.approx(0.8)


def test_clipped_measures_parts_from_the_model():
    """The part w is sent as 1 and returned as 3; at norm 1 it becomes 2. The model is returned unchanged."""
    fed = Scripted({0: reply(1.0, parts={"x": Params({"w": torch.tensor(3.0)})})})
    result = fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert result.value.parts["x"]["w"] == 2.0 and w(result) == 1.0


def test_clipped_measures_from_the_model_as_it_arrived():
    """1.001 is sent as 1 in bf16. A reply of 3 is clipped to 1 + 1 = 2, not to 2.001."""
    fed = Scripted({0: reply(3.0)}, wire="bf16")
    assert w(fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.001))) == 2.0


def test_clipped_needs_the_model_that_was_sent():
    with pytest.raises(
        FederationError, match="from the one model that was sent with the reply's architecture, and there are 0"
    ):
        Scripted({0: reply(1.0)}).mean(Declared().guided, [0], by=Clipped(norm=1.0), guide="a", note=None)


def test_clipped_measures_from_the_model_of_the_replys_architecture():
    """A guide of another architecture is sent beside the model: the difference 5 - 1 = 4 is scaled to 1, so 2 is left."""
    other = dataclasses.replace(ARCH, classes=3)
    sent = Pair(model(1.0), Model(other, Params({"w": torch.tensor(9.0)}), Buffers({})))
    values = {"model": model(5.0)}
    assert Clipped(norm=1.0).prepared(values, sent, "fp32")["model"].params["w"] == 2.0


@message(name="test.pair")
class Pair:
    model: Model
    guide: Model


def test_a_norm_that_no_client_reaches_is_fedavg(tmp_path):
    a = run(toy_recipe(algorithm=FedAvg(local=ADAM)), tmp_path / "a")
    b = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=1e6))), tmp_path / "b")
    c = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=0.05))), tmp_path / "c")
    assert a.weights_sha256 == b.weights_sha256 != c.weights_sha256


# ---- as a key of a recipe ----


def test_the_key_is_written_only_where_it_differs_from_the_default():
    assert text(FedAvg(local=ADAM), full=False) == text(FedAvg(local=ADAM, aggregate=Average()), full=False)
    assert "aggregate" not in text(FedAvg(local=ADAM), full=False)
    chosen = FedAvg(local=ADAM, aggregate=Krum(f=2))
    assert "aggregate=krum(f=2)" in text(chosen) and build(parse(text(chosen)), Algorithm, "") == chosen
    with pytest.raises(RecipeError, match="no reducer 'reducer'; valid: clipped, krum, mean, median, trimmed"):
        build(parse("reducer()"), Reducer, "aggregate")
    for source in ("mean()", "median()", "trimmed(share=0.1)", "krum(f=1)", "clipped(norm=2.0)"):
        assert isinstance(build(parse(source), Reducer, ""), Reducer)


def test_a_recipe_saved_before_the_key_existed_is_the_same_recipe():
    recipe = toy_recipe()
    saved = recipe.saved()
    older = saved | {"algorithm": saved["algorithm"].replace(f", aggregate={text(Average())}", "")}
    assert older != saved and Recipe.restore(older) == recipe


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (FedAvg(local=ADAM, aggregate=Krum(f=1)), r"aggregate: krum\(f=1\) needs 2 f \+ 3 = 5 replies, not 3"),
        (FedAvg(local=ADAM, cohort=2, aggregate=Krum(f=0)), "= 3 replies, not 2"),
        (FedAvg(local=ADAM, aggregate=Trimmed(share=0.34)), "drops 2 of 3 replies at either end, which leaves none"),
        (
            USplit(local=ADAM, aggregate=Median()),
            "median.. needs equal parts of all clients, and those of feddiffuse_usplit",
        ),
        (MoFedSAM(local=ADAM, aggregate=Median()), "median.., but mofedsam divides each update by its client's own steps"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_computed(algorithm, words):
    with pytest.raises(RecipeError, match=words):
        check(toy_recipe(algorithm=algorithm))


def test_check_reports_the_bytes_and_refuses_too_many(monkeypatch):
    """The toy network has 97 values in 388 bytes; three clients' replies are held."""
    recipe = toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Median()))
    result = check(recipe)["memory"]
    assert result["cohort"] == 3 * 388 and result["total"] == sum(v for k, v in result.items() if k != "total")
    assert check(toy_recipe())["memory"]["cohort"] == 0
    monkeypatch.setattr(refusals, "machine_memory", lambda: 1000)
    with pytest.raises(
        RecipeError, match="holds the replies of a whole cohort, 1,164 bytes, and this machine has 1,000 bytes"
    ):
        check(recipe)
    check(toy_recipe())


def test_the_toy_model_has_the_size_assumed_above():
    assert ToyUnet(side=4, channels=1, classes=2).initial(Stream((1,))).params.nbytes == 388


def test_a_quorum_must_leave_enough_replies():
    """Three clients: with a quorum of two a round may end with two replies, and Krum needs three."""
    recipe = toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Krum(f=0)))
    with pytest.raises(
        RecipeError, match=r"--quorum 2: a round may end with 2 replies, and krum\(f=0\) needs .* raise the quorum"
    ):
        refusals.refuse_quorum(recipe, 2)
    refusals.refuse_quorum(recipe, 3)
    refusals.refuse_quorum(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Median())), 1)
