"""Shared by all tests: one thread each, because two test processes share two cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_data_root(monkeypatch):
    """No test may lean on data that a stranger does not have."""
    monkeypatch.delenv("EFFUSE_DATA", raising=False)
