"""Clients that do not train, to measure the cost of the federation itself."""

import time
from pathlib import Path

import torch

from effuse.algorithms.fedavg import Update
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.federation import Federation
from effuse.core.model import Arch, Model
from effuse.core.params import mean
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.data.partition import Iid
from effuse.data.sources import Digits
from effuse.tasks.denoise import Denoise
from effuse.transport.flower.site import Site


@spec
class IdleApart(Algorithm):
    """Clients return the model with a tiny change of their own, because identical replies would be sent only once."""

    def round(self, server: Server, fed: Federation) -> Server:
        return Server(mean((u.model, u.weight) for _, u in fed.ask(self.echo, fed.clients, model=server.model)))

    @on_client
    def echo(self, client: Client, model: Model) -> Update:
        return Update(model.holding(model.params * (1.0 + 1e-6 * (1 + client.id))), 1.0, 0.0)


def idle_recipe(arch: Arch, clients: int, rounds: int) -> Recipe:
    """A recipe of rounds without training."""
    side = arch.shape.side
    return Recipe(
        data=Digits(transforms=transforms(side, arch.shape.channels)),
        clients=clients,
        partition=Iid(),
        model=arch,
        task=Denoise(),
        algorithm=IdleApart(),
        rounds=rounds,
        evaluate=Evaluate(grid=0),
        threads=1,
        reproducible=True,
    )


def transforms(side: int, channels: int) -> tuple:
    from effuse.core.build import build_text
    from effuse.data.transforms import Transform

    wanted = [f"resize({side})"] + [f"channels({channels})"]
    return tuple(build_text(w, Transform, "transforms") for w in wanted)


def watch_sites() -> None:
    """Make a site record the CPU seconds of effuse's part of each job."""
    plain = Site.perform

    def perform(self: Site, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        before = time.thread_time()
        answer = plain(self, head, body)
        with open(self.folder / "ours", "a") as file:
            file.write(f"{time.thread_time() - before}\n")
        return answer

    Site.perform = perform  # type: ignore[method-assign]
    torch.set_num_threads(1)


def ours_at(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "ours").read_text().split()]
