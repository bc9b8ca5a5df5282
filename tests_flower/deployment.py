"""A federation of real processes: a SuperLink, TLS, keys, and sites that can be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from effuse.runs.folder import RunFolder
from effuse.transport.flower import keys
from effuse.transport.flower.subprocesses import free_port, start, stop

FOLDER = Path(__file__).parent


class Deployment:
    """A server's address, the keys of its clients, and the processes of one test."""

    def __init__(self, folder: Path, clients: int = 3) -> None:
        self.folder, self.clients = folder, clients
        self.address = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        keys.init(self.keys, clients)
        self.processes: list[subprocess.Popen[bytes]] = []

    def effuse(self, log: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(FOLDER / "effuse_with_toys.py"), *arguments]
        process = start(command, self.folder / log, environment)
        self.processes.append(process)
        return process

    def site(self, k: int, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        options = options or ("--data", "recipe", "--keys", str(self.keys))
        folder = str(self.folder / "sites" / str(k))
        command = ("join", self.address, "--client-id", str(k), "--folder", folder, *options)
        return self.effuse(f"site-{k}.log", *command, **environment)

    def sites(self) -> list[subprocess.Popen[bytes]]:
        return [self.site(k) for k in range(self.clients)]

    def serve(self, *options: str) -> subprocess.Popen[bytes]:
        command = ("serve", *options, "--listen", self.address, "--keys", str(self.keys), "--json")
        return self.effuse("serve.log", *command)

    def manifest(self, recipe) -> str:
        """A recipe as a file that `serve` takes."""
        folder = self.folder / "recipe"
        folder.mkdir()
        RunFolder(folder).create(recipe, "toy", "served", "cpu", None, {})
        return str(folder / "manifest.json")

    def printed(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, log: str, words: str, seconds: float = 90.0) -> None:
        """Wait for words in a log."""
        self.wait(lambda: words in self.printed(log), f"'{words}' in {log}", seconds)

    def wait(self, condition, what: str, seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in self.folder.glob("*.log"))
            assert time.monotonic() < until, f"no {what}:\n{logs}"
            time.sleep(0.1)

    def close(self) -> None:
        stop(self.processes)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
