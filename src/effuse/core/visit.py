"""Traversal of messages: their tensors are visited, copied, moved to a device, or rounded as on the wire."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from effuse.core.message import is_message
from effuse.core.params import Params


def through_wire(value: Any, wire: str) -> Any:
    """`value` as it would arrive; the simulator uses this in place of encoding and decoding."""
    return map_params(value, lambda t: widened(narrowed(t))) if wire == "bf16" else value


def each_params(value: Any) -> Iterator[Params | Tensor]:
    """Every Params and every bare tensor within a message."""
    if isinstance(value, (Params, Tensor)):
        yield value
    elif is_message(type(value)):
        for field in dataclasses.fields(value):
            yield from each_params(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from each_params(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from each_params(item)


def placed(value: Any, device: torch.device) -> Any:
    """The same message with every tensor on the device."""
    if isinstance(value, Params):
        return value.to(device)
    if isinstance(value, Tensor):
        return value.to(device)
    return _rebuilt(value, lambda item: placed(item, device))


def copied(value: Any) -> Any:
    """The same message with its tensors copied."""
    if isinstance(value, Params):
        return value.map(lambda t: t.detach().clone(memory_format=torch.contiguous_format))
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    return _rebuilt(value, copied)


def map_params(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same message with every tensor of its Params changed."""
    if isinstance(value, Params):
        return value.map(change)
    return _rebuilt(value, lambda item: map_params(item, change))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A message or container with each of its items changed; other values are returned as they are."""
    if is_message(type(value)):
        return type(value)(**{f.name: change(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {k: change(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(change(v) for v in value)
    return value


def narrowed(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
