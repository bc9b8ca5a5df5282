"""The weighted mean and the declared fields of a reply, with numbers computed by hand."""

import gc
import weakref

import pytest
from replies import Declared, Reply, Scripted, earlier, model, params, reduced, reply, w
from toy import ADAM

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.core.aggregate import Average, Reduced, by_weight, reduced_fields
from effuse.core.errors import FederationError, ModelError, RecipeError
from effuse.core.message import message_hints
from effuse.core.model import Model
from effuse.core.reducers import Clipped
from effuse.core.wire import decode, encode


def test_a_model_is_averaged_by_weight_and_a_difference_by_count():
    """Weights 3 and 1: the model is (3 x 1 + 5) / 4 = 2, the difference (2 + 4) / 2 = 3.

    Counters take their maximum. Running means are averaged by weight: (3 x 0 + 8) / 4 = 2.
    """
    result = reduced([reply(1.0, 3.0, dc=params(2.0), counter=7), reply(5.0, 1.0, dc=params(4.0), counter=4, running=8.0)])
    assert w(result) == 2.0 and result.value.dc["p0"] == 3.0
    assert result.value.model.buffers["n"] == 7 and result.value.model.buffers["mean"] == 2.0
    assert result.weight == 4.0 and result.heard == (0, 1)


def test_numbers_that_are_missing_do_not_count():
    """By count (1 + 4) / 2 = 2.5; by weight (3 x 1 + 1 x 5) / 4 = 2. Without any number the mean is None."""
    answers = [reply(0.0, 3.0, contrast=1.0, score=1.0), reply(0.0, 9.0), reply(0.0, 1.0, contrast=4.0, score=5.0)]
    result = reduced(answers)
    assert result.value.contrast == 2.5 and result.value.score == 2.0 and result.value.dc is None
    assert reduced(answers[1:2]).value.contrast is None


def test_a_part_is_averaged_over_the_clients_that_sent_it():
    """Both send a: (3 x 1 + 1 x 5) / 4 = 2. Only the second sends b."""
    result = reduced(
        [reply(0.0, 3.0, parts={"a": params(1.0)}), reply(0.0, 1.0, parts={"a": params(5.0), "b": params(7.0)})]
    )
    assert {k: p["p0"].item() for k, p in result.value.parts.items()} == {"a": 2.0, "b": 7.0}


def test_the_servers_own_weights():
    """Weights 1, 0 and 3 in place of the clients': (1 x 1 + 3 x 9) / 4 = 7. Client 1 is heard but not added."""
    result = reduced([reply(1.0), reply(100.0), reply(9.0)], weight={0: 1.0, 1: 0.0, 2: 3.0})
    assert w(result) == 7.0 and result.weight == 4.0 and result.heard == (0, 1, 2)
    with pytest.raises(ModelError, match="there is nothing to average"):
        reduced([reply(1.0)], weight={0: 0.0})
    with pytest.raises(FederationError, match="round 0, job 'train': weight has no entry for client 1"):
        reduced([reply(1.0), reply(1.0)], weight={0: 1.0})


def test_declared_weights_and_a_cap():
    """Claims 1 and 300: as claimed (1 x 1 + 300 x 5) / 301; declared as 3 and 1, (3 x 1 + 5) / 4 = 2; capped at 3,

    (1 x 1 + 3 x 5) / 4 = 4. A clipped mean has the same two keys.
    """
    claims = [reply(1.0, 1.0), reply(5.0, 300.0)]
    assert w(reduced(claims)) == pytest.approx(1501 / 301)
    assert w(reduced(claims, by=Average(weights=(3.0, 1.0)))) == 2.0
    assert w(reduced(claims, by=Average(cap=3.0))) == 4.0 and reduced(claims, by=Average(cap=3.0)).weight == 4.0
    assert w(reduced(claims, by=Clipped(norm=100.0, cap=3.0))) == 4.0
    with pytest.raises(RecipeError, match="give one of weights and cap"):
        Average(weights=(1.0,), cap=2.0)


def test_declared_weights_are_one_for_each_client():
    with pytest.raises(RecipeError, match=r"algorithm.aggregate: 2 weights, but there are 3 clients; give one for each"):
        FedAvg(local=ADAM, aggregate=Average(weights=(1.0, 2.0))).ready(3)
    MoFedSAM(local=ADAM, aggregate=Average(cap=5.0)).ready(3)
    with pytest.raises(RecipeError, match="takes means"):
        MoFedSAM(local=ADAM, aggregate=Clipped(norm=1.0)).ready(3)


def test_each_group_has_its_own_mean_and_start():
    """Group a continues from 2, of weight 6, with 10 of weight 2: (6 x 2 + 2 x 10) / 8 = 4. Group b has (1 + 3) / 2 = 2.

    No client of group c answers, so its start is its result.
    """
    fed = Scripted({0: reply(10.0, 2.0), 1: reply(1.0), 3: reply(3.0)})
    start = {"a": earlier(2.0, 6.0), "c": earlier(5.0, 1.0)}
    result = fed.mean(Declared().train, [0, 1, 2, 3], group={0: "a", 1: "b", 2: "c", 3: "b"}, start=start, model=model(0.0))
    assert {g: (w(f), f.weight, f.heard) for g, f in result.items()} == {
        "a": (4.0, 8.0, (0,)),
        "b": (2.0, 2.0, (1, 3)),
        "c": (5.0, 1.0, ()),
    }
    assert fed.mean(Declared().train, [2], group={2: "d"}, model=model(0.0))["d"].value.model is None


def test_a_silent_client_is_not_heard():
    fed = Scripted({0: reply(1.0), 2: reply(3.0)})
    result = fed.mean(Declared().train, [0, 1, 2], model=model(0.0))
    assert result.heard == (0, 2) and w(result) == 2.0
    with pytest.raises(ModelError, match="there is nothing to average: no client answered"):
        fed.mean(Declared().train, [1], model=model(0.0))


def test_a_weight_of_zero_in_a_reply_is_an_error():
    with pytest.raises(ModelError, match="an update has weight 0"):
        reduced([reply(1.0, 0.0)])


def test_a_reply_must_say_how_it_is_reduced():
    with pytest.raises(FederationError, match="job 'nothing': no field of its reply says how it is reduced"):
        Scripted({}).mean(Declared().nothing, [0])


@pytest.mark.parametrize("by", [Average(), Clipped(norm=1.0)])
def test_one_reply_is_in_memory_at_a_time(by):
    """When a reply is made, the one before it must have been freed."""
    live: list[weakref.ref] = []
    seen: list[int] = []

    def answer() -> Reply:
        gc.collect()
        seen.append(sum(ref() is not None for ref in live))
        made = reply(float(len(live)))
        live.append(weakref.ref(made))
        return made

    fed = Scripted(dict.fromkeys(range(5), answer))
    fed.mean(Declared().train, fed.clients, by=by, model=model(0.0))
    assert seen == [0] * 5 and fed.held == 0


def test_the_wire_ignores_how_a_field_is_reduced():
    assert message_hints(Update)["model"] is Model and reduced_fields(Update) == {"model": by_weight}
    update = Update(model(2.0), 3.0, 0.5)
    assert decode(encode(update, Update), Update).model.params["w"] == 2.0
    assert list(reduced_fields(Reply)) == ["model", "dc", "parts", "contrast", "score"] and reduced_fields(type(None)) == {}


@pytest.mark.parametrize("field", ["dc", "contrast", "score", "parts"])
def test_only_a_mean_by_weight_continues_from_a_start(field):
    """A start keeps one weight, which is not the number of differences, nor the weight of a part."""
    values = {"dc": params(1.0), "contrast": 1.0, "score": 1.0, "parts": {"x": params(1.0)}}
    start = Reduced.of(2.0, model=model(1.0), **{field: values[field]})
    with pytest.raises(FederationError, match=f"'{field}' cannot continue from `start`"):
        Scripted({0: reply(1.0)}).mean(Declared().train, [0], start=start, model=model(0.0))
