"""Named tensors: their arithmetic by hand, and a mean that is exact and holds one update at a time."""

import gc
import weakref

import pytest
import torch
from torch import nn

from effuse.core.errors import ModelError
from effuse.core.params import Buffers, Params, mean

X = Params({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])})
Y = Params({"b": torch.tensor([[5.0]]), "w": torch.tensor([4.0, 8.0])})  # the same names in another order


def values(params: Params) -> dict[str, list]:
    return {k: t.tolist() for k, t in params.items()}


def test_arithmetic_is_by_name():
    """w: (1, 2) and (4, 8); b: 3 and 5. The order of the names does not matter."""
    assert values(X + Y) == {"w": [5.0, 10.0], "b": [[8.0]]}
    assert values(Y - X) == {"b": [[2.0]], "w": [3.0, 6.0]}
    assert values(0.5 * X) == values(X * 0.5) == values(X / 2) == {"w": [0.5, 1.0], "b": [[1.5]]}
    assert values(-X) == {"w": [-1.0, -2.0], "b": [[-3.0]]}
    assert values(X.zeros()) == {"w": [0.0, 0.0], "b": [[0.0]]}
    assert values(X.lerp(Y, 0.25)) == {"w": [1.75, 3.5], "b": [[3.5]]}


def test_the_result_has_the_order_of_the_left_operand_and_operands_do_not_change():
    assert list(X + Y) == ["w", "b"] and list(Y + X) == ["b", "w"]
    assert values(X) == {"w": [1.0, 2.0], "b": [[3.0]]}


def test_norm_is_over_all_values():
    """sqrt(1 + 4 + 9 + 2) = 4."""
    more = Params({**X, "c": torch.tensor(2.0).sqrt()})
    assert more.norm().item() == pytest.approx(4.0)


def test_sizes():
    assert len(X) == 2 and X.numel == 3 and X.nbytes == 12 and repr(X) == "Params(2 tensors, 3 values)"


def test_arithmetic_of_empty_params():
    none = Params({})
    for result in (none + none, none - none, 2 * none, none / 2, -none, none.lerp(none, 0.5), none.zeros()):
        assert len(result) == 0
    assert none.norm().item() == 0.0 and none.finite() and mean([(none, 1.0), (none, 2.0)]) is none


def test_an_error_names_what_does_not_match():
    with pytest.raises(ModelError, match="1 names differ, such as 'b'"):
        X + Params({"w": X["w"]})
    with pytest.raises(ModelError, match=r"'w' has shape \(1,\) where \(2,\) is expected"):
        X.lerp(Params({"w": torch.ones(1), "b": X["b"]}), 0.5)
    with pytest.raises(TypeError, match="Params need Params, not dict"):
        X + dict(X)


def test_of_copies_the_values_of_a_network():
    net = nn.Linear(2, 1)
    params = Params.of(net)
    with torch.no_grad():
        net.weight.zero_()
    assert list(params) == ["weight", "bias"] and params["weight"].abs().sum() > 0
    assert not any(t.requires_grad for t in params.tensors)


def test_of_returns_contiguous_tensors():
    net = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    assert not net.weight.is_contiguous() and Params.of(net)["weight"].is_contiguous()


@pytest.mark.parametrize("weights", [(1.0,), (0.1, 0.7), (3.0, 1.0, 1e-9, 7.0), (1.0,) * 11])
def test_the_mean_of_equal_updates_is_exactly_that_update(weights):
    """0.1 is no binary fraction, so a sum divided by the total weight would differ in the last bits."""
    update = Params({"w": torch.tensor([0.1, 1e-20, 3e30, -7.7])})
    average = mean((Params({"w": update["w"].clone()}), weight) for weight in weights)
    assert torch.equal(average["w"], update["w"])


def test_the_mean_of_one_update_is_that_update():
    assert mean([(X, 17.0)]) is X


def test_a_weighted_mean_by_hand():
    """w: (1 * (1, 2) + 3 * (4, 8)) / 4 = (3.25, 6.5); b: (3 + 15) / 4 = 4.5."""
    assert values(mean([(X, 1.0), (Y, 3.0)])) == {"w": [3.25, 6.5], "b": [[4.5]]}


def test_the_mean_of_three_by_hand():
    """(1 * 2 + 1 * 4 + 2 * 8) / 4 = 5.5."""
    updates = [(Params({"w": torch.tensor([v])}), k) for v, k in ((2.0, 1.0), (4.0, 1.0), (8.0, 2.0))]
    assert mean(updates)["w"].item() == pytest.approx(5.5)


class Counted(Params):
    """Params that can be watched with weak references."""

    __slots__ = ("__weakref__",)


def test_the_mean_holds_one_update_at_a_time():
    """When an update is made, only the running mean may be alive. At the second, it is the first update itself."""
    live: list[weakref.ref] = []
    seen: list[int] = []

    def updates():
        for i in range(6):
            gc.collect()
            seen.append(sum(ref() is not None for ref in live))
            update = Counted({"w": torch.full((3,), float(i))})
            live.append(weakref.ref(update))
            yield update, 1.0
            del update

    assert mean(updates())["w"].tolist() == pytest.approx([2.5] * 3)
    assert seen == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_are_positive(weight):
    with pytest.raises(ModelError, match="weights must be positive"):
        mean([(X, weight)])


def test_a_mean_of_nothing_is_an_error():
    with pytest.raises(ModelError, match="no client answered"):
        mean([])


def test_float_buffers_are_averaged_and_counters_take_the_maximum():
    """running_mean: (1 * 2 + 3 * 6) / 4 = 5; batches: max(7, 3) = 7."""
    a = Buffers({"running_mean": torch.tensor([2.0]), "batches": torch.tensor(7)})
    b = Buffers({"running_mean": torch.tensor([6.0]), "batches": torch.tensor(3)})
    average = mean([(a, 1.0), (b, 3.0)])
    assert type(average) is Buffers
    assert average["running_mean"].item() == 5.0 and average["batches"].item() == 7
    assert average["batches"].dtype == torch.int64
    assert mean([(b, 1.0), (a, 3.0)])["batches"].item() == 7


def test_buffers_of_a_network_are_the_saved_ones():
    net = nn.BatchNorm1d(2)
    net.register_buffer("scratch", torch.zeros(1), persistent=False)
    buffers = Buffers.of(net)
    assert set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert Params.counted and not Buffers.counted


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_among_many_is_not_finite(bad):
    tensor = torch.zeros(50)
    tensor[37] = bad
    assert X.finite() and not Params({**X, "z": tensor}).finite()


def test_the_largest_finite_values_are_finite():
    """Their Euclidean norm would overflow; integers and empty tensors have nothing to check."""
    largest = torch.full((9,), torch.finfo(torch.float32).max)
    assert Params({"w": largest, "empty": torch.zeros(0)}).finite() and Buffers({"n": torch.tensor(3)}).finite()


def test_the_digest_depends_on_names_types_shapes_and_bytes_but_not_on_their_order():
    def digest(name="w", value=1.0, shape=(2,), dtype=torch.float32):
        return Params({name: torch.full(shape, value, dtype=dtype)}).digest()

    assert Params({"a": X["w"], "b": X["b"]}).digest() == Params({"b": X["b"], "a": X["w"]}).digest()
    assert digest() == digest()
    others = [digest(name="v"), digest(value=2.0), digest(shape=(1, 2)), digest(shape=(2, 1)), digest(value=0.0)]
    others += [digest(value=0.0, dtype=torch.int32), digest(shape=()), digest(shape=(0,)), digest(value=-0.0)]
    assert len({digest(), *others}) == 10
    strided = torch.arange(6.0).view(2, 3).T
    assert Params({"w": strided}).digest() == Params({"w": strided.contiguous()}).digest()


def test_the_digest_of_every_wire_type_can_be_taken():
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int64):
        assert len(Params({"w": torch.ones(3, dtype=dtype)}).digest()) == 64


def test_holding_replaces_values_by_name_and_keeps_the_order():
    changed = X.holding(Params({"b": torch.tensor([[9.0]])}))
    assert values(changed) == {"w": [1.0, 2.0], "b": [[9.0]]} and list(changed) == ["w", "b"]
    with pytest.raises(ModelError, match="'z' is not among the 2 tensors"):
        X.holding(Params({"z": torch.zeros(1)}))
    with pytest.raises(ModelError, match="'w' has shape"):
        X.holding(Params({"w": torch.zeros(3)}))


def test_select_and_map_and_to():
    assert list(X.select(lambda k: k == "b")) == ["b"]
    assert values(X.map(torch.square)) == {"w": [1.0, 4.0], "b": [[9.0]]}
    assert X.to("cpu") is X and X.to("meta").hollow and not X.hollow


def test_arithmetic_of_params_without_values():
    """A rehearsal runs the server's code on shapes."""
    hollow = X.to("meta")
    results = [hollow + hollow, hollow - hollow, 2.0 * hollow, hollow / 3, -hollow, hollow.zeros(), hollow.lerp(hollow, 0.5)]
    results += [mean([(hollow, 1.0), (hollow, 2.0)]), hollow.holding(hollow), hollow.map(torch.square)]
    for result in results:
        assert result.hollow and {k: t.shape for k, t in result.items()} == {k: t.shape for k, t in X.items()}
    assert hollow.norm().is_meta and hollow.finite() and len(hollow.digest()) == 64
    assert (hollow.numel, hollow.nbytes) == (X.numel, X.nbytes)
    counters = Buffers({"n": torch.tensor(1), "m": torch.ones(2)}).to("meta")
    assert counters.lerp(counters, 0.5)["n"].dtype == torch.int64
    with pytest.raises(ModelError):
        hollow + Params({"w": torch.ones(2, device="meta")})
