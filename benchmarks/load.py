"""Load a federation: thousands of simulated clients, and many sites over Flower. Memory must be flat, and no reply lost.

    python benchmarks/load.py [--quick] [--only simulated|sites] [--sites 50] [--rounds 500] [--json]

Simulated cells are whole runs in fresh processes, each client training one step on one image; seconds are the minimum over
the rounds after the first. Sites are forked from one process, without keys; they train nothing. Memory is the resident set.
Its slope is a least-squares line over the rounds after the first quarter. On a busy machine times are upper bounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch
from idle import IdleApart
from scaling import OneEach, Stack, memory
from soak import children_of, resident_mb

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.algorithms.fedavg import FedAvg
from effuse.core.algorithm import Algorithm
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD
from effuse.data.partition import Iid
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.runs.records import RoundRecord
from effuse.tasks.denoise import Denoise
from effuse.transport.flower.commands import Served, join, served
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.subprocesses import free_port

FULL = [(1000, None, 1_000_000, 3), (10_000, 10, 1_000_000, 30), (10_000, None, 10_000, 2)]
QUICK = [(100, None, 10_000, 3), (1000, 10, 10_000, 6)]


class Watch(Observer):
    """Takes the memory of this process, of its children and of other processes after every round."""

    def __init__(self, others: list[int]) -> None:
        self.others, self.server, self.superlink, self.sites = others, [0.0] * 0, [0.0] * 0, [0.0] * 0

    def closed(self, record: RoundRecord) -> None:
        links = [pid for pid in children_of(os.getpid()) if pid not in self.others]
        self.server.append(resident_mb(os.getpid()))
        self.superlink.append(sum(map(resident_mb, links)))
        self.sites.append(max(map(resident_mb, self.others), default=0.0))
        if self.others and len(self.server) % 10 == 0:
            found = f"server {self.server[-1]:.1f} MB, SuperLink {self.superlink[-1]:.1f}, largest site {self.sites[-1]:.1f}"
            print(f"round {len(self.server)}: {record.seconds.total:.1f} s, {found}", file=sys.stderr, flush=True)


def recipe_of(clients: int, parameters: int, rounds: int, algorithm: Algorithm) -> Recipe:
    return Recipe(
        data=OneEach(n=clients),
        clients=clients,
        partition=Iid(),
        model=Stack(parameters=parameters),
        task=Denoise(),
        algorithm=algorithm,
        rounds=rounds,
        evaluate=Evaluate(grid=0),
        threads=1,
    )


def slope(values: list[float]) -> float:
    """What a line through the values after the first quarter gains in 100 of them."""
    tail = values[len(values) // 4 :]
    n = len(tail)
    if n < 3:
        return 0.0
    middle, mean = (n - 1) / 2, sum(tail) / n
    moved = sum((i - middle) * (v - mean) for i, v in enumerate(tail))
    return 100 * moved / sum((i - middle) ** 2 for i in range(n))


def simulated(clients: int, cohort: int | None, parameters: int, rounds: int) -> dict[str, Any]:
    """A run in this process."""
    algorithm = FedAvg(local=SGD(lr=1e-6, batch=1, steps=1), cohort=cohort)
    watch = Watch([])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        driver.run(recipe_of(clients, parameters, rounds, algorithm), run, observer=watch)
        records = RunFolder(run).records()
    expected = cohort or clients
    return {
        "seconds": min(record.seconds.total for record in records[1:]),
        "peak_mb": memory("VmHWM") / 1e6,
        "slope_mb": slope(watch.server),
        "lost": sum(expected - record.traffic.messages.up for record in records),
    }


def over_flower(sites: int, rounds: int) -> dict[str, Any]:
    """A run whose sites are processes of this machine."""
    recipe, port = recipe_of(sites, 10_000, rounds, IdleApart()), free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = [forked_site(port, k, Path(folder)) for k in range(sites)]
        watch = Watch(children)
        engine = served(Served(f"127.0.0.1:{port}"), "load", sites)
        try:
            driver.run(recipe, Path(folder) / "run", name="load", device="cpu", observer=watch, served=engine)
        finally:
            ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        records = RunFolder(Path(folder) / "run").records()
        log = (Path(folder) / "run" / "federation.log").read_text()
    memories = {"server": watch.server, "superlink": watch.superlink, "largest site": watch.sites}
    return {
        "sites": sites,
        "rounds": len(records),
        "seconds": min(record.seconds.total for record in records[1:]),
        "lost": sum(sites - record.traffic.messages.up for record in records),
        "silent or rejected": log.count("silent") + log.count("rejected"),
        "sites that failed": sum(code != 0 for code in ended),
        "peak_mb": {name: max(found) for name, found in memories.items()},
        "slope_mb": {name: slope(found) for name, found in memories.items()},
    }


def forked_site(port: int, k: int, folder: Path) -> int:
    """A site in a process of its own, which shares the memory of the imported libraries with this one."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(folder / f"site-{k}.log", "w") as log:
                words = (f"127.0.0.1:{port}", k, "recipe", None, folder / str(k), Consent(), "cpu")
                join(*words, lambda line: print(line, file=log, flush=True))
            code = 0
        finally:
            os._exit(code)
    return child


def measured(cell: tuple[int, int | None, int, int]) -> dict[str, Any]:
    """A simulated cell in a fresh process."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    clients, cohort, parameters, rounds = cell
    row = {"clients": clients, "cohort": cohort or clients, "parameters": parameters, "rounds": rounds}
    return row | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--only", choices=["simulated", "sites"])
    parser.add_argument("--sites", type=int, help="how many sites over Flower; by default 50, with --quick 3")
    parser.add_argument("--rounds", type=int, help="rounds of theirs; by default 500, with --quick 5")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cell:
        print(json.dumps(simulated(*json.loads(given.cell))))
        return
    rows: list[dict[str, Any]] = []
    if given.only != "sites":
        rows += [measured(cell) for cell in (QUICK if given.quick else FULL)]
    if given.only != "simulated":
        rows.append(over_flower(given.sites or (3 if given.quick else 50), given.rounds or (5 if given.quick else 500)))
    print(json.dumps({"rows": rows}) if given.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
