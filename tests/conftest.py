"""Shared by all tests: one thread each, because two test processes share two cores."""

import os
import signal

import effuse  # noqa: F401  (sets how threads wait, before torch is imported)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)
# a shell lets its background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path_factory):
    """No test may lean on data that a stranger does not have, nor leave anything in the user's cache."""
    monkeypatch.delenv("EFFUSE_DATA", raising=False)
    monkeypatch.setenv("EFFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "effuse-cache"))
