"""Measure ideas for a faster training step that effuse does not use, against its present operations.

    python benchmarks/ideas.py [--quick] [--json] [--only 3M|36M] [--idea flat|dense|first|native|products|vectorised|fp8]

flat        Adam over one buffer of all weights, instead of a list
dense       depthwise convolutions as full ones with zero weights off the diagonal, for tensor cores
first       depthwise convolutions with channels first
native      as `first`, with torch's own kernels instead of cuDNN's
products    attention as two matrix products and a compiled softmax, instead of flash attention with a reproducible gradient
vectorised  five clients in one batch, with grouped convolutions and batched matrix products, instead of five calls
fp8         the forward matrix products with 8-bit inputs (scales known), instead of bf16

Every figure is the sum over a step of batch 128, replayed from CUDA graphs. Without a GPU only the operations are
counted.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import networks
import torch
import torch.nn.functional as F
from kernel_times import microseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CLIENTS, BF16, EIGHTH = 5, torch.bfloat16, torch.float8_e4m3fn
SETS = 4  # sets of inputs, used in turn: as in a step, most inputs are not in the cache
ATTENTIONS = {"3M": {}, "36M": {256: 5, 16: 1}}  # full attention with one wide head: {tokens: how often}


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution or a matrix product."""

    kind: str  # conv, transposed or linear
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    groups: int = 1

    @property
    def matrix(self) -> tuple[int, int, int] | None:
        """Rows, inputs and outputs of a plain matrix product; None for others."""
        if self.kind == "linear":
            return self.x[0], self.x[1], self.weight[0]
        if self.kind == "conv" and self.weight[2:] == (1, 1) and self.groups == self.stride == 1:
            return self.x[0] * self.x[2] * self.x[3], self.x[1], self.weight[0]
        return None

    def call(self, clients: int, device: torch.device, last: bool = True) -> Callable[[], Any]:
        """A function that runs it forwards and backwards for several clients at once, with channels `last` or first."""
        x, weight = (_random(shape, device, last) for shape in (self._x(clients), self._weight(clients)))
        apply = {"linear": self._linear, "conv": self._conv, "transposed": self._transposed}[self.kind]
        y = apply(x, weight, clients)
        dy = torch.randn_like(y)
        return lambda: torch.autograd.grad(apply(x, weight, clients), (x, weight), dy)

    def _x(self, clients: int) -> tuple[int, ...]:
        return (clients, *self.x) if self.kind == "linear" else (self.x[0], clients * self.x[1], *self.x[2:])

    def _weight(self, clients: int) -> tuple[int, ...]:
        return (clients, *self.weight) if self.kind == "linear" else (clients * self.weight[0], *self.weight[1:])

    def _linear(self, x: Tensor, weight: Tensor, clients: int) -> Tensor:
        return torch.bmm(x, weight.transpose(1, 2))

    def _conv(self, x: Tensor, weight: Tensor, clients: int) -> Tensor:
        return F.conv2d(x, weight, None, self.stride, self.padding, 1, clients * self.groups)

    def _transposed(self, x: Tensor, weight: Tensor, clients: int) -> Tensor:
        return F.conv_transpose2d(x, weight, None, self.stride, self.padding, 0, clients * self.groups)


def _random(shape: tuple[int, ...], device: torch.device, last: bool) -> Tensor:
    layout = torch.channels_last if last and len(shape) == 4 else torch.contiguous_format
    return torch.randn(shape, device=device, dtype=BF16).contiguous(memory_format=layout).requires_grad_()


def products(name: str) -> collections.Counter[Product]:
    """The convolutions and matrix products of a step's forward pass."""
    return networks.operations(name, _product)


def _product(func: Any, args: tuple[Any, ...]) -> Product | None:
    if func is torch.ops.aten.convolution.default:
        x, weight, _, stride, padding, _, transposed, _, groups = args
        kind = "transposed" if transposed else "conv"
        return Product(kind, tuple(x.shape), tuple(weight.shape), stride[0], padding[0], groups)
    if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
        x, weight = args[-2:]
        return Product("linear", tuple(x.shape), tuple(weight.t().shape))
    return None


def _aligned(width: int) -> int:
    return width + -width % 8


def flat(name: str, device: torch.device) -> tuple[float, float]:
    shapes = [p.shape for p in networks.ARCHS[name].build().parameters()]
    return _adam(shapes, device), _adam([torch.Size([sum(s.numel() for s in shapes)])], device)


def _adam(shapes: list[torch.Size], device: torch.device) -> float:
    weights = [torch.zeros(s, device=device).requires_grad_() for s in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    rate = torch.full((), 1e-4, device=device)
    return microseconds([torch.optim.Adam(weights, rate, fused=True, capturable=True).step] * 4)


def _cudnn(enabled: bool = True, trial: bool = True) -> contextlib.AbstractContextManager[None]:
    """cuDNN's settings as a step is recorded: the fastest of the bitwise reproducible algorithms."""
    return torch.backends.cudnn.flags(enabled=enabled, benchmark=trial, deterministic=True)


def dense(name: str, device: torch.device) -> tuple[float, float]:
    now = tried = 0.0
    with _cudnn():
        for product, times in _depthwise(name):
            width = _aligned(product.groups)
            B, _, *places = product.x
            full = dataclasses.replace(product, x=(B, width, *places), weight=(width, width, *product.weight[2:]), groups=1)
            alone, other = (microseconds([p.call(1, device) for _ in range(SETS)]) for p in (product, full))
            now, tried = now + times * alone, tried + times * other
    return now, tried


def first(name: str, device: torch.device, enabled: bool = True) -> tuple[float, float]:
    now = tried = 0.0
    for product, times in _depthwise(name):
        with _cudnn():
            now += times * microseconds([product.call(1, device) for _ in range(SETS)])
        with _cudnn(enabled):
            tried += times * microseconds([product.call(1, device, last=False) for _ in range(SETS)])
    return now, tried


def native(name: str, device: torch.device) -> tuple[float, float]:
    return first(name, device, enabled=False)


def _depthwise(name: str) -> list[tuple[Product, int]]:
    return [(product, times) for product, times in products(name).items() if product.groups > 1]


def products_of_attention(name: str, device: torch.device) -> tuple[float, float]:
    now = tried = 0.0
    for tokens, times in ATTENTIONS[name].items():
        q, k, v = (
            torch.randn(networks.BATCH, 1, tokens, 256, device=device, dtype=BF16, requires_grad=True) for _ in range(3)
        )
        dout = torch.randn_like(q)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            now += times * microseconds([functools.partial(_gradients, F.scaled_dot_product_attention, q, k, v, dout)] * 4)
        run = torch.compile(_by_products, dynamic=False)
        tried += times * microseconds([functools.partial(_gradients, run, q, k, v, dout)] * 4)
    return now, tried


def _gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def _by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT).float() * q.shape[-1] ** -0.5, -1).to(BF16) @ v


def vectorised(name: str, device: torch.device) -> tuple[float, float]:
    now = tried = 0.0
    with _cudnn(trial=False):  # cuDNN's trials of grouped convolutions take minutes: none on both sides
        for product, times in products(name).items():
            alone, together = (microseconds([product.call(n, device) for _ in range(SETS)]) for n in (1, CLIENTS))
            now, tried = now + times * CLIENTS * alone, tried + times * together
    return now, tried


def fp8(name: str, device: torch.device) -> tuple[float, float]:
    now = tried = 0.0
    for product, times in products(name).items():
        if product.matrix is None or any(n % 16 for n in product.matrix):  # fp8 products need multiples of 16
            continue
        rows, inner, outer = product.matrix
        a, b = (torch.randn(n, inner, device=device, dtype=BF16) for n in (rows, outer))
        now += times * microseconds([functools.partial(torch.mm, a, b.t())] * 4)
        tried += times * microseconds([functools.partial(_eighths, a, b.to(EIGHTH), torch.ones((), device=device))] * 4)
    return now, tried


def _eighths(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(a.to(EIGHTH), b.t(), scale, scale, out_dtype=BF16)


IDEAS: dict[str, Callable[[str, torch.device], tuple[float, float]]] = {
    "flat": flat,
    "dense": dense,
    "first": first,
    "native": native,
    "products": products_of_attention,
    "vectorised": vectorised,
    "fp8": fp8,
}
# the ideas that apply only to networks with such operations
CONCERNED: dict[str, Callable[[str], Any]] = {
    "dense": _depthwise,
    "first": _depthwise,
    "native": _depthwise,
    "products": ATTENTIONS.get,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small network only")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--only", choices=list(ATTENTIONS), help="one network")
    parser.add_argument("--idea", choices=list(IDEAS), help="one idea")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(ATTENTIONS)[: 1 if arguments.quick else None]
    rows: list[dict[str, Any]] = []
    for name in names:
        found = products(name)
        matrices = sum(n for product, n in found.items() if product.matrix)
        rows.append({"network": name, "products": found.total(), "kinds": len(found), "matrices": matrices})
        if not arguments.json:
            print(
                f"{name}: {found.total()} convolutions and products of {len(found)} kinds, {matrices} plain matrices",
                flush=True,
            )
        for idea in [arguments.idea] if arguments.idea else list(IDEAS):
            if not torch.cuda.is_available() or (idea in CONCERNED and not CONCERNED[idea](name)):
                continue
            now, tried = IDEAS[idea](name, torch.device("cuda"))
            rows.append({"network": name, "idea": idea, "now_us": now, "tried_us": tried})
            if not arguments.json:
                print(f"{name} {idea}: {now:.0f} us now, {tried:.0f} us tried, {now / tried:.2f} times", flush=True)
    if arguments.json:
        print(json.dumps({"cuda": torch.cuda.is_available(), "rows": rows}))


if __name__ == "__main__":
    main()
