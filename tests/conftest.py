"""Shared by all tests: one thread each, because two test processes share two cores."""

import functools
import gc
import os
import signal
from pathlib import Path

import effuse  # noqa: F401  (sets how threads wait, before torch is imported)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from effuse.metrics import cost
from effuse.tools import check

HERE = Path(__file__).parent
torch.set_num_threads(1)
# background jobs of a shell ignore Ctrl-C, and so would the processes that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path_factory):
    """Tests use no data of this machine, and leave nothing in the user's folders."""
    monkeypatch.delenv("EFFUSE_DATA", raising=False)
    monkeypatch.setenv("EFFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "effuse-cache"))
    monkeypatch.setenv("EFFUSE_LEDGERS", str(tmp_path_factory.getbasetemp() / "effuse-ledgers"))


def pytest_collection_modifyitems(items):
    """Run the longest tests (documents, benchmarks, slow ones) first, so that workers finish together."""
    items.sort(key=lambda item: item.path.parent != HERE and item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """Exclude imported objects from garbage collection, so that `gc.collect()` is fast."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if marker := item.get_closest_marker("slow"):
        item.user_properties.append(("slow", marker.args[0]))


def pytest_terminal_summary(terminalreporter):
    """List the tests that `make test` leaves out, why, and their seconds."""
    slow = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for reason in (value for key, value in report.user_properties if key == "slow"):
            name = report.nodeid.partition("[")[0]
            n, seconds, _ = slow.get(name, (0, 0.0, ""))
            slow[name] = (n + 1, seconds + report.duration, reason)
    if slow:
        terminalreporter.section("left out by `make test`")
    for name, (n, seconds, reason) in sorted(slow.items()):
        terminalreporter.line(f"{seconds:6.1f} s {name}{f' ({n})' if n > 1 else ''}: {reason}")


@pytest.fixture(autouse=True, scope="session")
def costs_are_counted_once():
    """Cache the costs of networks: counting takes half a second each time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("macs_by_operation", "layer_macs"):
            patch.setattr(cost, name, functools.cache(getattr(cost, name)))
        patch.setattr(check, "activation_bytes", functools.cache(cost.activation_bytes))
        yield
