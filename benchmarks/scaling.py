"""Measure how a round scales: time should grow linearly, and memory should not grow with the number of clients.

    python benchmarks/scaling.py [--quick] [--only clients] [--json]

Every cell is a whole run in a fresh process: FedAvg through the driver, with checkpoints, ledger and rounds.jsonl. Each
client trains one step on one image, so that the framework dominates. `kept` also saves Adam's moments of every client to
disk. Seconds are the minimum over the rounds after the first. Memory is the peak resident set; `copies` is its excess
over a tiny run, in models, which the suite tests. Time should grow as size^1, and stay below size^1.6 on a busy machine.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.algorithms.fedavg import FedAvg
from effuse.core.data import Dataset, Source, Split
from effuse.core.model import Arch
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD, Adam
from effuse.core.spec import spec
from effuse.data.partition import Iid
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.records import RoundRecord
from effuse.tasks.denoise import Denoise

SIDE = 4
QUICK = {"clients": [(10, 1_000_000), (100, 1_000_000)], "model": [(10, 100_000), (10, 1_000_000)]}
FULL = {
    "clients": [(10, 1_000_000), (100, 1_000_000), (1000, 1_000_000)],
    "kept": [(10, 100_000), (100, 100_000), (1000, 100_000)],
    "model": [(10, 1_000_000), (10, 10_000_000), (10, 100_000_000)],
}


@spec
class OneEach(Source):
    """One image per client."""

    n: int

    def load(self, split: Split) -> Dataset:
        n = self.n if split == "train" else 2
        return Dataset(torch.zeros((n, 1, SIDE, SIDE), dtype=torch.uint8), torch.arange(n) % 2, ("dark", "light"))


class Layers(nn.Module):
    """Square matrices one after another, all trained."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = nn.functional.pad(x.flatten(1), (0, self.width - x[0].numel()))
        for layer in self.layers:
            hidden = hidden + layer(hidden) / len(self.layers)
        return hidden[:, : x[0].numel()].view_as(x)


@spec
class Stack(Arch):
    """A network of about `parameters` parameters, in matrices as large as a U-Net's."""

    parameters: int = 1_000_000

    def build(self) -> nn.Module:
        width = min(512, round(math.sqrt(self.parameters)))
        return Layers(width, round(self.parameters / width**2))

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        """This model is not saved."""


def cell(axis: str, clients: int, parameters: int, rounds: int) -> dict[str, float]:
    """Seconds of a round and peak memory, in this process."""
    rounds_of("clients", 10, 10_000, 1)  # imports and one-time allocations
    floor = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    lines = rounds_of(axis, clients, parameters, rounds)
    seconds = min(line.seconds.total for line in lines[1:])
    return {"seconds": seconds, "peak_mb": memory("VmHWM") / 1e6, "floor_mb": floor / 1e6}


def rounds_of(axis: str, clients: int, parameters: int, rounds: int) -> list[RoundRecord]:
    """The round records of a whole run."""
    solver: Any = SGD(lr=1e-6, batch=1, steps=1)
    if axis == "kept":
        solver = Adam(lr=1e-6, batch=1, steps=1, state="kept")
    recipe = Recipe(
        data=OneEach(n=clients),
        clients=clients,
        partition=Iid(),
        model=Stack(parameters=parameters),
        task=Denoise(),
        algorithm=FedAvg(local=solver),
        rounds=rounds,
        evaluate=Evaluate(grid=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, Path(folder) / "run")
        return RunFolder(Path(folder) / "run").records()


def memory(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def measured(axis: str, clients: int, parameters: int, rounds: int) -> dict[str, float]:
    """The same measurement in a child process."""
    command = [sys.executable, __file__, "--cell", axis, str(clients), str(parameters), str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--only", choices=FULL, help="measure one axis")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        axis, *numbers = arguments.cell
        print(json.dumps(cell(axis, *map(int, numbers))))
        return
    rows = []
    for axis, cells in (QUICK if arguments.quick else FULL).items():
        for clients, parameters in cells if arguments.only in (None, axis) else ():
            row = {"axis": axis, "clients": clients, "parameters": parameters}
            row |= measured(axis, clients, parameters, 3)
            size = clients if axis != "model" else parameters
            before = next((r for r in reversed(rows) if r["axis"] == axis), None)
            if before is not None:
                # an exponent of 1 is linear
                step = size / (before["clients"] if axis != "model" else before["parameters"])
                row["exponent"] = math.log(row["seconds"] / before["seconds"]) / math.log(step)
                row["memory_ratio"] = row["peak_mb"] / before["peak_mb"]
            row["copies"] = (row["peak_mb"] - row["floor_mb"]) * 1e6 / (4 * parameters)
            rows.append(row)
            if not arguments.json:
                tell(row)
    if arguments.json:
        print(json.dumps({"rows": rows}))


def tell(row: dict[str, Any]) -> None:
    grown = f"time grows as size^{row['exponent']:.2f}, memory {row['memory_ratio']:.3f} times" if "exponent" in row else ""
    print(
        f"{row['axis']:>8} {row['clients']:>5} clients {row['parameters'] / 1e6:>6.1f} M: {row['seconds']:>8.3f} s a round, "
        f"{1e3 * row['seconds'] / row['clients']:.2f} ms a client, peak {row['peak_mb']:,.0f} MB, "
        f"{row['copies']:.1f} copies; {grown}",
        flush=True,
    )


if __name__ == "__main__":
    main()
