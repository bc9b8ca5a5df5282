"""Reducers by hand: one or two weights, two or five clients; and what a federation makes of declared fields."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from hand import HandNet
from toy import ADAM, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.feddiffuse import USplit
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.core.aggregate import (
    Average,
    Clipped,
    Krum,
    Median,
    Reduced,
    Reducer,
    Trimmed,
    by_count,
    by_weight,
    reduced_fields,
)
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.build import build
from effuse.core.errors import FederationError, ModelError, RecipeError
from effuse.core.federation import Federation
from effuse.core.grammar import parse
from effuse.core.message import message, message_hints
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.spec import spec, text
from effuse.core.wire import decode, encode
from effuse.core.workbench import Client, Workbench
from effuse.machines.hollow import Hollow
from effuse.runs.driver import run
from effuse.tasks.denoise import Denoise
from effuse.tools.check import check
from effuse.transport import refusals

ARCH = HandNet(side=1, channels=1, classes=2)


@message
class Told:
    """Everything that can be reduced."""

    model: Annotated[Model, by_weight]
    dc: Annotated[Params | None, by_count]
    parts: Annotated[dict[str, Params], by_weight]
    contrast: Annotated[float | None, by_count]
    score: Annotated[float | None, by_weight]
    weight: float = 1.0
    loss: float = 0.0


@spec
class Telling(Algorithm):
    """Its jobs are never done: the answers are given by the federation below."""

    def round(self, server: Server, fed: Federation) -> Server:
        return server

    @on_client
    def train(self, client: Client, model: Model) -> Told: ...

    @on_client
    def guided(self, client: Client, guide: str, note: str | None) -> Told: ...

    @on_client
    def nothing(self, client: Client) -> Server: ...


class Answering(Federation):
    """Clients whose answers are written down; one that has none is silent."""

    def __init__(self, answers: dict[int, Any], clients: int = 5, wire: str = "fp32") -> None:
        super().__init__(Telling(), range(clients), Workbench(Hollow(), Denoise(), 1), 0, wire)
        self.answers, self.sent = answers, {}

    def _dispatch(self, job: Any, orders: dict[int, Any], messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        self.sent = messages
        return self._given(orders)

    def _given(self, orders: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        for k in orders:
            if k in self.answers:
                yield k, self.answers[k]() if callable(self.answers[k]) else self.answers[k], None


def model(w: float, counter: int = 0, running: float = 0.0) -> Model:
    return Model(ARCH, Params({"w": torch.tensor(w)}), Buffers({"n": torch.tensor(counter), "mean": torch.tensor(running)}))


def params(*values: float) -> Params:
    return Params({f"p{i}": torch.tensor(v) for i, v in enumerate(values)})


def told(w: float, weight: float = 1.0, *, counter: int = 0, running: float = 0.0, **fields: Any) -> Told:
    others = {"dc": None, "parts": {}, "contrast": None, "score": None} | fields
    return Told(model(w, counter, running), weight=weight, **others)


def reduced(answers: list[Told], **options: Any) -> Reduced:
    fed = Answering(dict(enumerate(answers)))
    return fed.mean(Telling().train, range(len(answers)), model=model(0.0), **options)


def w(found: Any) -> float:
    return found.value.model.params["w"].item()


# ---- the mean ----


def test_a_model_is_weighed_and_a_difference_is_counted():
    """Weights 3 and 1: the model is (3 x 1 + 5) / 4 = 2, the difference (2 + 4) / 2 = 3. Counters take their maximum, running
    means are weighed: (3 x 0 + 8) / 4 = 2."""
    found = reduced([told(1.0, 3.0, dc=params(2.0), counter=7), told(5.0, 1.0, dc=params(4.0), counter=4, running=8.0)])
    assert w(found) == 2.0 and found.value.dc["p0"] == 3.0
    assert found.value.model.buffers["n"] == 7 and found.value.model.buffers["mean"] == 2.0
    assert found.weight == 4.0 and found.heard == (0, 1)


def test_numbers_that_are_missing_do_not_count():
    """By count (1 + 4) / 2 = 2.5; by weight (3 x 1 + 1 x 5) / 4 = 2. Where nobody tells a number there is none."""
    answers = [told(0.0, 3.0, contrast=1.0, score=1.0), told(0.0, 9.0), told(0.0, 1.0, contrast=4.0, score=5.0)]
    found = reduced(answers)
    assert found.value.contrast == 2.5 and found.value.score == 2.0 and found.value.dc is None
    assert reduced(answers[1:2]).value.contrast is None


def test_a_part_is_averaged_over_those_who_brought_it():
    """Both bring a: (3 x 1 + 1 x 5) / 4 = 2; the second alone brings b."""
    found = reduced([told(0.0, 3.0, parts={"a": params(1.0)}), told(0.0, 1.0, parts={"a": params(5.0), "b": params(7.0)})])
    assert {k: p["p0"].item() for k, p in found.value.parts.items()} == {"a": 2.0, "b": 7.0}


def test_the_servers_own_weights():
    """Weights 1, 0 and 3 in place of the clients': (1 x 1 + 3 x 9) / 4 = 7. Client 1 is heard and not added."""
    found = reduced([told(1.0), told(100.0), told(9.0)], weight={0: 1.0, 1: 0.0, 2: 3.0})
    assert w(found) == 7.0 and found.weight == 4.0 and found.heard == (0, 1, 2)
    with pytest.raises(ModelError, match="there is nothing to average"):
        reduced([told(1.0)], weight={0: 0.0})
    with pytest.raises(FederationError, match="round -1, job 'train': weight says nothing of client 1"):
        reduced([told(1.0), told(1.0)], weight={0: 1.0})


def test_groups_and_where_their_means_begin():
    """Group a goes on from 2, of weight 6, with 10 of weight 2: (6 x 2 + 2 x 10) / 8 = 4. Group b begins: (1 + 3) / 2 = 2. Nobody
    of group c answers, and what it began with stays."""
    fed = Answering({0: told(10.0, 2.0), 1: told(1.0), 3: told(3.0)})
    start = {"a": begun(2.0, 6.0), "c": begun(5.0, 1.0)}
    found = fed.mean(Telling().train, [0, 1, 2, 3], group={0: "a", 1: "b", 2: "c", 3: "b"}, start=start, model=model(0.0))
    assert {g: (w(f), f.weight, f.heard) for g, f in found.items()} == {
        "a": (4.0, 8.0, (0,)),
        "b": (2.0, 2.0, (1, 3)),
        "c": (5.0, 1.0, ()),
    }
    assert fed.mean(Telling().train, [2], group={2: "d"}, model=model(0.0))["d"].value.model is None


def begun(w: float, weight: float) -> Reduced:
    return Reduced(SimpleNamespace(model=model(w)), weight)


def test_who_is_silent_is_not_heard():
    fed = Answering({0: told(1.0), 2: told(3.0)})
    found = fed.mean(Telling().train, [0, 1, 2], model=model(0.0))
    assert found.heard == (0, 2) and w(found) == 2.0
    with pytest.raises(ModelError, match="there is nothing to average: no client answered"):
        fed.mean(Telling().train, [1], model=model(0.0))


def test_a_weight_of_nought_in_a_reply_is_an_error():
    with pytest.raises(ModelError, match="an update has weight 0"):
        reduced([told(1.0, 0.0)])


def test_a_reply_must_say_how_it_is_reduced():
    with pytest.raises(FederationError, match="job 'nothing': no field of its reply says how it is reduced"):
        Answering({}).mean(Telling().nothing, [0])


@pytest.mark.parametrize("by", [Average(), Clipped(norm=1.0)])
def test_one_reply_is_in_memory_at_a_time(by):
    """When the next reply is made, the one before it is gone; only of the first, the running mean may hold the model."""
    live: list[weakref.ref] = []
    seen: list[int] = []

    def answer() -> Told:
        gc.collect()
        seen.append(sum(ref() is not None for ref in live))
        made = told(float(len(live)))
        live.append(weakref.ref(made))
        return made

    fed = Answering(dict.fromkeys(range(5), answer))
    fed.mean(Telling().train, fed.clients, by=by, model=model(0.0))
    assert seen == [0] * 5 and fed.held == 0


def test_the_wire_does_not_see_how_a_field_is_reduced():
    assert message_hints(Update)["model"] is Model and reduced_fields(Update) == {"model": by_weight}
    update = Update(model(2.0), 3.0, 0.5)
    assert decode(encode(update, Update), Update).model.params["w"] == 2.0
    assert list(reduced_fields(Told)) == ["model", "dc", "parts", "contrast", "score"] and reduced_fields(type(None)) == {}


# ---- rules that look at all replies at once ----


def test_the_median_of_five_and_of_four():
    """Of 1 2 3 4 100 it is 3; of 1 2 4 100 the mean of 2 and 4. Weights do not matter; the largest counter is kept."""
    five = ((100.0, 50.0, 1), (1.0, 1.0, 9), (3.0, 1.0, 2), (2.0, 1.0, 3), (4.0, 7.0, 0))
    answers = [told(w, weight, counter=n) for w, weight, n in five]
    found = reduced(answers, by=Median())
    assert w(found) == 3.0 and found.value.model.buffers["n"] == 9 and found.heard == (0, 1, 2, 3, 4)
    assert w(reduced([answers[i] for i in (0, 1, 3, 4)], by=Median())) == 3.0


def test_the_median_goes_by_coordinate_and_reaches_parts_and_running_means():
    three = ((1.0, 9.0, 2.0), (2.0, 8.0, None), (3.0, 1.0, 4.0))
    answers = [told(0.0, dc=params(a, b), parts={"x": params(b)}, contrast=c, running=a) for a, b, c in three]
    found = reduced(answers, by=Median())
    assert [t.item() for t in found.value.dc.tensors] == [2.0, 8.0] and found.value.parts["x"]["p0"] == 8.0
    assert found.value.model.buffers["mean"] == 2.0 and found.value.contrast == 3.0, (
        "a number is averaged, whatever the rule"
    )


def test_a_trimmed_mean():
    """Of 1 2 3 4 100, a share of 0.2 drops one at either end: (2 + 3 + 4) / 3 = 3; 0.4 drops two; 0.39 of five is 1.95, so one."""
    answers = [told(v) for v in (100.0, 1.0, 3.0, 2.0, 4.0)]
    for share, middle in ((0.2, 3.0), (0.39, 3.0), (0.4, 3.0)):
        assert w(reduced(answers, by=Trimmed(share=share))) == middle
    answers[2] = told(6.0)  # of 1 2 4 6 100: (2 + 4 + 6) / 3 = 4, and 4 alone
    assert w(reduced(answers, by=Trimmed(share=0.2))) == 4.0 and w(reduced(answers, by=Trimmed(share=0.4))) == 4.0
    assert Trimmed(share=0.29).drops(100) == 29
    assert "drops none of 3 replies" in Trimmed(share=0.3).lacks(3)


def test_krum():
    """Five clients, f = 1: the two nearest others count. Of 0 1 3 4 100 the sums of squares are 0: 1 + 9 = 10; 1: 1 + 4 = 5;
    3: 1 + 4 = 5; 4: 1 + 9 = 10; so 1 and 3 are equal, and the lower client's is taken, with what else it brought."""
    values = (0.0, 3.0, 1.0, 4.0, 100.0)
    answers = [told(v, weight=1.0 + i, running=float(i), counter=i) for i, v in enumerate(values)]
    for a in answers:  # the running mean is part of the distance: here it is none
        object.__setattr__(a, "model", Model(ARCH, a.model.params, Buffers({"n": a.model.buffers["n"]})))
    found = reduced(answers, by=Krum(f=1))
    assert w(found) == 3.0 and found.value.model.buffers["n"] == 4, "client 1's weight; the largest counter"
    there = Answering({k: answers[k] for k in range(5)})
    turned = there.mean(Telling().train, [4, 2, 3, 1, 0], by=Krum(f=1), model=model(0.0))
    assert w(turned) == 3.0, "the lowest number, in whatever order they are asked"


def test_krum_measures_all_fields_together():
    """Models 0 0.1 0.2 alone would give client 0, too, by 0.01. With differences of 5 0 0, 1 and 2 are 0.01 apart and 0 over 25
    from both, so it is client 1."""
    answers = [told(0.1 * i, dc=params(d)) for i, d in enumerate((5.0, 0.0, 0.0))]
    found = reduced(answers, by=Krum(f=0))
    assert w(found) == pytest.approx(0.1) and found.value.dc["p0"] == 0.0
    assert w(reduced([told(0.1 * i) for i in range(3)], by=Krum(f=0))) == 0.0


def test_krum_needs_two_f_and_three():
    with pytest.raises(
        FederationError, match=r"round -1, job 'train': krum\(f=1\) needs 2 f \+ 3 = 5 replies, not 4; lower f"
    ):
        reduced([told(1.0)] * 4, by=Krum(f=1))


@pytest.mark.parametrize("by", [Median(), Trimmed(share=0.34), Krum(f=0)])
def test_unequal_parts_are_refused_by_those_who_compare_them(by):
    answers = [told(0.0, parts={part: params(1.0)}) for part in "aab"]
    with pytest.raises(
        FederationError, match=r"clients 0 and 2 report different parts, and .* needs equal ones; use mean\(\)"
    ):
        reduced(answers, by=by)
    with pytest.raises(FederationError, match="cannot go on from a mean"):
        reduced(answers[:1], by=by, start=begun(1.0, 1.0))


def test_what_is_held_is_counted():
    """Three replies, each a weight, a running mean and two differences of 4 bytes and a counter of 8."""
    fed = Answering({k: told(1.0, dc=params(1.0, 2.0)) for k in range(3)})
    fed.mean(Telling().train, range(3), by=Median(), model=model(0.0))
    assert fed.held == 3 * 24


# ---- clipping ----


def test_clipped():
    """Sent 1; replies 1.5 and 5 differ by 0.5 and 4. At norm 1 the second becomes 2: (3 x 1.5 + 2) / 4 = 1.625. Buffers stay."""
    fed = Answering({0: told(1.5, 3.0), 1: told(5.0, 1.0, running=8.0)})
    found = fed.mean(Telling().train, [0, 1], by=Clipped(norm=1.0), model=model(1.0))
    assert w(found) == 1.625 and found.value.model.buffers["mean"] == 2.0


def test_clipped_takes_all_fields_together_and_differences_from_nought():
    """Sent 1, replied 4 and a difference of 4: sqrt(9 + 16) = 5. At norm 1 a fifth of both is left: 1.6 and 0.8."""
    fed = Answering({0: told(4.0, dc=params(4.0))})
    found = fed.mean(Telling().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert w(found) == pytest.approx(1.6) and found.value.dc["p0"].item() == pytest.approx(0.8)


def test_clipped_measures_parts_from_the_model():
    """The part w was sent as 1 and comes as 3, the model stays: at norm 1, half of the way, 2."""
    fed = Answering({0: told(1.0, parts={"x": Params({"w": torch.tensor(3.0)})})})
    found = fed.mean(Telling().train, [0], by=Clipped(norm=1.0), model=model(1.0))
    assert found.value.parts["x"]["w"] == 2.0 and w(found) == 1.0


def test_clipped_measures_from_what_arrived():
    """1.001 travels as 1 in bf16: a reply of 1 has not moved, and one of 2 has moved by 1, not by 0.999."""
    fed = Answering({0: told(3.0)}, wire="bf16")
    assert w(fed.mean(Telling().train, [0], by=Clipped(norm=1.0), model=model(1.001))) == 2.0


def test_clipped_needs_the_model_that_was_sent():
    with pytest.raises(FederationError, match="from the one model that a client was sent, and it was sent 0"):
        Answering({0: told(1.0)}).mean(Telling().guided, [0], by=Clipped(norm=1.0), guide="a", note=None)


def test_a_norm_that_nobody_reaches_is_fedavg(tmp_path):
    a = run(toy_recipe(algorithm=FedAvg(local=ADAM)), tmp_path / "a")
    b = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=1e6))), tmp_path / "b")
    c = run(toy_recipe(algorithm=FedAvg(local=ADAM, aggregate=Clipped(norm=0.05))), tmp_path / "c")
    assert a.weights_sha256 == b.weights_sha256 != c.weights_sha256


# ---- sent once ----


def test_once_is_sent_until_a_reply_to_it_is_accepted():
    """Client 1 does not answer at first, so it alone is sent the guide a second time."""
    fed = Answering({0: told(1.0), 2: told(1.0)})
    ask = lambda clients: list(fed.ask(Telling().guided, clients, guide="", note=None, once={"guide": "go"}))  # noqa: E731
    ask([0, 1])
    assert {k: m.guide for k, m in fed.sent.items()} == {0: "go", 1: "go"} and fed.has("guide") == {0}
    assert fed.sent[0] is fed.sent[1], "one message, which is encoded once"
    fed.answers[1] = told(1.0)
    ask([0, 1, 2])
    assert {k: m.guide for k, m in fed.sent.items()} == {0: "", 1: "go", 2: "go"} and fed.has("guide") == {0, 1, 2}
    ask([0, 1, 2])
    assert {m.guide for m in fed.sent.values()} == {""} and fed.has("note") == set()


def test_once_may_differ_by_client_and_adds_what_is_not_there():
    fed = Answering(dict.fromkeys(range(3), told(1.0)))
    fed.mean(Telling().guided, {k: {"guide": "all"} for k in range(3)}, note=None, once={0: {"note": "a"}, 1: {"note": "b"}})
    assert [fed.sent[k].note for k in range(3)] == ["a", "b", None] and fed.has("note") == {0, 1}
    list(fed.ask(Telling().guided, [2], guide="all", once={2: {"note": "c"}}))
    assert fed.sent[2].note == "c" and fed.has("note") == {0, 1, 2}


def test_equal_messages_are_one():
    """True, 1 and 1.0 are equal in Python and written differently."""
    fed = Answering({})
    values = ("x", "x", "y", None, None)
    list(fed.ask_each(Telling().guided, {k: {"note": v} for k, v in enumerate(values)}, guide="g"))
    assert fed.sent[0] is fed.sent[1] is not fed.sent[2] and fed.sent[3] is fed.sent[4]
    list(fed.ask_each(Telling().guided, {k: {"note": v} for k, v in enumerate((True, 1, 1.0))}, guide="g"))
    assert len({id(m) for m in fed.sent.values()}) == 3


def test_what_was_sent_once_comes_back_from_a_checkpoint():
    fed = Answering({})
    fed.restore({0: "1_0"}, {"guide": (0, 2)})
    assert fed.has("guide") == {0, 2} and fed.snapshots == fed.durable == {0: "1_0"}


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
