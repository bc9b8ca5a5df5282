"""How many clients may work side by side on one GPU: as many as fit into its memory and give the bits of one alone."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Work
from effuse.core.machine import Machine
from effuse.core.noise import KeyedNoise
from effuse.core.protection import Protection, protected
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.transport.slots import in_slots

M = TypeVar("M", bound=Machine)
STEPS = 20  # of a trial
SPARE = 0.8  # of the free memory that recordings may take


def side_by_side(machines: Sequence[M], recipe: Recipe, train: Dataset, report: Callable[[str], None]) -> list[M]:
    """As many of a GPU's machines as may work at a time.

    The trial is a step of the algorithm's first network and solver, without what an algorithm adds to it.
    """
    trained = recipe.algorithm.trains(recipe)
    if len(machines) == 1 or machines[0].stream is None or not trained:
        return list(machines)
    arch, task, solver = trained[0]
    solver = dataclasses.replace(solver, epochs=None, steps=STEPS)
    model = arch.initial(Stream(("trial",))).to(machines[0].device)
    data, protection = train, None
    if solver.privacy is not None and recipe.budget is not None:
        data, protection = recipe.protected(train), Protection(recipe.budget, sigma=1.0)
    shard, stream = Shard(data, torch.arange(min(len(train), 2 * solver.batch))), Stream(("trial",))

    def trial(machine: M, owner: int) -> str:
        net = machine.load(model, owner)
        private, _ = protected(protection, net, solver, shard, lambda: KeyedNoise(stream, machine.device), None)
        work = Work(
            solver=solver, task=task, shard=shard, lr=solver.lr, stream=stream, place=0, where="trial", private=private
        )
        machine.fit(net, work)
        digest = machine.values(net)[0].digest()
        machine.release(owner)
        return digest

    meter = machines[0].meter
    counted = meter.images
    try:
        device = machines[0].device
        # free memory is the GPU's, and other processes may take some at any moment; reserved memory is this process's
        memory = (lambda: torch.cuda.mem_get_info(device)[0], lambda: torch.cuda.memory_reserved(device))
        return select_machines(machines, trial, report, *memory)
    finally:
        meter.images = counted  # the trial is no part of the run


def select_machines(
    machines: Sequence[M],
    trial: Callable[[M, int], str],
    report: Callable[[str], None],
    free: Callable[[], int],
    reserved: Callable[[], int],
) -> list[M]:
    """As many machines as fit into memory, if they give the same bits together as one alone; otherwise one.

    They are not timed: on a GPU with other work, times would depend on that.
    """
    before = reserved()
    alone = trial(machines[0], 0)
    taken = max(1, reserved() - before)
    if trial(machines[0], 0) != alone:
        report("a recorded step does not repeat its bits here, so clients work one at a time")
        return list(machines[:1])
    # twice: a machine may later hold a second recording, of another loss or of the sampler
    n = max(1, min(len(machines), int((SPARE * free() + taken) // (2 * taken))))
    if n < len(machines):
        report(
            f"the GPU has memory left for {n} client{'s' * (n > 1)} at a time, of the {len(machines)} that it could serve"
        )
    selected = machines[:n]
    streams = [machine.stream for machine in selected]
    for _ in range(2 if n > 1 else 0):  # the first time each records its step; the second time all replay at once
        if {digest for _, digest in in_slots(trial, range(n), selected, streams, threads=selected[0].threads)} != {alone}:
            report(f"{n} clients at a time would change each other's results here, so they work one at a time")
            return list(machines[:1])
    return list(selected)
