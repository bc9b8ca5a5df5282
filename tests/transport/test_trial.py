"""The trial of slots, with stand-ins for a GPU's machines, whose results and times are made up."""

import threading
import time
import types

import pytest
import torch
from toy import ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.privacy import Budget, DpSgd
from effuse.core.solvers import Adam
from effuse.machines.eager import Eager
from effuse.transport.trial import select_machines, side_by_side

GIB = 1 << 30


def machines(n: int) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(stream=None, threads=1, name=i) for i in range(n)]


def memory(free: int, taken: int):
    """The free memory after the first recording, and the reserved memory before and after it."""
    reserved = iter((8 * GIB, (8 + taken) * GIB))
    return lambda: free * GIB, lambda: next(reserved)


def sleeping(machine: types.SimpleNamespace, owner: int) -> str:
    time.sleep(0.02)
    return "bits"


def test_clients_that_give_the_same_bits_together_all_work_at_a_time() -> None:
    reports: list[str] = []
    assert len(select_machines(machines(4), sleeping, reports.append, *memory(99, 1))) == 4 and not reports


def test_a_busy_gpu_costs_no_slots() -> None:
    """With a lock four at a time take four times as long, as beside another process on the GPU."""
    lock = threading.Lock()

    def trial(machine: types.SimpleNamespace, owner: int) -> str:
        with lock:
            return sleeping(machine, owner)

    assert len(select_machines(machines(4), trial, pytest.fail, *memory(99, 1))) == 4


def test_clients_that_give_other_bits_together_work_one_at_a_time() -> None:
    """One of four machines gives another result, as with recordings that share scratch memory."""
    reports: list[str] = []

    def trial(machine: types.SimpleNamespace, owner: int) -> str:
        return "other bits" if machine.name == 2 else "bits"

    assert len(select_machines(machines(4), trial, reports.append, *memory(99, 1))) == 1
    assert reports == ["4 clients at a time would change each other's results here, so they work one at a time"]


def test_with_steps_that_do_not_repeat_clients_work_one_at_a_time() -> None:
    reports, bits = [], iter("abc")
    assert len(select_machines(machines(2), lambda m, k: next(bits), reports.append, *memory(8, 1))) == 1
    assert "does not repeat its bits" in reports[0]


@pytest.mark.parametrize(("left", "n"), [(10, 1), (20, 2), (1, 1), (100, 4)])
def test_memory_bounds_the_slots(left: int, n: int) -> None:
    """The first recording took 4 GiB, and a machine may need two: with 20 GiB left, (0.8 x 20 + 4) / 8 = 2.5 fit."""
    reports: list[str] = []
    assert len(select_machines(machines(4), sleeping, reports.append, *memory(left, 4))) == n
    clients = "1 client" if n == 1 else f"{n} clients"
    assert reports == ([] if n == 4 else [f"the GPU has memory left for {clients} at a time, of the 4 that it could serve"])


def test_a_cpu_needs_no_trial() -> None:
    recipe = toy_recipe(model=ToyUnet(dropout=0.0))
    two = [Eager(torch.device("cpu")) for _ in range(2)]
    assert side_by_side(two, recipe, recipe.data.load("train"), pytest.fail) == two


@pytest.mark.parametrize("budget", [None, Budget(epsilon=10.0)])
def test_the_trial_is_a_fit_of_the_recipe_and_is_not_counted(budget: Budget | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a budget it is a private fit, whose recording takes several times the memory of a plain one."""
    local, fits, fit = Adam(lr=1e-2, batch=8, epochs=1, privacy=budget and DpSgd()), [], Eager.fit
    recipe = toy_recipe(model=ToyUnet(dropout=0.0), algorithm=FedAvg(local=local), budget=budget)
    monkeypatch.setattr(Eager, "fit", lambda self, net, work: (fits.append(work), fit(self, net, work))[1])
    train = recipe.data.load("train")
    recipe = recipe.resolved(train)
    two = [Eager(torch.device("cpu")) for _ in range(2)]
    for machine in two:
        machine.meter, machine.threads, machine.stream = two[0].meter, 1, object()
    digests = []

    def selected(machines, trial, report, free, reserved):
        digests.extend(trial(machine, i) for i, machine in enumerate(machines))
        return list(machines)

    monkeypatch.setattr("effuse.transport.trial.select_machines", selected)
    assert side_by_side(two, recipe, train, pytest.fail) == two
    assert digests[0] == digests[1] and two[0].meter.images == 0
    assert [work.private is not None for work in fits] == [budget is not None] * 2
