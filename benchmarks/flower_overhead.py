"""Measure the cost of a federated round without training: effuse over Flower beside Flower's own FedAvg.

    python benchmarks/flower_overhead.py [--quick] [--json]

There are five clients in separate processes and a SuperLink, over HTTP on the loopback without TLS. Every client sends a
different update, because identical ones would be stored and sent once. Both are measured one after the other: wall
seconds from round to round, and CPU seconds of all processes from /proc. The first round is excluded, because it includes
the start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch
from idle import idle_recipe, ours_at, watch_sites
from networks import ARCHS

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.core.model import Arch
from effuse.runs import driver
from effuse.runs.observer import Observer
from effuse.runs.records import RoundRecord
from effuse.transport.flower.commands import Served, served
from effuse.transport.flower.subprocesses import free_port, start, stop
from effuse.transport.flower.superlink import SuperLink, flower_environment

CLIENTS = 5
TICK = os.sysconf("SC_CLK_TCK")


def cpu_of_family(root: int) -> float:
    """CPU seconds of a process and all its descendants, including ended ones."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(number)] = int(fields[1])
        spent[int(number)] = sum(map(int, fields[11:15])) / TICK  # own and reaped children's, user and system
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    total, queue = 0.0, [root]
    while queue:
        number = queue.pop()
        total += spent.get(number, 0.0)
        queue += children[number]
    return total


class Stopwatch(Observer):
    """Reads the clocks after every round."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def closed(self, record: RoundRecord) -> None:
        self.mark(os.getpid())

    def mark(self, root: int) -> None:
        self.marks.append((time.monotonic(), cpu_of_family(root)))

    def per_round(self) -> dict[str, float]:
        """Wall (median) and CPU (mean) seconds of a round, without the first."""
        walls = [b[0] - a[0] for a, b in zip(self.marks, self.marks[1:])]
        return {"wall": statistics.median(walls), "cpu": (self.marks[-1][1] - self.marks[0][1]) / (len(self.marks) - 1)}


class WithoutPool:
    """CPU seconds of this thread within Flower's calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.before = time.thread_time()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.thread_time() - self.before


def watch_flower(inside: WithoutPool) -> None:
    """Measure the CPU time of the server's thread within Flower's calls."""
    send, collect = SuperLink.send, SuperLink.collect

    def timed_send(self: SuperLink, *args: Any) -> str:
        with inside:
            return send(self, *args)

    def timed_collect(self: SuperLink, *args: Any) -> Any:
        replies = collect(self, *args)
        while True:
            with inside:
                reply = next(replies, None)
            if reply is None:
                return
            yield reply

    SuperLink.send, SuperLink.collect = timed_send, timed_collect  # type: ignore[method-assign]


def ours(arch: Arch, rounds: int, folder: Path) -> dict[str, Any]:
    """effuse: the driver in this process, a SuperLink, and resident sites."""
    address = f"127.0.0.1:{free_port()}"
    sites = []
    for k in range(CLIENTS):
        words = ["join", address, "--client-id", str(k), "--data", "recipe", "--device", "cpu"]
        words += ["--folder", str(folder / f"site-{k}")]
        sites.append(start([sys.executable, __file__, "--site", *words], folder / f"site-{k}.log", {}))
    inside, watch = WithoutPool(), Stopwatch()
    watch_flower(inside)
    resident: list[int] = []
    spans: list[tuple[float, float]] = []  # the server thread's clock and its share within Flower, round by round

    def closed(record: RoundRecord) -> None:
        watch.mark(os.getpid())
        spans.append((time.thread_time(), inside.seconds))
        if len(watch.marks) == 1:
            resident.append(status("VmRSS"))
            Path("/proc/self/clear_refs").write_text("5")  # the memory's high-water mark starts here

    observer = Observer()
    observer.closed = closed  # type: ignore[method-assign]
    try:
        engine = served(Served(address), "idle", CLIENTS)
        driver.run(
            idle_recipe(arch, CLIENTS, rounds), folder / "run", name="idle", device="cpu", observer=observer, served=engine
        )
    finally:
        stop(sites)
    n = rounds - 1
    (a, in_a), (b, in_b) = spans[0], spans[-1]
    at_sites = sum(sum(ours_at(folder / f"site-{k}")[1:]) for k in range(CLIENTS)) / n
    at_server = ((b - a) - (in_b - in_a)) / n
    size = sum(p.numel() for p in on_meta(arch).parameters()) * 4
    found = watch.per_round() | {"ours_at_sites": at_sites, "ours_at_server": at_server}
    found["ours_share"] = (at_sites + at_server) / found["cpu"]
    # plus the server's model, which is in memory between rounds
    return found | {"server_peak_copies": (status("VmHWM") - resident[0]) / size + 1}


def on_meta(arch: Arch) -> torch.nn.Module:
    with torch.device("meta"):
        return arch.build()


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


PROJECT = """[project]
name = "plain"
version = "1.0.0"
[tool.flwr.app]
publisher = "benchmark"
[tool.flwr.app.components]
serverapp = "plain.app:server"
clientapp = "plain.app:client"
[tool.flwr.app.config]
rounds = 3
shapes = ""
marks = ""
"""
APP = """
import json, time
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    state = message.content["arrays"].to_torch_state_dict()
    state = {k: v * (1.0 + 1e-6 * (1 + context.node_config["partition-id"])) for k, v in state.items()}
    records = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(records), reply_to=message)

@server.main()
def main(grid, context):
    with open(context.run_config["shapes"]) as file:
        shapes = json.load(file)
    initial = ArrayRecord({name: torch.randn(shape) for name, shape in shapes})
    def note(t, arrays):
        with open(context.run_config["marks"], "a") as file:
            file.write("x\\n")
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=5, min_train_nodes=5)
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=context.run_config["rounds"], evaluate_fn=note)
"""


def flower_fedavg(arch: Arch, rounds: int, folder: Path) -> dict[str, Any]:
    """Flower's own FedAvg strategy, deployed as in its documentation, with its default settings."""
    app, home, marks = folder / "app", folder / "home", folder / "marks"
    (app / "plain").mkdir(parents=True)
    home.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "plain" / "__init__.py").write_text("")
    (app / "plain" / "app.py").write_text(APP)
    (folder / "shapes.json").write_text(json.dumps([[k, list(p.shape)] for k, p in on_meta(arch).named_parameters()]))
    port = free_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "dep"\n[superlink.dep]\naddress = "{address}"\ninsecure = true\n'
    )
    tools, environment = Path(sys.executable).parent, flower_environment(home)
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}"}
    running = [
        start(
            [
                str(tools / "flower-superlink"),
                "--insecure",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--disable-runtime-dependency-installation",
            ],
            folder / "superlink.log",
            environment,
        )
    ]
    try:
        answering(f"http://{address}/health")
        for k in range(CLIENTS):
            words = ["--insecure", "--superlink", address, "--port", str(free_port())]
            words += ["--node-config", f"partition-id={k} num-partitions={CLIENTS}"]
            running.append(start([str(tools / "flower-supernode"), *words], folder / f"node-{k}.log", environment))
        config = f'rounds={rounds} shapes="{folder / "shapes.json"}" marks="{marks}"'
        command = [str(tools / "flwr"), "run", str(app), "dep", "--run-config", config]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
        if done.returncode:
            raise RuntimeError(f"flwr run: {done.stdout} {done.stderr}")
        watch, until = Stopwatch(), time.monotonic() + 300 * rounds
        while len(watch.marks) < rounds:
            done = len(marks.read_text().split()) - 1 if marks.exists() else 0  # the first mark is of the initial model
            if done > len(watch.marks):
                watch.mark(os.getpid())
            if time.monotonic() > until:
                raise TimeoutError((folder / "superlink.log").read_text()[-2000:])
            time.sleep(0.02)
        return watch.per_round()
    finally:
        stop(running)


def answering(url: str) -> None:
    """Wait for a server."""
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model only, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--only", choices=["effuse", "flower"], help="one of the two")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, rounds in [("3M", 3)] if arguments.quick else [("3M", 4), ("36M", 3)]:
        row: dict[str, Any] = {"model": name, "clients": CLIENTS}
        for which, measure in (("effuse", ours), ("flower", flower_fedavg)):
            if arguments.only in (None, which):
                with tempfile.TemporaryDirectory() as folder:
                    row[which] = measure(ARCHS[name], rounds, Path(folder))
                print(f"{name} {which}: {row[which]}", file=sys.stderr, flush=True)  # the next measurement may take minutes
        if arguments.only is None:
            row |= {f"{k}_ratio": row["flower"][k] / row["effuse"][k] for k in ("wall", "cpu")}
        rows.append(row)
    if arguments.json:
        print(json.dumps({"rounds": rows}))
        return
    print("seconds a round, 5 idle clients; CPU of all processes")
    for row in rows:
        for which in ("effuse", "flower"):
            if which in row:
                print(f"{row['model']:>5} {which:>7}: wall {row[which]['wall']:6.2f}  CPU {row[which]['cpu']:6.2f}")
        if "cpu_ratio" in row:
            print(f"{'':>5} {'ratio':>7}: wall {row['wall_ratio']:6.2f}  CPU {row['cpu_ratio']:6.2f}")
        if "effuse" in row:
            e = row["effuse"]
            flower = e["cpu"] * (1 - e["ours_share"])
            parts = f"sites {e['ours_at_sites']:.2f}, server {e['ours_at_server']:.2f}, Flower {flower:.2f}"
            print(f"      where effuse's CPU goes: {parts} ({e['ours_share']:.0%} ours)")
            print(f"      the server's memory peaks at {e['server_peak_copies']:.1f} copies of the model")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--site"]:
        from effuse.cli import main as command_line

        watch_sites()
        sys.argv = ["effuse", *sys.argv[2:]]
        command_line()
    else:
        main()
