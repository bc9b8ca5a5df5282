"""Named tensors with arithmetic: the values of a network, apart from the network."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from effuse.core.errors import ModelError

T = TypeVar("T")


class Params(Mapping[str, Tensor]):
    """Trainable values by name, contiguous fp32, never written in place. On the meta device they have shapes only."""

    __slots__ = ("_tensors",)
    counted = True  # the ledger counts these as parameters, not only as bytes

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def of(cls, net: "nn.Module | Valued") -> Self:
        """A copy of a network's current parameters."""
        return cls({k: _own(p) for k, p in named_values(net)[0].items()})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors, {self.numel} values)"

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())

    @property
    def numel(self) -> int:
        return sum(t.numel() for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def hollow(self) -> bool:
        """Whether these are shapes without values, as in a rehearsal."""
        return any(t.is_meta for t in self._tensors.values())

    def __add__(self, other: "Params") -> Self:
        return self._through(torch._foreach_add, self._matching(other))

    def __sub__(self, other: "Params") -> Self:
        return self._through(torch._foreach_sub, self._matching(other))

    def __mul__(self, factor: float) -> Self:
        return self._through(torch._foreach_mul, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Self:
        return self._through(torch._foreach_div, divisor)

    def __neg__(self) -> Self:
        return self * -1.0

    def lerp(self, other: "Params", weight: float) -> Self:
        """Linear interpolation: these values at weight 0, those of `other` at weight 1."""
        return self._through(torch._foreach_lerp, self._matching(other), weight)

    def zeros(self) -> Self:
        return self.map(torch.zeros_like)

    def norm(self) -> Tensor:
        """The Euclidean norm of all values together."""
        return torch.stack(torch._foreach_norm(self.tensors)).norm() if self else torch.zeros(())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)({k: change(t) for k, t in self._tensors.items()})

    def to(self, device: torch.device | str) -> Self:
        if all(t.device == torch.device(device) for t in self.tensors):
            return self
        return self.map(lambda t: t.to(device))

    def select(self, belongs: Callable[[str], bool]) -> Self:
        return type(self)({k: t for k, t in self._tensors.items() if belongs(k)})

    def holding(self, other: "Params") -> Self:
        """These values with those of `other` replacing the ones of the same names."""
        stray = [k for k in other if k not in self._tensors]
        if stray:
            raise ModelError(f"'{stray[0]}' is not among the {len(self)} tensors it should replace")
        for k, t in other.items():
            _same_shape(k, self._tensors[k], t)
        return type(self)({k: other.get(k, t) for k, t in self._tensors.items()})

    def finite(self) -> bool:
        """Whether every value is finite."""
        sums = [t.sum() for t in self.tensors if t.is_floating_point() and t.numel()]
        if self.hollow or not sums:
            return True
        # one transfer for all sums; see the function `finite`
        return bool(torch.stack(sums).isfinite().all()) or all(finite(t) for t in self.tensors)

    def digest(self) -> str:
        """SHA-256 of names, types, shapes and bytes, in the order of the names."""
        h = hashlib.sha256()
        for name in sorted(self._tensors):
            t = self._tensors[name].detach()
            h.update(f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}\n".encode())
            if t.is_meta:
                continue
            t = t.cpu().contiguous()
            h.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
        return h.hexdigest()

    def _through(self, operation: Callable[..., Iterable[Tensor]], *others: Any) -> Self:
        if not self:
            return self  # torch's list operations refuse an empty list
        if self.hollow:
            return self  # shapes do not change, and a rehearsal of thousands of rounds must be fast
        return type(self)(dict(zip(self._tensors, operation(self.tensors, *others))))

    def _matching(self, other: "Params") -> list[Tensor]:
        if not isinstance(other, Params):
            raise TypeError(f"Params need Params, not {type(other).__name__}")
        if self._tensors.keys() != other._tensors.keys():
            odd = sorted(self._tensors.keys() ^ other._tensors.keys())
            raise ModelError(f"two sets of parameters do not match: {len(odd)} names differ, such as '{odd[0]}'")
        for k, t in self._tensors.items():
            _same_shape(k, t, other._tensors[k])
        return [other._tensors[k] for k in self._tensors]


class Buffers(Params):
    """Values of a network that are not trained, such as BatchNorm's statistics; the ledger counts only their bytes."""

    __slots__ = ()
    counted = False

    @classmethod
    def of(cls, net: "nn.Module | Valued") -> Self:
        return cls({k: _own(b) for k, b in named_values(net)[1].items()})

    def lerp(self, other: "Params", weight: float) -> Self:
        """Floats are averaged; integers (counters) take the maximum."""
        pairs = zip(self, self.tensors, self._matching(other))
        return type(self)(
            {k: torch.lerp(a, b, weight) if a.is_floating_point() else torch.maximum(a, b) for k, a, b in pairs}
        )


class Mean(Generic[T]):
    """The running weighted mean of what was added so far.

    Equal updates average to exactly themselves, and the weights need not be known beforehand.
    """

    def __init__(self, so_far: T | None = None, total: float = 0.0) -> None:
        self._average: Any = so_far
        self.total = total  # of the weights

    def add(self, value: T, weight: float) -> None:
        if not weight > 0:
            raise ModelError(f"an update has weight {weight}; weights must be positive")
        self.total += weight
        self._average = value if self._average is None else self._average.lerp(value, weight / self.total)

    @property
    def value(self) -> T:
        if self._average is None:
            raise ModelError("there is nothing to average: no client answered")
        return self._average


def mean(updates: Iterable[tuple[T, float]]) -> T:
    """The weighted mean of parameters or models, holding one of them at a time."""
    average: Mean[T] = Mean()
    for value, weight in updates:
        average.add(value, weight)
        del value  # free it before the next one is made
    return average.value


class Valued(Protocol):
    """A network with its values by name, such as `core/model.py: Net`."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def named_values(net: nn.Module | Valued) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """A network's parameters and saved buffers by name."""
    if not isinstance(net, nn.Module):
        return net.params, net.buffers
    saved = net.state_dict(keep_vars=True).keys()
    return dict(net.named_parameters()), {k: b for k, b in net.named_buffers() if k in saved}


def finite(tensor: Tensor) -> bool:
    """Whether every value of a tensor is finite."""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    # the sum is ten times as fast as a test of each value; as it may overflow, an infinite sum is checked value by value
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().clone(memory_format=torch.contiguous_format)


def _same_shape(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ModelError(f"'{name}' has shape {tuple(b.shape)} where {tuple(a.shape)} is expected")
