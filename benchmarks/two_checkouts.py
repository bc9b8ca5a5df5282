"""Compare the training speed of two checkouts of effuse on one machine, in turns.

    python benchmarks/two_checkouts.py OLD NEW [--networks 3M,36M] [--turns 5] [--steps 100] [--quick] [--json]

Each checkout has a process of its own, which makes its recordings alone and then trains in turns with the other's.
A ratio is new over old of one turn, in which each runs first once: what ran before a loop can change its speed by some per
cent. The median over all turns should be at least 0.98. The loops are those of
`throughput.py` of each checkout: `eager` on a CPU; `graph`, `compile` and `slots` on a GPU.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENTS = 5
SLOTS = {"3M": 3}  # clients at a time; two of the other networks
Rates = dict[tuple[str, str], list[float]]  # images/s of every turn, by network and variant


def serve(networks: list[str], steps: int, device_name: str) -> None:
    """In the process of a checkout: make the loops, then run those that the parent asks for."""
    import throughput  # of the checkout, which is on this process's path
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr
    device = torch.device(device_name)
    torch.set_num_threads(2)

    def machine(**options: Any) -> Any:
        kind = throughput.Captured if device.type == "cuda" else throughput.Eager
        task = (throughput.TASK,) if "task" in inspect.signature(kind).parameters else ()  # of older checkouts
        return kind(device, *task, **options if device.type == "cuda" else {})

    loops: dict[tuple[str, str], Callable[[], int]] = {}
    for network in networks:
        arch = throughput.ARCHS[network]

        def loop(machines: list[Any], arch: Any = arch) -> Callable[[], int]:
            made: Callable[[], int] = throughput.ours(machines, arch, CLIENTS, max(1, steps // CLIENTS))
            return made

        if device.type == "cpu":
            loops[network, "eager"] = loop([machine()])
            continue
        compiled = [machine(compiled=True) for _ in range(SLOTS.get(network, 2))]
        loops[network, "graph"] = loop([machine(compiled=False)])
        loops[network, "compile"], loops[network, "slots"] = loop(compiled[:1]), loop(compiled)

    def timed(work: Callable[[], int]) -> float:
        began = time.perf_counter()
        images = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return images / (time.perf_counter() - began)

    for work in loops.values():
        timed(work)
    answers.write(json.dumps([list(key) for key in loops]) + "\n")
    answers.flush()
    for line in sys.stdin:
        network, variant = json.loads(line)
        answers.write(json.dumps(timed(loops[network, variant])) + "\n")
        answers.flush()


class Checkout:
    """The process of a checkout."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        path = [str(root / "src"), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        own = ["--networks", options.networks, "--steps", str(options.steps), "--device", options.device]
        command = [sys.executable, "-P", __file__, "--serve", *own, str(root), str(root)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loops: list[tuple[str, str]] = [(n, v) for n, v in self._answer()]

    def rate(self, loop: tuple[str, str]) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(loop) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a checkout ended with {self.process.wait()}")
        return json.loads(line)


def compare(old: Checkout, new: Checkout, turns: int) -> list[dict[str, Any]]:
    """A row for each loop. In each turn both run twice; each goes first once."""
    found: tuple[Rates, Rates] = {}, {}
    for _ in range(turns):
        for loop in old.loops:
            first, second, third, last = (which.rate(loop) for which in (old, new, new, old))
            for rates, pair in zip(found, ((first, last), (second, third)), strict=True):
                rates.setdefault(loop, []).append(statistics.harmonic_mean(pair))
    rows = []
    for loop in old.loops:
        before, now = found[0][loop], found[1][loop]
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        row = {"network": loop[0], "variant": loop[1], "ratio": statistics.median(ratios), "ratios": ratios}
        rows.append(row | {"old": statistics.median(before), "new": statistics.median(now)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--networks", default="3M,36M", help="networks of throughput.py")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="training steps of all five clients together")
    parser.add_argument("--device", default="", help="by default a GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="the digits' network, three turns of few steps")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.networks, options.turns, options.steps = "digits", 3, 5
    if options.serve:
        return serve(options.networks.split(","), options.steps, options.device)
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    old = Checkout(options.old.resolve(), options)
    new = Checkout(options.new.resolve(), options)
    rows = compare(old, new, options.turns)
    for checkout in (old, new):
        checkout.close()
    if options.json:
        place = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        return print(json.dumps({"device": place, "torch": torch.__version__, "turns": options.turns, "rows": rows}))
    for row in rows:
        least, most = min(row["ratios"]), max(row["ratios"])
        print(
            f"{row['network']:>6} {row['variant']:>7}: old {row['old']:>8,.0f} images/s, new {row['new']:>8,.0f}, "
            f"ratio {row['ratio']:.3f} ({least:.3f} to {most:.3f})"
        )


if __name__ == "__main__":
    main()
