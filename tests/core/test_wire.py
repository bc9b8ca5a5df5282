"""The wire format: every declared value is decoded as it was, and everything else is refused."""

import ast
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from messages import Everything, Leaf, Other, Richer, everything, leaf, same
from torch import Tensor

import effuse
from effuse.core.algorithm import Server
from effuse.core.errors import WireError
from effuse.core.message import message, message_name
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.solvers import SGD, CosineDecay
from effuse.core.visit import through_wire
from effuse.core.wire import decode, encode
from effuse.models.unet import DigitsUnet


def forge(tree: Any, *tensors: Tensor) -> bytes:
    """A message with arbitrary JSON and tensors, as an attacker could write it."""
    named = {f"{i:06d}": t for i, t in enumerate(tensors)}
    return safetensors.torch.save(named, {"effuse": tree if isinstance(tree, str) else json.dumps(tree)})


def tree_of(value: Any, hint: Any) -> Any:
    blob = encode(value, hint)
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return json.loads(header["__metadata__"]["effuse"])


def named(cls: type, **fields: Any) -> dict[str, Any]:
    return {"": message_name(cls), **fields}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"flag": False, "choice": 3, "maybe": 4, "number": 3.0, "either": leaf()},
        {"either": None, "choice": "a", "nothing": torch.tensor([1.5])},
        {"by_client": {}, "by_name": {}, "rows": [], "sizes": ()},
        {"params": Params({}), "buffers": Buffers({}), "tensor": torch.tensor(True)},
        {"leaf": Richer(1.0, Params({}), 9), "solver": SGD(lr=1.0, epochs=1)},
        {"share": -0.0, "number": 5e-324, "count": -5},
    ],
    ids=lambda v: "-".join(v),
)
def test_every_kind_of_annotation_comes_back_as_it_was(changes):
    value = everything(**changes)
    assert same(decode(encode(value, Everything), Everything), value)


def test_a_message_without_tensors_and_a_bare_value_travel_too():
    assert decode(encode(Other("x"), Other), Other).word == "x"
    assert decode(encode({1: 2.5}, dict[int, float]), dict[int, float]) == {1: 2.5}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.int64]
)
def test_bare_tensors_keep_their_type(dtype):
    tensor = torch.tensor([0, 1, 1], dtype=dtype)
    assert same(decode(encode(tensor, Tensor), Tensor), tensor)


def test_a_finite_double_beyond_the_range_of_a_float_is_finite():
    tensor = torch.tensor([1e300], dtype=torch.float64)
    assert same(decode(encode(tensor, Tensor), Tensor), tensor)


def test_an_int_in_a_float_field_arrives_as_a_float():
    assert type(decode(encode(Leaf(3, Params({})), Leaf), Leaf).value) is float
    assert type(decode(encode(3, float | int), float | int)) is int, (
        "where both types are declared, the type does not change"
    )


def test_shared_and_strided_tensors_travel():
    """Views of one storage, one tensor in two places, and a transposed one."""
    whole = torch.arange(6.0)
    value = [Params({"a": whole[:3], "b": whole[3:]}), Params({"a": whole, "t": whole.view(2, 3).T})]
    assert same(decode(encode(value, list[Params]), list[Params]), value)


def test_subclasses_of_a_message_keep_their_class():
    @message
    class Momentum(Server):
        v: Params

    model = Model(DigitsUnet(), Params({"w": torch.ones(1)}), Buffers({}))
    server = decode(encode(Momentum(model, Params({"w": torch.zeros(1)}), phase="warm-up"), Server), Server)
    assert type(server) is Momentum and server.phase == "warm-up" and server.v["w"].item() == 0.0
    assert server.model.arch == DigitsUnet()
    with pytest.raises(WireError, match="is not a test_wire.*Momentum"):
        decode(encode(Server(model), Server), Momentum)


def test_bf16_rounds_params_and_nothing_else():
    """bf16 has 8 bits of precision: 1 + 2^-7 fits, 1 + 2^-9 becomes 1. The decoded values are fp32 again."""
    fine = torch.tensor([1 + 2**-7, 1 + 2**-9])
    buffers = Buffers({"m": fine, "n": torch.tensor(257)})
    value = everything(params=Params({"w": fine}), buffers=buffers, tensor=fine, share=1 + 2**-9)
    arrived = decode(encode(value, Everything, "bf16"), Everything)
    rounded = torch.tensor([1 + 2**-7, 1.0])
    assert same(arrived.params["w"], rounded) and same(arrived.buffers["m"], rounded)
    assert arrived.buffers["n"].item() == 257 and same(arrived.tensor, fine) and arrived.share == 1 + 2**-9
    assert same(through_wire(value, "bf16"), arrived), "the simulator does the same without encoding"
    assert through_wire(value, "fp32") is value


def test_bf16_halves_the_tensors_of_a_blob():
    value = Params({"w": torch.ones(10_000)})
    assert len(encode(value, Params)) - len(encode(value, Params, "bf16")) == pytest.approx(20_000, abs=100)


@pytest.mark.parametrize(
    "change, place",
    [
        ({"flag": 1}, "message.flag"),
        ({"count": True}, "message.count"),
        ({"count": 1.0}, "message.count"),
        ({"share": "0.1"}, "message.share"),
        ({"share": math.nan}, "message.share is nan"),
        ({"share": -math.inf}, "message.share is -inf"),
        ({"share": 10**400}, "message.share is inf"),
        ({"number": math.inf}, "message.number is inf"),
        ({"word": b"x"}, "message.word"),
        ({"choice": "c"}, "message.choice"),
        ({"choice": 3.0}, "message.choice"),
        ({"either": leaf}, "message.either"),
        ({"params": {"w": torch.ones(1)}}, "message.params"),
        ({"params": Buffers({})}, "message.params"),
        ({"buffers": Params({})}, "message.buffers"),
        ({"params": Params({"w": torch.ones(1, dtype=torch.int64)})}, "message.params"),
        ({"params": Params({"w": torch.ones(1, dtype=torch.float64)})}, "message.params"),
        ({"tensor": torch.ones(1, dtype=torch.complex64)}, "message.tensor"),
        ({"tensor": [1]}, "message.tensor"),
        ({"solver": CosineDecay()}, "message.solver"),
        ({"leaf": Other("x")}, "message.leaf"),
        ({"by_client": {"7": leaf()}}, "message.by_client has the key '7'"),
        ({"by_client": {True: leaf()}}, "message.by_client has the key True"),
        ({"by_name": {"a": (1.0,)}}, r"message.by_name\[a\]"),
        ({"pair": (1, 2)}, r"message.pair\[1\]"),
        ({"pair": (1, "a", 2)}, "message.pair has 3 items, but 2"),
        ({"sizes": [1]}, "message.sizes"),
        ({"rows": [("a", 3)]}, r"message.rows\[0\]\[1\]"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),  # no addresses: both test processes must agree
)
def test_a_value_of_another_type_than_declared_is_not_sent(change, place):
    with pytest.raises(WireError, match=place):
        encode(everything(**change), Everything)


@pytest.mark.parametrize(
    "field, tree",
    [
        ("", "messages.Nothing"),
        ("", "os.system"),
        ("", "messages.Other"),
        ("", []),
        ("", {}),
        ("", None),
        ("surplus", 1),
        ("flag", 1),
        ("flag", None),
        ("count", 1.0),
        ("count", True),
        ("count", "1"),
        ("share", "0.5"),
        ("share", True),
        ("share", 10**400),
        ("share", None),
        ("word", 1),
        ("choice", "c"),
        ("choice", True),
        ("maybe", "x"),
        ("either", {"": "messages.Everything"}),
        ("either", {"": []}),
        ("either", {}),
        ("either", 3),
        ("params", []),
        ("params", "w"),
        ("params", [0, 1]),
        ("params", [True, "z"]),
        ("params", ["z", 0]),
        ("params", [-1, "z", "a", "m"]),
        ("params", [0, "z", "z", "m"]),
        ("params", [10**30, "z", "a", "m"]),
        ("tensor", -1),
        ("tensor", 0),
        ("tensor", 99),
        ("tensor", True),
        ("tensor", "5"),
        ("nothing", [1]),
        ("solver", "sgd(lr=-1.0, steps=1)"),
        ("solver", "5"),
        ("solver", "None"),
        ("solver", "[sgd(lr=1.0, steps=1)]"),
        ("solver", "'text'"),
        ("solver", "iid()"),
        ("solver", "__import__('os').system('true')"),
        ("solver", "sgd(lr=1.0, steps=0x" + "f" * 9000 + ")"),
        ("solver", "sgd(lr=1.0, steps=-0x" + "f" * 9000 + ")"),
        ("solver", "\ud800"),
        ("solver", 5),
        ("solver", None),
        ("leaf", {}),
        ("leaf", [1]),
        ("by_client", [1]),
        ("by_client", {"x": {}}),
        ("by_client", {"9" * 5000: {}}),
        ("by_client", {"\u00b2": {}}),
        ("by_client", {" 7": {}}),
        ("by_name", {"x": 1.0}),
        ("by_name", {"x": [None]}),
        ("pair", [1]),
        ("pair", [1, "a", "b"]),
        ("pair", {"0": 1}),
        ("sizes", [1.5]),
        ("rows", [["p"]]),
    ],
    ids=lambda v: ascii(v)[:40],
)
def test_decoding_is_closed(field, tree):
    blob = encode(everything(), Everything)
    tensors = [t for _, t in sorted(safetensors.torch.load(blob).items())]
    whole = tree_of(everything(), Everything)
    assert same(decode(forge(whole, *tensors), Everything), everything()), "without a change the forged message is valid"
    with pytest.raises(WireError):
        decode(forge({**whole, field: tree}, *tensors), Everything)


def test_a_missing_field_is_refused():
    whole = tree_of(Leaf(1.0, Params({})), Leaf)
    del whole["value"]
    with pytest.raises(WireError, match=r"the fields \['weights'\], not those of messages.Leaf: \['value', 'weights'\]"):
        decode(forge(whole), Leaf)


def test_a_tensor_that_no_field_names_is_refused():
    with pytest.raises(WireError, match="has 1 tensors that none of its fields name"):
        decode(forge(named(Other, word="x"), torch.ones(1)), Other)


def test_a_tensor_cannot_be_used_twice():
    with pytest.raises(WireError, match="used twice"):
        decode(forge([[0, "a"], [0, "b"]], torch.ones(1)), list[Params])


def test_parameters_are_floats_of_one_kind():
    assert decode(forge([0, "w"], torch.ones(1)), Params)["w"].dtype == torch.float32
    assert decode(forge([0, "w"], torch.ones(1).bfloat16()), Params)["w"].dtype == torch.float32
    for dtype in (torch.int64, torch.float64, torch.float16, torch.bool, torch.complex64, torch.float8_e5m2):
        with pytest.raises(WireError, match=f"{dtype}"):
            decode(forge([0, "w"], torch.ones(1, dtype=torch.float32).to(dtype)), Params)
    with pytest.raises(WireError, match="complex64"):
        decode(forge(0, torch.ones(1, dtype=torch.complex64)), Tensor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_non_finite_tensors_are_refused(bad, dtype):
    tensor = torch.zeros(40, dtype=dtype)
    tensor[17] = bad
    with pytest.raises(WireError, match="non-finite"):
        decode(forge(0, tensor), Tensor)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
def test_non_finite_numbers_are_refused(word):
    with pytest.raises(WireError):
        decode(forge(f'{{"": "messages.Leaf", "value": {word}, "weights": [0]}}'), Leaf)


def test_size_is_limited():
    blob = encode(leaf(), Leaf)
    assert decode(blob, Leaf, limit=len(blob)).value == 0.5
    with pytest.raises(WireError, match=f"{len(blob)} bytes is over its limit of {len(blob) - 1}"):
        decode(blob, Leaf, limit=len(blob) - 1)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 99,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x02" + b"\0" * 7 + b"{}",
        b"\x15" + b"\0" * 7 + b'{"__metadata__":null}',
        b"\x13" + b"\0" * 7 + b'{"__metadata__":{}}',
        b"\x23" + b"\0" * 7 + b'{"__metadata__":{"effuse":["test"]}}',
        forge("not json"),
        forge(""),
        forge("[" * 100_000),
        forge("[" * 100_000 + "]" * 100_000),
        safetensors.torch.save({"w": torch.ones(1)}),
        b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",  # a pickle
    ],
    ids=lambda b: ascii(b[:16]),
)
def test_garbage_is_a_wire_error(blob):
    with pytest.raises(WireError):
        decode(blob, Leaf)


def attempt(blob: bytes) -> bool:
    """Whether a damaged message can be decoded and encoded again; otherwise it must raise a WireError."""
    try:
        value = decode(blob, Everything)
    except WireError:
        return False
    encode(value, Everything)
    return True


def test_every_truncation_is_an_error():
    blob = encode(everything(), Everything)
    assert attempt(blob)
    for end in range(0, len(blob), 3):
        assert not attempt(blob[:end])
    assert not attempt(blob + b"\0")


def test_damaged_bytes_never_cause_anything_but_a_wire_error():
    """One to four random bytes change. Some changes only alter a number; most break the message."""
    blob, rng = encode(everything(), Everything), random.Random(0)
    survived = 0
    for _ in range(1500):
        damaged = bytearray(blob)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        survived += attempt(bytes(damaged))
    assert survived < 1000


def test_damaged_structure_never_causes_anything_but_a_wire_error():
    """Every node of the JSON tree is replaced by values of other types, or removed."""
    blob = encode(everything(either=leaf()), Everything)
    tensors = [t for _, t in sorted(safetensors.torch.load(blob).items())]
    junk = [None, True, -1, 0, 3, 10**400, 0.5, "", "x", "sgd", "5", [], [0], [0, "w"], [[]], {}, {"": []}, {"1": 1}]
    junk += [{"": "messages.Leaf"}]

    def variants(node: Any):
        yield from (j for j in junk if type(j) is not type(node) or j != node)
        if isinstance(node, dict):
            for key in node:
                yield {k: v for k, v in node.items() if k != key}
                yield from ({**node, key: v} for v in variants(node[key]))
        if isinstance(node, list):
            for i, item in enumerate(node):
                yield node[:i] + node[i + 1 :]
                yield from ([*node[:i], v, *node[i + 1 :]] for v in variants(item))

    outcomes = [attempt(forge(tree, *tensors)) for tree in variants(tree_of(everything(either=leaf()), Everything))]
    assert len(outcomes) > 1000 and 0 < sum(outcomes) < len(outcomes) / 2


def test_nothing_in_the_project_can_unpickle():
    """No module that unpickles is imported, and calls that unpickle by default are told not to."""
    openers = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for path in Path(effuse.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.partition(".")[0] not in openers, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"np.load", "numpy.load"}:
                assert any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path
