"""Traversal of messages."""

from messages import everything, leaf, same
from torch import Tensor

from effuse.core.visit import each_params, map_params


def test_tensors_within_a_message_are_found_and_changed():
    value = everything(either=leaf(3.0))
    items = list(each_params(value))
    assert len(items) == 8 and sum(isinstance(item, Tensor) for item in items) == 1
    doubled = map_params(value, lambda t: t * 2)
    assert doubled.by_client[7].weights["w"].tolist() == [2.0, -2.0] and doubled.rows[0][1]["w"].item() == 2.0
    assert doubled.either.weights["w"].tolist() == [6.0, -6.0] and same(doubled.tensor, value.tensor)
