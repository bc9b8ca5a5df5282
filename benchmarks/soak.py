"""Soak a federation: three sites over TLS train for an hour while sites, server and network fail at random.

    python benchmarks/soak.py [--minutes 60] [--rounds 400] [--seed 0] [--out FOLDER] [--json]

Faults are drawn from the seed: SIGKILL of a site, of the server (then resumed) or of its SuperLink, a network that is
reset, and one that stalls. Every site is reached through a proxy of its own. Faults end after `--minutes`; the run goes on.
At its end weights, rounds.jsonl and replies must equal those of a simulation without faults, except times and wire bytes.
Orders to sites that went away are sent again, and the ledger counts them.
Memory is the resident set of each process: its last value against that a minute after it started.
"""

import argparse
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.algorithms.scaffold import Scaffold, ScaffoldUpdate
from effuse.core.algorithm import on_client
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.data.partition import Iid
from effuse.data.sources import Digits
from effuse.models.resnet import Cnn
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.transport.flower import keys
from effuse.transport.flower.subprocesses import free_port, start, stop

CLIENTS = 3
PATIENCE = 600.0  # seconds without a new round after which the soak fails
BETWEEN = (15.0, 45.0)  # seconds from the end of one fault to the next
AWAY = (0.0, 15.0)  # seconds that what failed stays away
SETTLED = 60.0  # seconds after its start at which a process's memory is first taken
FAULTS = ("site", "server", "superlink", "reset", "stall")


@spec
class Paced(Scaffold, name="paced"):
    """SCAFFOLD whose clients pause, so that an hour needs little computing. Each keeps its variate from round to round."""

    pause: float = 0.0

    @on_client(covered=True)
    def train(self, client: Client, x: Model, c: Params) -> ScaffoldUpdate:
        time.sleep(self.pause)
        return super().train(client, x, c)


def recipe_of(rounds: int, pause: float) -> Recipe:
    """A small classifier of digits."""
    return Recipe(
        data=Digits(),
        clients=CLIENTS,
        partition=Iid(),
        model=Cnn(widths=(4,), groups=2),
        task=Classify(),
        algorithm=Paced(local=SGD(lr=0.05, batch=32, steps=2), pause=pause),
        rounds=rounds,
        evaluate=Evaluate(grid=0),
        sampler=None,
        threads=1,
        reproducible=True,
    )


class Proxy:
    """The network between a site and the server."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.links: list[socket.socket] = []
        self.stalled = threading.Event()
        self.open()

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def reset(self) -> None:
        """Break all connections; new ones are refused until `open`."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                site, _ = listener.accept()
                threading.Thread(target=self._carry, args=(site,), daemon=True).start()

    def _carry(self, site: socket.socket) -> None:
        with contextlib.suppress(OSError), site, socket.create_connection(("127.0.0.1", self.target)) as server:
            self.links += [site, server]
            for end in (site, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while True:
                    for end in select.select([site, server], [], [])[0]:
                        while self.stalled.is_set():
                            time.sleep(0.1)
                        if not (data := end.recv(1 << 16)):
                            return
                        (server if end is site else site).sendall(data)
            finally:
                self.links.remove(site), self.links.remove(server)


class Soak:
    """The processes of one federation, and what happens to them."""

    def __init__(self, folder: Path, recipe: Recipe, seed: int) -> None:
        self.folder, self.recipe, self.draw = folder, recipe, random.Random(seed)
        self.began, self.port = time.monotonic(), free_port()
        self.run = folder / "run"
        keys.init(folder / "keys", CLIENTS)
        (folder / "recipe").mkdir()
        RunFolder(folder / "recipe").create(recipe, "soak", "served", "cpu", None, {})
        self.proxies = [Proxy(self.port) for _ in range(CLIENTS)]
        self.counts = dict.fromkeys(FAULTS, 0)
        self.ends: list[str] = []  # processes that ended by themselves before the run was over
        self.memory: dict[int, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for k in range(CLIENTS):
            self.join(k)
        self.serve(str(folder / "recipe" / "manifest.json"), "--out", str(self.run))

    def log(self, words: str) -> None:
        line = f"{time.monotonic() - self.began:8.1f} s, {self.rounds:4d} rounds: {words}"
        print(line, file=sys.stderr, flush=True)
        with open(self.folder / "soak.log", "a") as file:
            file.write(line + "\n")

    @property
    def rounds(self) -> int:
        return (self.run / "rounds.jsonl").read_bytes().count(b"\n") if (self.run / "rounds.jsonl").exists() else 0

    def command(self, name: str, *words: str) -> None:
        command = [sys.executable, __file__, "--effuse", *words]
        self.processes[name] = start(command, self.folder / f"{name}.log", {"OMP_NUM_THREADS": "1"})

    def serve(self, *words: str) -> None:
        self.command(
            "server", "serve", *words, "--listen", f"127.0.0.1:{self.port}", "--keys", str(self.folder / "keys"), "--json"
        )

    def join(self, k: int) -> None:
        words = ["join", f"127.0.0.1:{self.proxies[k].port}", "--client-id", str(k), "--data", "recipe", "--device", "cpu"]
        self.command(
            f"site-{k}", *words, "--folder", str(self.folder / "sites" / str(k)), "--keys", str(self.folder / "keys")
        )

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def strike(self) -> None:
        """One fault, and its end."""
        fault, k, away = self.draw.choice(FAULTS), self.draw.randrange(CLIENTS), self.draw.uniform(*AWAY)
        self.counts[fault] += 1
        where = f" of site {k}" if fault in ("reset", "stall") else f" {k}" if fault == "site" else ""
        self.log(f"{fault}{where}, for {away:.1f} s")
        if fault == "site":
            self.kill(f"site-{k}")
            self.watch(away)
            self.join(k)
        elif fault == "server":
            self.kill("server")
            self.watch(away)
            self.serve("--resume", str(self.run))
        elif fault == "superlink":
            for child in children_of(self.processes["server"].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        elif fault == "reset":
            self.proxies[k].reset()
            self.watch(away)
            self.proxies[k].open()
        else:
            self.proxies[k].stalled.set()
            self.watch(away)
            self.proxies[k].stalled.clear()

    def watch(self, seconds: float) -> bool:
        """Wait; sample memory, and start again what ended by itself. Returns whether the run is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            self.sample()
            if (self.run / "result.json").exists():
                return True
            for name, process in list(self.processes.items()):
                if process.poll() not in (None, -signal.SIGKILL):
                    self.ends.append(f"{name} ended with code {process.returncode}")
                    self.log(self.ends[-1])
                    self.serve("--resume", str(self.run)) if name == "server" else self.join(int(name[-1]))
        return False

    def sample(self) -> None:
        """The resident memory of every process that has run for a while."""
        family = {p.pid: name for name, p in self.processes.items() if p.poll() is None}
        for child in children_of(self.processes["server"].pid):
            family[child] = "superlink"
        for pid, name in family.items():
            known = self.memory.setdefault(pid, {"name": name, "since": time.monotonic(), "first": 0.0})
            with contextlib.suppress(OSError, StopIteration):
                known["last"], known["age"] = resident_mb(pid), time.monotonic() - known["since"]
                known["first"] = known["first"] or known["last"] * (known["age"] > SETTLED)

    def last(self, minutes: float) -> None:
        """Let faults happen until the time is up, then wait for the end of the run."""
        rounds, moved = 0, time.monotonic()
        while not self.watch(self.draw.uniform(*BETWEEN)):
            if self.rounds > rounds:
                rounds, moved = self.rounds, time.monotonic()
            if time.monotonic() - moved > PATIENCE:
                raise TimeoutError(f"no round was finished for {PATIENCE:.0f} s; see {self.folder}")
            if time.monotonic() - self.began < 60 * minutes:
                self.strike()

    def grown(self) -> list[dict[str, Any]]:
        """The longest-lived process of each kind: its memory a minute after its start, and at its end."""
        longest: dict[str, dict[str, Any]] = {}
        for found in self.memory.values():
            if found["first"] and found["age"] > longest.get(found["name"], found | {"age": 0.0})["age"]:
                longest[found["name"]] = found
        return [{key: found[key] for key in ("name", "age", "first", "last")} for found in longest.values()]


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def resident_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def lines(run: Path) -> list[dict[str, Any]]:
    """rounds.jsonl without times, traffic, and what only one of the two servers sees."""
    left_out = ("seconds", "at_a_time", "images", "updates", "traffic")
    return [{k: v for k, v in record.to_json().items() if k not in left_out} for record in RunFolder(run).records()]


def sent(run: Path, direction: str) -> list[int]:
    """What the ledger counts in one direction: parameters, bytes, messages."""
    ledger = json.loads((run / "ledger.json").read_text())["training"]
    return [ledger[quantity][direction] for quantity in ("parameters", "bytes", "messages")]


def soaked(folder: Path, minutes: float, rounds: int, pause: float, seed: int) -> dict[str, Any]:
    """A run with faults, compared with a simulation."""
    soak = Soak(folder, recipe_of(rounds, pause), seed)
    try:
        soak.last(minutes)
        code = soak.processes["server"].wait(60)  # a site that was away at the end waits for a server
    finally:
        stop(list(soak.processes.values()))
    expected = driver.run(recipe_of(rounds, 0.0), folder / "simulation", device="cpu")
    found = RunFolder(soak.run).read_result()
    runs = (soak.run, folder / "simulation")
    (*_, orders), (*_, needed) = (sent(run, "down") for run in runs)
    summary = {
        "minutes": (time.monotonic() - soak.began) / 60,
        "rounds": found.rounds,
        "faults": soak.counts,
        "ended by themselves": soak.ends,
        "the server ended with": code,
        "weights equal": found.weights_sha256 == expected.weights_sha256,
        "rounds.jsonl equal": lines(runs[0]) == lines(runs[1]),
        "replies equal": sent(runs[0], "up") == sent(runs[1], "up"),
        "orders sent again": orders - needed,
        "memory in MB": soak.grown(),
    }
    soak.log(json.dumps(summary))
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults happen")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that every client waits in every round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the logs in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        summary = soaked(out, given.minutes, given.rounds, given.pause, given.seed)
    print(json.dumps(summary) if given.json else "\n".join(f"{key}: {value}" for key, value in summary.items()))
    wrong = [key for key, value in summary.items() if value is False]
    sys.exit(f"not so: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--effuse"]:
        from effuse.cli import main as command_line

        torch.set_num_threads(1)
        sys.argv = ["effuse", *sys.argv[2:]]
        command_line()
    else:
        main()
