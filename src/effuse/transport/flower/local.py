"""The whole federation on one machine, for trying out: a SuperLink, and every site in a process of its own."""

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
from effuse.transport.flower.subprocesses import free_port, last_words, start, stop
from effuse.transport.flower.superlink import SuperLink
from effuse.transport.flower.terms import Terms


def on_this_machine(stage: EngineContext) -> Federation:
    """A federation over TLS with node authentication, on a loopback port, with keys made for it."""
    place = stage.folder / "flower"
    shutil.rmtree(place, ignore_errors=True)  # a run that is resumed gets new keys
    keys.init(place / "keys", stage.recipe.clients)
    link = SuperLink(place / "superlink", "127.0.0.1", free_port(), keys.ServerKeys(place / "keys"))
    return OneMachine(stage, link, place)


class OneMachine(Flower):
    """Starts its own sites, each of which takes its share of the recipe's data."""

    def __init__(self, stage: EngineContext, link: SuperLink, place: Path) -> None:
        name = read_manifest(stage.folder).get("name") or "recipe"  # as a site would be asked to allow it
        super().__init__(stage, link, Terms(), str(name))
        self.superlink, self.place, self.folder = link, place, stage.folder
        self.device = stage.machines[0].device.type
        self.sites: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # before the SuperLink: they take as long as it does to get ready, and try until it answers
        self.sites = [self._site(client) for client in self.clients]
        try:
            return super().__enter__()
        except BaseException:
            stop(self.sites)
            raise

    def _site(self, client: int) -> subprocess.Popen[bytes]:
        folder = self.folder / "clients" / str(client)
        (folder / "manifest.json").unlink(missing_ok=True)  # terms are pinned for one sitting
        command = [
            sys.executable,
            "-m",
            "effuse",
            "join",
            self.superlink.address,
            "--client-id",
            str(client),
            "--data",
            "recipe",
            "--keys",
            str(self.place / "keys"),
            "--folder",
            str(folder),
            "--device",
            self.device,
        ]
        package = str(Path(effuse.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return start(command, folder / "join.log", {"PYTHONPATH": path})

    def _look(self, *args: Any) -> None:
        for client, process in enumerate(self.sites):
            if process.poll() is not None:
                said = last_words(self.folder / "clients" / str(client) / "join.log", 1)
                raise RunError(f"client {client} ended with code {process.returncode}: {said}")
        super()._look(*args)

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        finally:
            stop(self.sites)
        shutil.rmtree(self.place / "keys", ignore_errors=True)
