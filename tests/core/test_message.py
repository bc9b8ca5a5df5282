"""The annotations that are allowed in messages."""

from typing import Any, Literal

import pytest
import torch
from messages import Leaf, Other
from torch import Tensor

from effuse.core.errors import WireError
from effuse.core.message import MESSAGES, check, message
from effuse.core.model import Arch
from effuse.core.params import Buffers, Params
from effuse.core.solvers import Solver


def refused(hint: Any) -> None:
    with pytest.raises(WireError, match="Loose.field"):
        message(type("Loose", (), {"__annotations__": {"field": hint}, "__module__": __name__}))
    assert "test_message.Loose" not in MESSAGES


@pytest.mark.parametrize(
    "hint",
    [
        *(Any, object, dict, list, tuple, set[int], bytes, type, complex, dict[str, Any], list[object], tuple[Any, ...]),
        *(dict[float, int], dict[tuple[int, int], int], dict | None, int | Any, Literal["a", None], torch.nn.Module),
    ],
    ids=str,
)
def test_an_open_annotation_is_refused_at_its_declaration(hint):
    refused(hint)


@pytest.mark.parametrize(
    "hint",
    [
        *(int | Tensor, float | Tensor | None, Params | Buffers, list[int] | Params, list[int] | tuple[int, ...]),
        *(str | Solver, Solver | Arch, Leaf | dict[str, int], Literal["a"] | Solver),
    ],
    ids=str,
)
def test_a_union_whose_members_have_one_json_form_is_refused(hint):
    refused(hint)


def test_other_unions_are_allowed():
    plain = int | float | str | bool | None
    for hint in (plain, Params | None, Leaf | Other, Tensor | str, Literal["a"] | str, Solver | int):
        check(hint, "here")


def test_two_messages_of_one_name_are_an_error():
    with pytest.raises(WireError, match="two messages are called 'messages.Leaf': in .* and in elsewhere.messages"):
        message(type("Leaf", (), {"__annotations__": {"x": int}, "__module__": "elsewhere.messages"}))
    assert MESSAGES["messages.Leaf"] is Leaf
