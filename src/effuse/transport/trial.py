"""Whether clients may work side by side on one GPU: they must give the bits of one alone, and there must be room for them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Work
from effuse.core.machine import Machine
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.transport.slots import in_slots

M = TypeVar("M", bound=Machine)
STEPS = 20  # of a trial
SPARE = 0.8  # of the free memory that recordings may take


def side_by_side(machines: Sequence[M], recipe: Recipe, train: Dataset, tell: Callable[[str], None]) -> list[M]:
    """As many of a GPU's machines as may be at work at a time, by a trial of a plain step of the recipe's first solver: what an
    algorithm adds to it is not tried."""
    solvers = recipe.algorithm.solvers()
    if len(machines) == 1 or machines[0].stream is None or not solvers:
        return list(machines)
    solver = dataclasses.replace(solvers[0], epochs=None, steps=STEPS)
    model = recipe.model.initial(Stream(("trial",))).to(machines[0].device)
    shard = Shard(train, torch.arange(min(len(train), 2 * solver.batch)))

    def trial(machine: M, owner: int) -> str:
        net = machine.load(model, owner)
        options = {"lr": solver.lr, "stream": Stream(("trial",)), "place": 0, "where": "trial"}
        machine.fit(net, Work(solver=solver, task=recipe.task, shard=shard, **options))
        digest = machine.values(net)[0].digest()
        machine.release(owner)
        return digest

    meter = machines[0].meter
    counted = meter.images
    try:
        device = machines[0].device
        # what is free is everybody's, and another process may take some at any moment; what a recording takes is ours
        memory = (lambda: torch.cuda.mem_get_info(device)[0], lambda: torch.cuda.memory_reserved(device))
        return select_machines(machines, trial, tell, *memory)
    finally:
        meter.images = counted  # nobody asked for this work


def select_machines(
    machines: Sequence[M],
    trial: Callable[[M, int], str],
    tell: Callable[[str], None],
    free: Callable[[], int],
    held: Callable[[], int],
) -> list[M]:
    """The most machines that fit, if all at once they repeat what one does alone; whether that is faster is not asked: on a GPU with
    other work to do, a stopwatch tells of that."""
    before = held()
    alone = trial(machines[0], 0)
    taken = max(1, held() - before)
    if trial(machines[0], 0) != alone:
        tell("a recorded step does not repeat itself here, so clients go one at a time")
        return list(machines[:1])
    # a machine may come to hold another recording: of a second loss, or of the sampler
    n = max(1, min(len(machines), int((SPARE * free() + taken) // (2 * taken))))
    if n < len(machines):
        tell(f"the GPU has memory left for {n} client{'s' * (n > 1)} at a time, of the {len(machines)} that it could serve")
    some = machines[:n]
    streams = [machine.stream for machine in some]
    for _ in range(2 if n > 1 else 0):  # at first each records; the second time they really run together
        if {digest for _, digest in in_slots(trial, range(n), some, streams, threads=some[0].threads)} != {alone}:
            tell(f"{n} clients at a time would disturb each other here, so they go one at a time")
            return list(machines[:1])
    return list(some)
