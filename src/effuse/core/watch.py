"""What a server sees of each client's update: its length, its direction, its weight and its loss."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from effuse.core.differences import differences
from effuse.core.params import Params

SAMPLE = 16_384  # values of an update that its direction is known by
FAR = 10.0  # times the median, above which a number is reported
Seen = dict[str, float | None]


class Watch:
    """Lengths are exact. Directions are compared by evenly spaced values of every update, which are all that it keeps."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._directions: dict[int, Tensor] = {}

    def add(self, client: int, values: Mapping[str, Any], message: Any, wire: str, weight: float, loss: Any) -> None:
        """See one client's values for a message, before any reducer changes them."""
        found = differences(values, message, wire)
        norm = None if found is None else math.hypot(*(float(part.norm()) for part in found))
        self._seen[client] = {"weight": float(weight), "loss": loss, "norm": norm, "cosine": None}
        if found and norm:
            self._directions[client] = _sampled(found) / norm

    def results(self) -> dict[int, Seen]:
        """What was seen of each client. The cosine is that to the mean of all directions, each of length one.

        A long update is therefore no more than a short one in what others are compared with.
        """
        lengths = {len(direction) for direction in self._directions.values()}
        if len(lengths) == 1:  # updates of different parts have no common direction
            mean = torch.stack(list(self._directions.values())).mean(0)
            for client, direction in self._directions.items():
                both = float(direction.norm() * mean.norm())
                self._seen[client]["cosine"] = float(direction @ mean) / both if both else None
        return self._seen


def _sampled(parts: list[Params]) -> Tensor:
    stride = max(1, sum(part.numel for part in parts) // SAMPLE)
    return torch.cat([tensor.detach().flatten()[::stride].double().cpu() for part in parts for tensor in part.tensors])


def conspicuous(seen: Mapping[int, Seen]) -> dict[int, str]:
    """The clients that an operator should look at, and why; of fewer than three clients, none."""
    found: dict[int, list[str]] = {client: [] for client in seen}
    if len(seen) < 3:
        return {}
    for name in ("norm", "weight", "loss"):
        known = {client: value for client, each in seen.items() if (value := each[name]) is not None}
        median = statistics.median(known.values()) if known else 0.0
        for client, value in known.items():
            if median > 0 and value > FAR * median:
                found[client].append(f"its {name} is {value / median:.3g} times the median")
    for client, each in seen.items():
        if (cosine := each["cosine"]) is not None and cosine < 0:
            found[client].append(f"its update points away from the others' (cosine {cosine:.2f})")
    return {client: " and ".join(why) for client, why in found.items() if why}


def described(seen: Mapping[int, Seen]) -> str:
    """All clients in one line."""

    def one(each: Seen) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in each.items() if value is not None)

    return "; ".join(f"client {client}: {one(each)}" for client, each in seen.items())
