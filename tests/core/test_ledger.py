"""The ledger: parameters and bytes counted from the messages, by link, direction and client."""

import json

import pytest
import torch
from torch import Tensor

from effuse.core.ledger import EVALUATION, TRAINING, Account, Ledger, size_of
from effuse.core.message import message
from effuse.core.params import Buffers, Params
from effuse.core.wire import encode


@message
class Parcel:
    params: Params
    buffers: Buffers
    labels: Tensor
    more: dict[int, Params]
    weight: float


# 6 parameters in 24 bytes; 3 floats and a counter in 12 + 8 bytes; 5 labels in 40 bytes; 4 more parameters in 16 bytes
PARCEL = Parcel(
    Params({"w": torch.ones(2, 3)}),
    Buffers({"mean": torch.ones(3), "n": torch.tensor(1)}),
    torch.arange(5),
    {3: Params({"v": torch.ones(4)})},
    2.0,
)


def account(direction="up", client=0, link="client-server", column=TRAINING) -> Account:
    return Account(column, link, direction, client)


def test_parameters_and_bytes_by_hand():
    """6 + 4 parameters; 24 + 20 + 40 + 16 = 100 bytes; buffers and labels count in bytes only, the weight not at all."""
    assert size_of(PARCEL, "fp32") == (10, 100)


def test_bf16_halves_the_floats_of_params_and_buffers_only():
    """24 / 2 + 12 / 2 + 8 + 40 + 16 / 2 = 74."""
    assert size_of(PARCEL, "bf16") == (10, 74)


def test_the_ledger_agrees_with_the_size_of_an_encoded_message():
    """The header of a message does not grow with its tensors, so only differences are compared."""
    small, large = (Params({"w": torch.ones(n)}) for n in (1000, 9000))
    for wire in ("fp32", "bf16"):
        grown = len(encode(large, Params, wire)) - len(encode(small, Params, wire))
        assert grown == pytest.approx(size_of(large, wire)[1] - size_of(small, wire)[1], abs=16)


def test_messages_without_values_cost_the_same():
    assert size_of(PARCEL.params.to("meta"), "fp32") == size_of(PARCEL.params, "fp32") == (6, 24)


def test_a_message_without_tensors_counts_as_a_message():
    ledger = Ledger("fp32")
    ledger.charge(account(), 3)
    report = ledger.close()
    assert report["messages"] == {"up": 1, "down": 0, "total": 1} and report["bytes"]["total"] == 0


def test_sums_go_by_direction_link_and_client():
    """Client 0 sends two parcels and gets one, client 7 gets one, and edge 7 sends one: 100 bytes each."""
    ledger = Ledger("fp32")
    ledger.charge(account("up", 0), PARCEL, wire_bytes=120)
    ledger.charge(account("up", 0), PARCEL, wire_bytes=121)
    ledger.charge(account("down", 0), PARCEL)
    ledger.charge(account("down", 7), PARCEL)
    ledger.charge(account("up", 7, link="edge-cloud"), PARCEL)
    report = ledger.report()[TRAINING]
    assert report["bytes"] == {"up": 300, "down": 200, "total": 500}
    assert report["parameters"] == {"up": 30, "down": 20, "total": 50}
    assert report["wire_bytes"] == {"up": 241, "down": 0, "total": 241}
    assert report["messages"] == {"up": 3, "down": 2, "total": 5}
    assert report["links"]["client-server"]["up"] == {"parameters": 20, "bytes": 200, "wire_bytes": 241, "messages": 2}
    assert report["links"]["client-server"]["down"]["bytes"] == 200
    assert report["links"]["edge-cloud"]["up"]["bytes"] == 100 and report["links"]["edge-cloud"]["down"]["bytes"] == 0
    assert report["clients"] == {"0": {"up": 200, "down": 100}, "7": {"up": 0, "down": 100}}
    assert report["edges"] == {"7": {"up": 100, "down": 0}}, "on this link the number is that of an edge"


def test_closing_a_round_resets_it_but_not_the_total():
    ledger = Ledger("fp32")
    ledger.charge(account(), PARCEL)
    assert ledger.close()["bytes"]["total"] == 100
    ledger.charge(account(), PARCEL)
    ledger.charge(account(), PARCEL)
    assert ledger.close()["bytes"]["total"] == 200
    assert ledger.close()["bytes"]["total"] == 0
    assert ledger.report()[TRAINING]["bytes"]["total"] == 300


def test_evaluation_is_a_column_of_its_own():
    ledger = Ledger("fp32")
    ledger.charge(account(), PARCEL)
    assert "evaluation" not in ledger.close()
    ledger.charge(account(column=EVALUATION), PARCEL)
    report = ledger.close()
    assert report["bytes"]["total"] == 0 and report["evaluation"]["bytes"]["total"] == 100
    assert ledger.report()[TRAINING]["bytes"]["total"] == ledger.report()[EVALUATION]["bytes"]["total"] == 100


def test_a_saved_ledger_is_restored_as_it_was():
    ledger = Ledger("bf16")
    for direction, client, column in (("up", 3, TRAINING), ("down", 3, TRAINING), ("down", -1, EVALUATION)):
        ledger.charge(account(direction, client, column=column), PARCEL, wire_bytes=9)
    other = Ledger("bf16")
    other.charge(account(), PARCEL)  # must be replaced
    other.restore(json.loads(json.dumps(ledger.saved())))
    assert other.report() == ledger.report() and other.total == ledger.total
    assert other.close()["bytes"]["total"] == 0, "the interrupted round is not counted twice"


def test_what_was_discarded_is_counted_apart():
    """Two uploads of 120 and 7 bytes that were not used: no parameters, and nothing of the sums of what was."""
    ledger = Ledger("fp32")
    ledger.charge(account(), PARCEL, wire_bytes=120)
    ledger.discard(account(), 120)
    ledger.discard(account(client=7), 7)
    other = Ledger("fp32")
    other.restore(json.loads(json.dumps(ledger.saved())))
    for report in (ledger.close(), ledger.report()[TRAINING], other.report()[TRAINING]):
        assert report["discarded"] == {"messages": 2, "wire_bytes": 127}
        assert report["messages"]["total"] == 1 and report["wire_bytes"]["total"] == 120
    assert "discarded" not in ledger.close()
