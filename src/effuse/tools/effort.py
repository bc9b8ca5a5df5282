"""What taking part would cost a site: hours, memory and disk of its own machine."""

import dataclasses
import time

import torch

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Work
from effuse.core.machine import Machine
from effuse.core.model import Model
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.workbench import SERVER
from effuse.tools.check import memory
from effuse.transport.rehearsal import Rehearsal

TIMED = 2  # steps, after one that warms up


def effort(recipe: Recipe, shard: Shard, fed: Rehearsal, client_bytes: int, model: Model, machine: Machine) -> str:
    """One sentence, from a rehearsal of all rounds and a few steps that are timed here."""
    steps = fed.machine.steps["client"] / recipe.clients
    seconds = seconds_of(recipe, shard.dataset, machine)
    held = memory(dataclasses.replace(recipe, clients=1), model, shard.dataset, 0)["total"]
    kept = 3 * client_bytes / recipe.clients + model.params.nbytes
    private = any(trained.solver.privacy for trained in recipe.algorithm.trains(recipe))
    longer = "; private steps take two to four times as long" if private else ""
    work = f"{steps:,.0f} steps of {seconds:.2g} s{longer}"
    return (
        f"on this machine: about {steps * seconds / 3600:.2g} hours of training ({work}), "
        f"{held / 1e9:.2g} GB of memory, {kept / 1e6:,.0f} MB of disk"
    )


def seconds_of(recipe: Recipe, like: Dataset, machine: Machine) -> float:
    """The time of a training step of the network that takes longest, on random images of that shape."""
    return max((_timed(recipe, k, like, machine) for k in range(len(recipe.algorithm.trains(recipe)))), default=0.0)


def _timed(recipe: Recipe, which: int, like: Dataset, machine: Machine) -> float:
    trained, source, owner = recipe.algorithm.trains(recipe)[which], Stream((0, "effort")), object()
    solver = dataclasses.replace(trained.solver, steps=1, epochs=None, privacy=None)
    n = solver.batch
    images = torch.randint(0, 256, (n, *like.images.shape[1:]), dtype=torch.uint8, generator=source.torch())
    data = Dataset(images, torch.arange(n) % len(like.classes), like.classes)
    net = machine.load(trained.arch.initial(source.child("initial")), owner)
    took = []
    for _ in range(1 + TIMED):
        began = time.monotonic()
        machine.fit(
            net,
            Work(
                solver=solver,
                task=trained.task,
                shard=Shard.whole(data),
                lr=solver.lr,
                stream=source.child("fit"),
                place=SERVER,
                where="a step that is timed",
            ),
        )
        took.append(time.monotonic() - began)
    machine.release(owner)
    return min(took[1:])
