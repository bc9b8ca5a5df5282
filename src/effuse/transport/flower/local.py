"""The whole federation on one machine, for trials: a SuperLink, and every site in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import effuse
from effuse.core.errors import RunError
from effuse.core.federation import Federation
from effuse.core.recipe import read_manifest
from effuse.transport.context import EngineContext
from effuse.transport.flower import keys
from effuse.transport.flower.server import Flower
from effuse.transport.flower.subprocesses import free_port, last_lines, start, stop
from effuse.transport.flower.superlink import SuperLink
from effuse.transport.flower.terms import Terms


def on_this_machine(context: EngineContext) -> Federation:
    """A federation over TLS with node authentication, on a loopback port, with keys made for it."""
    files = context.folder / "flower"
    shutil.rmtree(files, ignore_errors=True)  # a run that is resumed gets new keys
    keys.init(files / "keys", context.recipe.clients)
    superlink = SuperLink(files / "superlink", "127.0.0.1", free_port(), keys.ServerKeys(files / "keys"))
    return OneMachine(context, superlink, files)


class OneMachine(Flower):
    """Starts its own sites, each of which takes its share of the recipe's data."""

    def __init__(self, context: EngineContext, superlink: SuperLink, files: Path) -> None:
        name = read_manifest(context.folder).get("name") or "recipe"  # the name that sites see and may --allow
        super().__init__(context, superlink, Terms(), str(name))
        self.superlink, self.keys, self.folder = superlink, files / "keys", context.folder
        self.device = context.machines[0].device.type
        self.sites: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # before the SuperLink: sites take as long to start as it does, and try until it answers
        self.sites = [self._site(client) for client in self.clients]
        try:
            return super().__enter__()
        except BaseException:
            stop(self.sites)
            raise

    def _site(self, client: int) -> subprocess.Popen[bytes]:
        folder = self.folder / "clients" / str(client)
        (folder / "manifest.json").unlink(missing_ok=True)  # pinned for the process that ended
        command = [sys.executable, "-m", "effuse", "join", self.superlink.address, "--client-id", str(client)]
        command += ["--data", "recipe", "--keys", str(self.keys), "--folder", str(folder), "--device", self.device]
        package = str(Path(effuse.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return start(command, folder / "join.log", {"PYTHONPATH": path})

    def _step(self, *args: Any) -> None:
        for client, process in enumerate(self.sites):
            if process.poll() is not None:
                printed = last_lines(self.folder / "clients" / str(client) / "join.log", 1)
                raise RunError(f"client {client} ended with code {process.returncode}: {printed}")
        super()._step(*args)

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        finally:
            stop(self.sites)
        shutil.rmtree(self.keys, ignore_errors=True)
