"""The kind and the number of machines for a run."""

from collections.abc import Sequence

import torch

from effuse.core.errors import RecipeError
from effuse.core.model import draws_inside
from effuse.core.recipe import Recipe
from effuse.fast.graph.captured import Captured
from effuse.fast.graph.compiled import keep_compiled
from effuse.fast.layout import for_tensor_cores
from effuse.machines.eager import Eager

WORTH_COMPILING = 1_000_000  # training images; for fewer, a minute of compilation costs more than it saves
SMALL = 20_000_000  # parameters; one client with a smaller network leaves a large GPU half idle
MOST_SLOTS = 5
LARGE_SLOTS = 2  # of larger networks
# machines of the last run: in a table of many short runs, recording would take longer than training
REUSABLE: list[Captured] = []


def pick_speed(recipe: Recipe, device: torch.device, size: int) -> str:
    """The recipe's choice. `auto` records steps on a GPU, and compiles them in long runs."""
    speed = recipe.speed
    if speed == "auto":
        images = recipe.rounds * sum(solver.images_on(size) for solver in recipe.algorithm.solvers())
        speed = "eager" if device.type == "cpu" else "compile" if images > WORTH_COMPILING else "graph"
    if speed != "eager" and device.type != "cuda":
        raise RecipeError(f"speed={speed}: only a GPU records steps; use speed=auto or speed=eager")
    return speed


def machines_for(recipe: Recipe, device: torch.device, size: int) -> list[Eager]:
    """The machines of a run, one for each client that may train at the same time. They share one meter."""
    speed = pick_speed(recipe, device, size)
    machines: list[Eager]
    if speed == "eager":
        machines = [Eager(device) for _ in range(cpu_slots(recipe) if device.type == "cpu" else 1)]
        if len(machines) > 1:
            machines[0].threads = recipe.threads // len(machines)
    else:
        keep_compiled(device)
        machines = [*_captured(recipe, device, speed == "compile")]
    for machine in machines[1:]:
        machine.meter, machine.threads = machines[0].meter, machines[0].threads
    return machines


def machine_for(recipe: Recipe, device: torch.device) -> Eager:
    """The machine to evaluate one model. On a GPU it records without compiling, which would take a minute."""
    if device.type != "cuda" or recipe.speed == "eager":
        return Eager(device)
    keep_compiled(device)
    return Captured(device, compiled=False, reproducible=recipe.reproducible)


def keep(machines: Sequence[Eager]) -> None:
    """Keep the machines of a finished run, with their recordings, for the next run of this process."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an interrupted fit may have left steps in the queue
    REUSABLE[:] = [machine for machine in machines if isinstance(machine, Captured)]


def _captured(recipe: Recipe, device: torch.device, compiled: bool) -> list[Captured]:
    kind = (device, compiled, recipe.reproducible)
    reused = [m for m in REUSABLE if (m.device, m.compiled, m.reproducible) == kind]
    REUSABLE.clear()
    machines = (reused + [Captured(*kind) for _ in range(len(reused), slots(recipe))])[: slots(recipe)]
    for machine in machines:
        machine.reset_for(recipe.networks)
    return machines


def cpu_slots(recipe: Recipe) -> int:
    """How many clients share a CPU's threads. In parallel they are faster than in turn with all threads."""
    with torch.device("meta"):
        alone = recipe.speed == "eager" or any(draws_inside(arch.build()) for arch in recipe.networks)
    return 1 if alone else min(recipe.clients, recipe.threads)


def slots(recipe: Recipe) -> int:
    """How many clients may share a GPU: one if steps draw from torch's default generator, which a process has only once."""
    with torch.device("meta"):
        nets = [for_tensor_cores(arch.build()) for arch in recipe.networks]
    small = all(sum(p.numel() for p in net.parameters()) < SMALL for net in nets)
    return 1 if any(map(draws_inside, nets)) else min(recipe.clients, MOST_SLOTS if small else LARGE_SLOTS)
