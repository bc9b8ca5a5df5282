"""Bounds on the numbers of a reply. A finite number may still stop a run, or take hours to obey."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from effuse.core.errors import WireError
from effuse.core.message import claims, is_message
from effuse.core.params import Params

LARGEST = 1e12  # of a number: sums of products stay finite
HIGHEST = 1e6  # of a value of a network, a gradient or an image: their squares, too, stay finite in fp32
IMAGES = 100_000  # that a client may claim to have, unless the operator says otherwise


def most_images(declared: int | None, known: int) -> int:
    """How many images a client may claim: as declared; else twice what the server's own data has, or 100,000."""
    return declared or max(2 * known, IMAGES)  # a claim with noise may exceed the truth


def refuse_lies(reply: Any, most: int, place: str = "reply") -> None:
    """Refuse a reply with a weight, a loss, a claim or a value that no honest client can have."""
    weight, loss = getattr(reply, "weight", 0.0), getattr(reply, "loss", None)
    if not 0 <= weight <= most:
        raise WireError(f"its weight is {weight}; weights must be positive and at most {most}, the images of a client")
    if loss is not None and not abs(loss) <= LARGEST:
        raise WireError(f"its loss is {loss}; a loss must be at most {LARGEST:g}")
    for name in claims(type(reply)):
        claimed = _total(getattr(reply, name))
        if claimed is not None and not 0 <= claimed <= most:
            raise WireError(f"'{name}' claims {claimed:g} images; a client may have {most} (--images of `effuse serve`)")
    for where, item in _leaves(reply, place):
        if isinstance(item, torch.Tensor):
            low, highest = _range(item)
            highest, limit = max(-low, highest), HIGHEST if item.is_floating_point() else LARGEST
            if low < 0 and where.endswith((".running_var", ".num_batches_tracked")):
                raise WireError(f"'{where[:80]}' has the value {low:g}, and is never negative")
        else:
            highest, limit = abs(item), LARGEST
        if not highest <= limit:
            raise WireError(f"'{where[:80]}' has the value {highest:g}; it may have {limit:g} at most")


def _total(claim: Any) -> float | None:
    """The images that a claim adds up to; None where there is none."""
    if isinstance(claim, torch.Tensor):
        return float(claim.double().sum())
    return claim if claim is None else float(claim)


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """The lowest and the highest value of a tensor."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0, 0.0
    low, high = torch.aminmax(tensor)
    return float(low), float(high)


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every number and every tensor within a message, by its place."""
    if isinstance(value, (int, float, torch.Tensor)):
        yield place, value
    elif isinstance(value, (Params, dict)):
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{place}.{i}")
    elif is_message(type(value)):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{place}.{field.name}")
