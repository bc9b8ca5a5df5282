"""Time effuse's kernels at the shapes of the benchmark networks, beside torch's own.

    python benchmarks/kernel_times.py [--quick] [--json] [--only 3M|36M|20M|9M|5M] [--compiled N] [--tune]

Every operation of a training step of batch 128 is timed alone, replayed from a CUDA graph over inputs that together
exceed the cache. `floor` is the time to read every input and write every output once at the measured memory rate. Without
a GPU only the floors are printed, at 4 TB/s. `eager` and `compiled` are the same expressions in torch, forwards and
backwards. Only the N heaviest operations are compiled, because compiling takes seconds. `--tune` tries other tilings.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import networks
import torch
import torch.nn.functional as F
from torch import Tensor

from effuse.fast.ops.attention import linear_attention, linear_attention_backward
from effuse.fast.ops.kernels import available
from effuse.fast.ops.norm import norm, norm_backward

RATE, CACHE = 4.0e12, 150e6
TILINGS = [(32, 8192), (16, 8192), (64, 8192), (32, 4096), (32, 16384), (16, 16384), (32, 32768), (16, 32768)]  # WIDTH, HELD
TILES = [(64, 4), (32, 2), (32, 4), (64, 2), (128, 4), (128, 8)]  # TILE, WARPS


Given = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Norm:
    """One kind of normalisation."""

    shape: tuple[int, ...]
    row: int  # the stride of positions; more than the channels if a convolution padded them
    # stride of shifts (0: one for all images; None: no shift), groups, eps, before, after, rate, layer
    options: tuple[Any, ...]

    def __str__(self) -> str:
        shift, groups, _, before, after, rate, _ = self.options
        parts = (
            ["bias" if shift == 0 else "time"] * (shift is not None)
            + ["gelu"] * before
            + [f"norm({groups})"]
            + ["silu"] * after
            + ["drop"] * (rate > 0)
        )
        return f"{' '.join(parts)} {_image(self.shape)}"

    @property
    def bytes(self) -> tuple[float, float]:
        """Bytes moved forwards (x, y) and backwards (x, dy, dx), in bf16."""
        unit = 2.0 * torch.Size(self.shape).numel()
        return 2 * unit, 3 * unit

    def inputs(self, device: torch.device) -> Given:
        B, C, *places = self.shape
        apart = self.options[0]
        shift = (
            torch.randn(C, device=device) if apart == 0 else torch.randn(B, apart, device=device)[:, :C] if apart else None
        )
        seed = torch.zeros((), dtype=torch.int64, device=device) if self.options[5] else None
        weight, bias = torch.ones(C, device=device), torch.zeros(C, device=device)
        x, dy = _drawn(B, self.row, places, device)[:, :C], _drawn(B, C, places, device)
        return {"x": x, "dy": dy, "shift": shift, "weight": weight, "bias": bias, "seed": seed}

    def ours(self, given: Given) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x, dy = given["x"], given["dy"]
        rest = [given[k] for k in ("shift", "weight", "bias", "seed")]
        stats = norm(x, *rest, *self.options[1:])[1]
        return lambda: norm(x, *rest, *self.options[1:]), lambda: norm_backward(x, dy, *rest, stats, *self.options[3:])

    def reference(self, given: Given) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """Torch's expression as autocast runs it, and its inputs."""
        _, groups, eps, before, after, rate, _ = self.options

        def expression(x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None = None) -> Tensor:
            u = x if shift is None else x + shift.to(x.dtype)[..., *[None] * (x.ndim - 2)]
            y = F.group_norm((F.gelu(u) if before else u).float(), groups, weight, bias, eps)
            return F.dropout(F.silu(y) if after else y, rate).to(x.dtype)

        return expression, [t for t in (given["x"], given["weight"], given["bias"], given["shift"]) if t is not None]


@dataclasses.dataclass(frozen=True)
class Attention:
    """One kind of linear attention."""

    shape: tuple[int, ...]  # of queries, keys and values together
    heads: int

    def __str__(self) -> str:
        return f"linear attention {_image(self.shape)}"

    @property
    def bytes(self) -> tuple[float, float]:
        """Bytes moved forwards (q, k, v, output) and backwards (these and their gradients)."""
        unit = 2.0 * torch.Size(self.shape).numel() / 3
        return 4 * unit, 7 * unit

    def inputs(self, device: torch.device) -> Given:
        B, C, *places = self.shape
        return {"x": _drawn(B, C, places, device), "dy": _drawn(B, C // 3, places, device)}

    def ours(self, given: Given) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x, dy = given["x"], given["dy"]
        _, *kept = linear_attention(x, self.heads)
        return lambda: linear_attention(x, self.heads), lambda: linear_attention_backward(x, dy, *kept)

    def reference(self, given: Given) -> tuple[Callable[..., Tensor], list[Tensor]]:
        def expression(x: Tensor) -> Tensor:
            q, k, v = x.reshape(len(x), 3, self.heads, x.shape[1] // (3 * self.heads), -1).unbind(1)
            context = k.float().softmax(-1).to(x.dtype) @ v.mT
            out = context.mT @ (q.float().softmax(-2) * q.shape[2] ** -0.5).to(x.dtype)
            return out.reshape(given["dy"].shape)

        return expression, [given["x"]]


Case = Norm | Attention


def _image(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[1:]))


def _drawn(B: int, C: int, places: list[int], device: torch.device) -> Tensor:
    return torch.randn((B, *places, C), device=device, dtype=torch.bfloat16).movedim(-1, 1)


def cases(name: str) -> collections.Counter[Case]:
    """The calls of effuse's operators in a step, with counts."""
    return networks.operations(name, _case)


def _case(func: Any, args: tuple[Any, ...]) -> Case | None:
    if func is torch.ops.effuse.norm.default:
        x, shift, _, _, _, *options = args
        options[-1] = 0  # the layer's number does not change the time
        apart = None if shift is None else 0 if shift.ndim == 1 else shift.stride(0)
        return Norm(tuple(x.shape), x.stride(-1), (apart, *options))
    return Attention(tuple(args[0].shape), args[1]) if func is torch.ops.effuse.linear_attention.default else None


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """The time of one call in a graph of all calls, the best of five replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / len(calls))
    return best


def copies(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Enough sets of inputs to exceed the cache, and at least four."""
    return [case.inputs(device) for _ in range(max(4, min(32, int(CACHE / case.bytes[1]))))]


def torchs(case: Case, sets: list[dict[str, Any]], compiled: bool) -> tuple[float, float]:
    expression = case.reference(sets[0])[0]
    run = torch.compile(expression, dynamic=False) if compiled else expression
    forward, both = [], []
    for given in sets:
        learnt = [t.detach().requires_grad_() for t in case.reference(given)[1]]
        forward.append(lambda learnt=learnt: run(*learnt))
        both.append(lambda learnt=learnt, dy=given["dy"]: torch.autograd.grad(run(*learnt), learnt, dy))
    one = microseconds(forward)
    return one, microseconds(both) - one


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a large copy."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    return 2 * a.numel() / (1e-6 * microseconds([lambda: a.clone()] * 4))


def timed(name: str, device: torch.device, rate: float, compiled: int, quick: bool) -> Iterator[dict[str, Any]]:
    found = sorted(cases(name).items(), key=lambda c: -c[1] * sum(c[0].bytes))
    for i, (case, times) in enumerate(found[:6] if quick else found):
        row: dict[str, Any] = {"network": name, "case": str(case), "times": times}
        row["floor"] = tuple(1e6 * b / rate for b in case.bytes)
        if device.type == "cuda":
            sets = copies(case, device)
            pairs = [case.ours(given) for given in sets]
            row["ours"] = tuple(microseconds([pair[way] for pair in pairs]) for way in (0, 1))
            row["gb_per_second"] = tuple(b / t / 1e3 for b, t in zip(case.bytes, row["ours"]))
            row["eager"] = torchs(case, sets, compiled=False)
            if i < compiled:
                row["compiled"] = torchs(case, sets, compiled=True)
        yield row


def total(kind: type, name: str, device: torch.device) -> float:
    """Milliseconds of a step's operations of one kind, with the present tiling."""
    spent = 0.0
    for case, times in cases(name).items():
        if isinstance(case, kind):
            pairs = [case.ours(given) for given in copies(case, device)]
            spent += sum(microseconds([pair[way] for pair in pairs]) for way in (0, 1)) * times / 1e3
    return spent


def tune(names: list[str], device: torch.device) -> None:
    from effuse.fast.ops.kernels import attention, tiling

    for name in names:
        for tiling.WIDTH, tiling.HELD in TILINGS:
            print(
                f"{name} norm, WIDTH {tiling.WIDTH}, HELD {tiling.HELD}: {total(Norm, name, device):.3f} ms a step",
                flush=True,
            )
        for attention.TILE, attention.WARPS in TILES if any(isinstance(c, Attention) for c in cases(name)) else ():
            spent = total(Attention, name, device)
            print(f"{name} attention, TILE {attention.TILE}, WARPS {attention.WARPS}: {spent:.3f} ms a step", flush=True)


def tell(row: dict[str, Any]) -> None:
    texts = [
        f"{key} " + " + ".join(f"{t:.1f}" for t in row[key]) for key in ("ours", "floor", "eager", "compiled") if key in row
    ]
    print(
        f"{row['network']:>4} {row['times']:>2} x {row['case']:<40} us forwards + backwards: {', '.join(texts)}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the six heaviest operations only, the first of them compiled")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--only", choices=list(networks.ARCHS), help="one network")
    parser.add_argument("--compiled", type=int, default=3, metavar="N", help="operations to compare with torch.compile")
    parser.add_argument("--tune", action="store_true", help="try other tilings instead")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [arguments.only] if arguments.only else list(networks.ARCHS)
    if not available(device):
        device = torch.device("cpu")
        if not arguments.json:
            print("no GPU with triton, so only the floors at 4 TB/s are shown")
    elif arguments.tune:
        return tune(names, device)
    rate = memory_rate(device) if device.type == "cuda" else RATE
    rows = []
    for name in names:
        for row in timed(name, device, rate, 1 if arguments.quick else arguments.compiled, arguments.quick):
            rows.append(row)
            if not arguments.json:
                tell(row)
        own = [r for r in rows if r["network"] == name]
        sums = {
            k: sum(r["times"] * sum(r[k]) for r in own) / 1e3 for k in ("ours", "floor", "eager") if all(k in r for r in own)
        }
        if not arguments.json:
            print(f"{name:>4} a step, ms: " + ", ".join(f"{k} {v:.3f}" for k, v in sums.items()), flush=True)
    if arguments.json:
        print(json.dumps({"device": device.type, "bytes_per_second": rate, "rows": rows}))


if __name__ == "__main__":
    main()
