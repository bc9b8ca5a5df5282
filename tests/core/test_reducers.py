"""Robust reducers by hand: one or two weights, three to five clients."""

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
    """Of 1 2 3 4 100 it is 3; of 1 2 4 100 the mean of 2 and 4. Weights do not matter; the largest counter is kept."""
    five = ((100.0, 50.0, 1), (1.0, 1.0, 9), (3.0, 1.0, 2), (2.0, 1.0, 3), (4.0, 7.0, 0))
    answers = [reply(w, weight, counter=n) for w, weight, n in five]
    found = reduced(answers, by=Median())
    assert w(found) == 3.0 and found.value.model.buffers["n"] == 9 and found.heard == (0, 1, 2, 3, 4)
    assert w(reduced([answers[i] for i in (0, 1, 3, 4)], by=Median())) == 3.0


def test_the_median_goes_by_coordinate_and_reaches_parts_and_running_means():
    three = ((1.0, 9.0, 2.0), (2.0, 8.0, None), (3.0, 1.0, 4.0))
    answers = [reply(0.0, dc=params(a, b), parts={"x": params(b)}, contrast=c, running=a) for a, b, c in three]
    found = reduced(answers, by=Median())
    assert [t.item() for t in found.value.dc.tensors] == [2.0, 8.0] and found.value.parts["x"]["p0"] == 8.0
    assert found.value.model.buffers["mean"] == 2.0 and found.value.contrast == 3.0, (
        "a number is averaged, whatever the rule"
    )


def test_a_trimmed_mean():
    """Of 1 2 3 4 100, a share of 0.2 drops one at either end: (2 + 3 + 4) / 3 = 3; 0.4 drops two; 0.39 of five is 1.95, so one."""
    answers = [reply(v) for v in (100.0, 1.0, 3.0, 2.0, 4.0)]
    for share, middle in ((0.2, 3.0), (0.39, 3.0), (0.4, 3.0)):
        assert w(reduced(answers, by=Trimmed(share=share))) == middle
    answers[2] = reply(6.0)  # of 1 2 4 6 100: (2 + 4 + 6) / 3 = 4, and 4 alone
    assert w(reduced(answers, by=Trimmed(share=0.2))) == 4.0 and w(reduced(answers, by=Trimmed(share=0.4))) == 4.0
    assert Trimmed(share=0.29).drops(100) == 29
    assert "drops none of 3 replies" in Trimmed(share=0.3).lacks(3)


def test_krum():
    """Five clients, f = 1: the two nearest others count. Of 0 1 3 4 100 the sums of squares are 0: 1 + 9 = 10; 1: 1 + 4 = 5;
    3: 1 + 4 = 5; 4: 1 + 9 = 10; so 1 and 3 are equal, and the lower client's is taken, with what else it brought."""
    values = (0.0, 3.0, 1.0, 4.0, 100.0)
    answers = [reply(v, weight=1.0 + i, running=float(i), counter=i) for i, v in enumerate(values)]
    for a in answers:  # the running mean is part of the distance: here it is none
        object.__setattr__(a, "model", Model(ARCH, a.model.params, Buffers({"n": a.model.buffers["n"]})))
    found = reduced(answers, by=Krum(f=1))
    assert w(found) == 3.0 and found.value.model.buffers["n"] == 4, "client 1's weight; the largest counter"
    there = Scripted({k: answers[k] for k in range(5)})
    turned = there.mean(Declared().train, [4, 2, 3, 1, 0], by=Krum(f=1), model=model(0.0))
    assert w(turned) == 3.0, "the lowest number, in whatever order they are asked"


def test_krum_measures_all_fields_together():
    """Models 0 0.1 0.2 alone would give client 0, too, by 0.01. With differences of 5 0 0, 1 and 2 are 0.01 apart and 0 over 25
    from both, so it is client 1."""
    answers = [reply(0.1 * i, dc=params(d)) for i, d in enumerate((5.0, 0.0, 0.0))]
    found = reduced(answers, by=Krum(f=0))
    assert w(found) == pytest.approx(0.1) and found.value.dc["p0"] == 0.0
    assert w(reduced([reply(0.1 * i) for i in range(3)], by=Krum(f=0))) == 0.0


def test_krum_needs_two_f_and_three():
    with pytest.raises(
        FederationError, match=r"round -1, job 'train': krum\(f=1\) needs 2 f \+ 3 = 5 replies, not 4; lower f"
    ):
        reduced([reply(1.0)] * 4, by=Krum(f=1))


@pytest.mark.parametrize("by", [Median(), Trimmed(share=0.34), Krum(f=0)])
def test_unequal_parts_are_refused_by_those_who_compare_them(by):
    answers = [reply(0.0, parts={part: params(1.0)}) for part in "aab"]
    with pytest.raises(
        FederationError, match=r"clients 0 and 2 report different parts, and .* needs equal ones; use mean\(\)"
    ):
        reduced(answers, by=by)
    with pytest.raises(FederationError, match="cannot go on from a mean"):
        reduced(answers[:1], by=by, start=earlier(1.0, 1.0))


def test_what_is_held_is_counted():
    """Three replies, each a weight, a running mean and two differences of 4 bytes and a counter of 8."""
    fed = Scripted({k: reply(1.0, dc=params(1.0, 2.0)) for k in range(3)})
    fed.mean(Declared().train, range(3), by=Median(), model=model(0.0))
    assert fed.held == 3 * 24


# ---- clipping ----


def test_clipped():
    """Sent 1; replies 1.5 and 5 differ by 0.5 and 4. At norm 1 the second becomes 2: (3 x 1.5 + 2) / 4 = 1.625. Buffers stay."""
    fed = Scripted({0: reply(1.5, 3.0), 1: reply(5.0, 1.0, running=8.0)})
    found = fed.mean(Declared().train, [0, 1], by=Clipped(norm=1.0), model=model(1.0))
    assert w(found) == 1.625 and found.value.model.buffers["mean"] == 2.0


def test_clipped_takes_all_fields_together_and_differences_from_nought():
    """Sent 1, replied 4 and a difference of 4: sqrt(9 + 16) = 5. At norm 1 a fifth of both is left: 1.6 and 0.8."""
    fed = Scripted({0: reply(4.0, dc=params(4.0))})
    found = fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert w(found) == pytest.approx(1.6) and found.value.dc["p0"].item() == pytest.approx(0.8)


def test_clipped_measures_parts_from_the_model():
    """The part w was sent as 1 and comes as 3, the model stays: at norm 1, half of the way, 2."""
    fed = Scripted({0: reply(1.0, parts={"x": Params({"w": torch.tensor(3.0)})})})
    found = fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert found.value.parts["x"]["w"] == 2.0 and w(found) == 1.0


def test_clipped_measures_from_what_arrived():
    """1.001 travels as 1 in bf16: a reply of 1 has not moved, and one of 2 has moved by 1, not by 0.999."""
    fed = Scripted({0: reply(3.0)}, wire="bf16")
    assert w(fed.mean(Declared().train, [0], by=Clipped(norm=1.0), model=model(1.001))) == 2.0


def test_clipped_needs_the_model_that_was_sent():
    with pytest.raises(FederationError, match="from the one model that a client was sent, and it was sent 0"):
        Scripted({0: reply(1.0)}).mean(Declared().guided, [0], by=Clipped(norm=1.0), guide="a", note=None)


def test_a_norm_that_nobody_reaches_is_fedavg(tmp_path):
    a = run(toy_recipe(algorithm=FedAvg(local=ADAM)), tmp_path / "a")
    b = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=1e6))), tmp_path / "b")
    c = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=0.05))), tmp_path / "c")
    assert a.weights_sha256 == b.weights_sha256 != c.weights_sha256


# ---- as a key of a recipe ----


def test_the_key_is_written_only_where_it_was_chosen():
    assert text(FedAvg(local=ADAM), full=False) == text(FedAvg(local=ADAM, aggregate=Average()), full=False)
    assert "aggregate" not in text(FedAvg(local=ADAM), full=False)
    chosen = FedAvg(local=ADAM, aggregate=Krum(f=2))
    assert "aggregate=krum(f=2)" in text(chosen) and build(parse(text(chosen)), Algorithm, "") == chosen
    with pytest.raises(RecipeError, match="no reducer 'reducer'; valid: clipped, krum, mean, median, trimmed"):
        build(parse("reducer()"), Reducer, "aggregate")
    for source in ("mean()", "median()", "trimmed(share=0.1)", "krum(f=1)", "clipped(norm=2.0)"):
        assert isinstance(build(parse(source), Reducer, ""), Reducer)


def test_a_recipe_of_before_there_was_the_key_is_the_same_recipe():
    recipe = toy_recipe()
    saved = recipe.saved()
    older = saved | {"algorithm": saved["algorithm"].replace(", aggregate=mean()", "")}
    assert older != saved and Recipe.restore(older) == recipe


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (FedAvg(local=ADAM, aggregate=Krum(f=1)), r"aggregate: krum\(f=1\) needs 2 f \+ 3 = 5 replies, not 3"),
        (FedAvg(local=ADAM, cohort=2, aggregate=Krum(f=0)), "= 3 replies, not 2"),
        (FedAvg(local=ADAM, aggregate=Trimmed(share=0.1)), "drops none of 3 replies; raise share"),
        (
            USplit(local=ADAM, aggregate=Median()),
            "median.. needs equal parts of all clients, and those of feddiffuse_usplit",
        ),
        (MoFedSAM(local=ADAM, aggregate=Median()), "median.., but mofedsam divides each update by its client's own steps"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_computed(algorithm, words):
    with pytest.raises(RecipeError, match=words):
        check(toy_recipe(algorithm=algorithm))


def test_check_tells_the_bytes_and_refuses_too_many(monkeypatch):
    """The toy's 97 values are 388 bytes; three clients' replies are held."""
    recipe = toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Median()))
    found = check(recipe)["memory"]
    assert found["cohort"] == 3 * 388 and found["total"] == sum(v for k, v in found.items() if k != "total")
    assert check(toy_recipe())["memory"]["cohort"] == 0
    monkeypatch.setattr(refusals, "machine_memory", lambda: 1000)
    with pytest.raises(
        RecipeError, match="holds the replies of a whole cohort, 1,164 bytes, and this machine has 1,000 bytes"
    ):
        check(recipe)
    check(toy_recipe())


def test_the_initial_model_of_the_toy_is_what_the_tests_above_count():
    assert ToyUnet(side=4, channels=1, classes=2).initial(Stream((1,))).params.nbytes == 388
