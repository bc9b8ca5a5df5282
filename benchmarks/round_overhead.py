"""Measure the cost of a round without training: effuse's simulator against a state_dict loop, and memory.

    python benchmarks/round_overhead.py [--quick] [--memory] [--json]

The plain loop is minimal research code: load the global state_dict into one network, copy its state_dict out, add it to a
running weighted sum. Both alternate in this process, so that other load affects both equally. The ratio should stay below
1.5, and the memory below 8 copies of the model, which the suite tests.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from networks import ARCHS

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.algorithms.fedavg import Update
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.data import Dataset, Shard
from effuse.core.federation import Federation
from effuse.core.model import Arch, Model
from effuse.core.params import mean
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.data.partition import Iid
from effuse.data.sources import Labels
from effuse.machines.eager import Eager
from effuse.tasks.denoise import Denoise
from effuse.transport.simulator import Simulator, on_disk


@spec
class Idle(Algorithm):
    """FedAvg without training: clients return the model unchanged, and the server averages it."""

    def round(self, server: Server, fed: Federation) -> Server:
        return Server(mean((u.model, u.weight) for _, u in fed.ask(self.echo, fed.clients, model=server.model)))

    @on_client
    def echo(self, client: Client, model: Model) -> Update:
        return Update(client.unload(client.load(model)), float(client.size), 0.0)


def simulator(arch: Arch, clients: int, folder: Path) -> tuple[Callable[[], None], Model]:
    """An effuse round as a function."""
    shape = arch.shape
    images = torch.zeros((clients, shape.channels, shape.side, shape.side), dtype=torch.uint8)
    data = Dataset(images, torch.zeros(clients, dtype=torch.int64), tuple("0123456789"))
    shards = [Shard(data, torch.tensor([k])) for k in range(clients)]
    recipe = Recipe(
        data=Labels(sizes=(clients,)),
        clients=clients,
        partition=Iid(),
        model=arch,
        task=Denoise(),
        algorithm=Idle(),
        rounds=1,
    )
    fed = Simulator(recipe, shards, Eager(torch.device("cpu")), snapshots=on_disk(folder))
    server = Server(arch.initial(Stream((0,))))
    count = 0

    def run_round() -> None:
        nonlocal server, count
        fed.begin(count, count)
        server = Idle().round(server, fed)
        fed.close()
        fed.ledger.close()
        count += 1

    return run_round, server.model


def plain(arch: Arch, clients: int) -> Callable[[], None]:
    """The same round as a loop over state_dicts."""
    net = arch.build()
    state = copy.deepcopy(net.state_dict())

    @torch.no_grad()
    def run_round() -> None:
        nonlocal state
        total: dict[str, torch.Tensor] = {}
        for _ in range(clients):
            net.load_state_dict(state)
            update = {k: v.clone() for k, v in net.state_dict().items()}
            for k, v in update.items():
                total[k] = v / clients if k not in total else total[k] + v / clients
        state = total

    return run_round


def turns(rounds: int, *functions: Callable[[], None]) -> list[float]:
    """Median CPU seconds of each function, called in turn."""
    for function in functions:
        function()  # build networks, fill caches
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, taken):
            before = time.process_time()
            function()
            times.append(time.process_time() - before)
    return [statistics.median(times) for times in taken]


def peak_of_averaging(arch: Arch, updates: int) -> float:
    """Peak memory of a round of `updates` clients, in copies of the model, measured in a child process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryDirectory() as folder:
            run_round, model = simulator(arch, updates, Path(folder))
            before = resident()
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
            run_round()
            # plus the server's model, which exists before the round
            os.write(write, f"{(peak() - before) / model.params.nbytes + 1:.3f}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    return float(os.read(read, 64).decode())


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, small cases only")
    parser.add_argument("--memory", action="store_true", help="measure only the memory of averaging")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    copies = peak_of_averaging(ARCHS["3M"], 200)
    rows = []
    cases = [("3M", 5), ("36M", 5)] if arguments.quick else [("3M", 5), ("3M", 100), ("36M", 5), ("36M", 100)]
    for name, clients in [] if arguments.memory else cases:
        with tempfile.TemporaryDirectory() as folder:
            run_round, _ = simulator(ARCHS[name], clients, Path(folder))
            rounds = 3 if arguments.quick else max(3, 100 // clients)
            ours, baseline = turns(rounds, run_round, plain(ARCHS[name], clients))
        rows.append({"model": name, "clients": clients, "effuse": ours, "plain": baseline, "ratio": ours / baseline})
    if arguments.json:
        print(json.dumps({"peak_copies_of_200_updates": copies, "rounds": rows}))
        return
    print(f"peak memory of averaging 200 updates of the 3M model: {copies:.2f} copies of it")
    if rows:
        print(f"{'model':>6} {'clients':>8} {'effuse, CPU s':>14} {'plain, CPU s':>13} {'ratio':>6}, below 1.5 wanted")
    for r in rows:
        print(f"{r['model']:>6} {r['clients']:>8} {r['effuse']:>14.4f} {r['plain']:>13.4f} {r['ratio']:>6.2f}")


if __name__ == "__main__":
    main()
