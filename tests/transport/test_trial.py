"""Slots on trial, with stand-ins for a GPU's machines: what each trial gives and how long it takes is made up."""

import threading
import time
import types

import pytest
import torch
from toy import ToyUnet, toy_recipe

from effuse.machines.eager import Eager
from effuse.transport.trial import select_machines, side_by_side

GIB = 1 << 30


def machines(n: int) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(stream=None, threads=1, name=i) for i in range(n)]


def memory(free: int, taken: int):
    """What is free after the first recording, and what we hold before and after it, 8 GiB of it of other things."""
    held = iter((8 * GIB, (8 + taken) * GIB))
    return lambda: free * GIB, lambda: next(held)


def sleeping(machine: types.SimpleNamespace, owner: int) -> str:
    time.sleep(0.02)
    return "bits"


def test_clients_that_do_not_hinder_each_other_all_run_at_a_time() -> None:
    said: list[str] = []
    assert len(select_machines(machines(4), sleeping, said.append, *memory(99, 1))) == 4 and not said


def test_a_busy_gpu_costs_no_slots() -> None:
    """A lock makes four at a time take four times as long, as another process on the GPU may while the trial lasts."""
    lock = threading.Lock()

    def trial(machine: types.SimpleNamespace, owner: int) -> str:
        with lock:
            return sleeping(machine, owner)

    assert len(select_machines(machines(4), trial, pytest.fail, *memory(99, 1))) == 4


def test_other_bits_than_alone_are_told_and_refused() -> None:
    """Together, one machine gives something else, as happened when recordings shared scratch memory."""
    said: list[str] = []

    def trial(machine: types.SimpleNamespace, owner: int) -> str:
        return "other bits" if machine.name == 2 else "bits"

    assert len(select_machines(machines(4), trial, said.append, *memory(99, 1))) == 1
    assert said == ["4 clients at a time would change each other's results here, so they work one at a time"]


def test_a_step_that_does_not_repeat_runs_alone() -> None:
    said, bits = [], iter("abc")
    assert len(select_machines(machines(2), lambda m, k: next(bits), said.append, *memory(8, 1))) == 1
    assert "does not repeat its bits" in said[0]


@pytest.mark.parametrize(("left", "n"), [(10, 1), (20, 2), (1, 1), (100, 4)])
def test_memory_bounds_the_slots(left: int, n: int) -> None:
    """The first recording took 4 GiB, and a machine may come to hold two: with 20 GiB left, (0.8 x 20 + 4) / 8 = 2.5."""
    said: list[str] = []
    assert len(select_machines(machines(4), sleeping, said.append, *memory(left, 4))) == n
    clients = "1 client" if n == 1 else f"{n} clients"
    assert said == ([] if n == 4 else [f"the GPU has memory left for {clients} at a time, of the 4 that it could serve"])


def test_a_cpu_needs_no_trial() -> None:
    recipe = toy_recipe(model=ToyUnet(dropout=0.0))
    two = [Eager(torch.device("cpu")) for _ in range(2)]
    assert side_by_side(two, recipe, recipe.data.load("train"), pytest.fail) == two


def test_the_trial_is_a_fit_of_the_recipes_own_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = toy_recipe(model=ToyUnet(dropout=0.0))
    train = recipe.data.load("train")
    recipe = recipe.resolved(train)
    two = [Eager(torch.device("cpu")) for _ in range(2)]
    for machine in two:
        machine.meter, machine.threads, machine.stream = two[0].meter, 1, object()
    digests = []

    def tried(machines, trial, tell, free, held):
        digests.extend(trial(machine, i) for i, machine in enumerate(machines))
        return list(machines)

    monkeypatch.setattr("effuse.transport.trial.select_machines", tried)
    assert side_by_side(two, recipe, train, pytest.fail) == two
    assert digests[0] == digests[1] and two[0].meter.images == 0
