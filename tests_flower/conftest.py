"""A federation of real processes: a SuperLink, TLS, keys, and sites that can be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "transport" / "flower")]

import pytest
import torch

import effuse  # noqa: F401  (sets how threads wait, before torch is imported)
from effuse.runs.folder import RunFolder
from effuse.transport.flower import keys
from effuse.transport.flower.subprocesses import free_port, start, stop

torch.set_num_threads(1)
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a background job of a shell would ignore Ctrl-C, and so would those started here


class Town:
    """A server's address, the keys of its clients, and the processes of one test."""

    def __init__(self, folder: Path, clients: int = 3) -> None:
        self.folder, self.clients = folder, clients
        self.address = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        keys.init(self.keys, clients)
        self.processes: list[subprocess.Popen[bytes]] = []

    def effuse(self, log: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "effuse_with_toys.py"), *arguments]
        process = start(command, self.folder / log, environment)
        self.processes.append(process)
        return process

    def site(self, k: int, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        given = options or ("--data", "recipe", "--keys", str(self.keys))
        words = ("join", self.address, "--client-id", str(k), "--folder", str(self.folder / "sites" / str(k)), *given)
        return self.effuse(f"site-{k}.log", *words, **environment)

    def sites(self) -> list[subprocess.Popen[bytes]]:
        return [self.site(k) for k in range(self.clients)]

    def serve(self, *options: str) -> subprocess.Popen[bytes]:
        words = ("serve", *options, "--listen", self.address, "--keys", str(self.keys), "--json")
        return self.effuse("serve.log", *words)

    def manifest(self, recipe) -> str:
        """A recipe as a file that `serve` takes."""
        place = self.folder / "recipe"
        place.mkdir()
        RunFolder(place).create(recipe, "toy", "served", "cpu", None, {})
        return str(place / "manifest.json")

    def said(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, log: str, words: str, seconds: float = 90.0) -> None:
        """Wait for words in a log."""
        self.wait(lambda: words in self.said(log), f"'{words}' in {log}", seconds)

    def wait(self, true, what: str, seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not true():
            logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in self.folder.glob("*.log"))
            assert time.monotonic() < until, f"no {what}:\n{logs}"
            time.sleep(0.1)

    def close(self) -> None:
        stop(self.processes)


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path)
    yield made
    made.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
