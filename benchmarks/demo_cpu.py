"""Time a training round of the demo on CPU cores: a plain loop, effuse with `speed=eager`, effuse by default.

    python benchmarks/demo_cpu.py [--quick] [--json] [--threads 2]

The plain loop is that of public code: eager fp32, a DataLoader, a deep-copied model per client, a mean of state_dicts.
All alternate in one process, round by round. The ratio is the median over rounds, so that other load affects all equally.
That of `auto` should be at least 1. The arithmetic floor is three forward passes per image (one forward, twice that
backward) at the best measured rate of a large convolution.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.core.algorithm import Server
from effuse.core.data import Dataset
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.fast import machines_for
from effuse.metrics.cost import macs
from effuse.recipes.demo import demo
from effuse.transport.simulator import Simulator, on_disk

CPU = torch.device("cpu")


def ours(recipe: Recipe, train: Dataset, folder: Path) -> Callable[[], None]:
    """A round of the simulator."""
    machines = machines_for(recipe, CPU, len(train))
    fed = Simulator(recipe, recipe.shards(train), *machines, snapshots=on_disk(folder))
    server, t = Server(recipe.model.initial(Stream((0,)))), 0

    def run_round() -> None:
        nonlocal server, t
        fed.begin(t, 0)
        server = recipe.algorithm.round(server, fed)
        fed.close()
        fed.ledger.close()
        t += 1

    return run_round


def plain(recipe: Recipe, train: Dataset) -> Callable[[], None]:
    """The same round as in public code."""
    solver, drop = recipe.algorithm.local, recipe.task.drop
    shards = recipe.shards(train)
    sets = [TensorDataset(train.floats(train.images[s.rows]), train.labels[s.rows]) for s in shards]
    loaders = [DataLoader(s, solver.batch, shuffle=True) for s in sets]
    table = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    server = recipe.model.build()

    def run_round() -> None:
        states, weights = [], [len(s) / len(train) for s in shards]
        for loader in loaders:
            net = copy.deepcopy(server)
            optimiser = torch.optim.Adam(net.parameters(), solver.lr)
            for _ in range(solver.epochs):
                for x, labels in loader:
                    t = torch.randint(0, 1000, (len(x),))
                    noise = torch.randn_like(x)
                    a = table[t][:, None, None, None]
                    labels = torch.where(torch.rand(len(x)) < drop, -1, labels)
                    loss = nn.functional.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * noise, t, labels), noise)
                    optimiser.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(net.parameters(), solver.clip)
                    optimiser.step()
                    loss.item()
            states.append(net.state_dict())
        server.load_state_dict({k: sum(w * s[k] for w, s in zip(weights, states)) for k in states[0]})

    return run_round


def convolution_rate() -> float:
    """Multiply-adds per second of a large convolution, the best of several measurements."""
    x, net = torch.randn(64, 128, 16, 16), nn.Conv2d(128, 128, 3, padding=1)
    best = 0.0
    with torch.no_grad():
        for _ in range(20):
            began = time.perf_counter()
            net(x)
            best = max(best, x.numel() * 128 * 9 / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = demo().changed([f"threads={arguments.threads}", f"algorithm.local.epochs={1 if arguments.quick else 2}"])
    train = recipe.data.load("train")
    recipe = recipe.resolved(train)
    taken: dict[str, list[float]] = {"plain": [], "eager": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        functions = {
            "plain": plain(recipe, train),
            "eager": ours(recipe.changed(["speed=eager"]), train, Path(folder) / "eager"),
            "auto": ours(recipe, train, Path(folder) / "auto"),
        }
        for run_round in functions.values():
            run_round()  # build networks, fill caches
        for _ in range(3 if arguments.quick else 9):
            for name, run_round in functions.items():
                began = time.perf_counter()
                run_round()
                taken[name].append(time.perf_counter() - began)
    images = recipe.algorithm.local.images_on(len(train))
    ratios = {k: statistics.median(p / x for p, x in zip(taken["plain"], v)) for k, v in taken.items()}
    floor = images * 3 * macs(recipe.model) / convolution_rate()
    rows = {
        k: {"seconds": statistics.median(v), "images_per_second": images / statistics.median(v), "ratio": ratios[k]}
        for k, v in taken.items()
    }
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "torch": torch.__version__, "floor_seconds": floor, "rows": rows}))
        return
    print(f"a round of the demo, {images} images, {arguments.threads} threads; arithmetic floor {floor:.2f} s")
    print(f"{'':>8} {'seconds':>8} {'images/s':>9} {'ratio to plain':>15}, at least 1 wanted of auto")
    for name, row in rows.items():
        print(f"{name:>8} {row['seconds']:>8.2f} {row['images_per_second']:>9,.0f} {row['ratio']:>15.2f}")


if __name__ == "__main__":
    main()
