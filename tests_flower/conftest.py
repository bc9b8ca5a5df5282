"""A federation of real processes for each test."""

import signal
import sys
from pathlib import Path

import effuse  # noqa: F401  (before torch: it sets how threads wait)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "transport" / "flower"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))  # the first: both others have a conftest, too

import pytest
import torch
from deployment import Deployment

torch.set_num_threads(1)
# as a shell's background job this process would ignore Ctrl-C, and so would the processes that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def deployment(tmp_path):
    processes = Deployment(tmp_path)
    yield processes
    processes.close()
