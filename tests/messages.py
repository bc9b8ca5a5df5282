"""Messages for tests."""

from typing import Any, Literal

import torch
from torch import Tensor

from effuse.core.message import is_message, message
from effuse.core.params import Buffers, Params
from effuse.core.solvers import Adam, CosineDecay, Solver


@message
class Leaf:
    value: float
    weights: Params


@message
class Richer(Leaf):
    extra: int


@message
class Other:
    word: str


@message
class Everything:
    flag: bool
    count: int
    share: float
    word: str
    choice: Literal["a", "b", 3]
    maybe: int | None
    number: int | float
    either: Leaf | Other | None
    params: Params
    buffers: Buffers
    tensor: Tensor
    nothing: Tensor | None
    solver: Solver
    leaf: Leaf
    by_client: dict[int, Leaf]
    by_name: dict[str, list[float]]
    pair: tuple[int, str]
    sizes: tuple[int, ...]
    rows: list[tuple[str, Params | None]]


def leaf(value: float = 0.5) -> Leaf:
    return Leaf(value, Params({"w": torch.tensor([value, -value])}))


def everything(**changes: Any) -> Everything:
    values: dict[str, Any] = {
        "flag": True,
        "count": 2**62,
        "share": 0.1,
        "word": 'quotes " and \\ and ü \u2028',
        "choice": "b",
        "maybe": None,
        "number": 3,
        "either": Other("x"),
        "params": Params({"z": torch.ones(2, 3), "a": torch.tensor(7.0), "m": torch.zeros(0)}),
        "buffers": Buffers({"n": torch.tensor(5), "mean": torch.tensor([0.25])}),
        "tensor": torch.arange(4, dtype=torch.uint8),
        "nothing": None,
        "solver": Adam(lr=0.1, steps=3, schedule=CosineDecay(floor=0.5)),
        "leaf": leaf(),
        "by_client": {7: leaf(1.0), -1: leaf(2.0)},
        "by_name": {"": [1.0], "x": []},
        "pair": (4, "four"),
        "sizes": (3, 1, 2),
        "rows": [("p", Params({"w": torch.ones(1)})), ("q", None)],
    }
    return Everything(**values | changes)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, tensors bit by bit, names in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (Params, dict)):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_message(type(a)):
        return all(same(getattr(a, f), getattr(b, f)) for f in type(a).__dataclass_fields__)
    return a == b
