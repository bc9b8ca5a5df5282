"""Options of the proof by faults: how many kills, from which seed, or one case alone."""

import os
import sys
from pathlib import Path

import effuse  # noqa: F401  (before torch: it sets how threads wait)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests_flower"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "transport" / "flower"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import pytest
import torch
from kill_cases import Proof

torch.set_num_threads(1)
STRUCK = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1000, help="how many cases with a kill or a fault of the disk")
    parser.addoption("--flower-kills", type=int, default=6, help="how many of processes around a real SuperLink")
    parser.addoption("--fuzz", type=int, default=100_000, help="how many inputs for each reader")
    parser.addoption("--seed", type=int, default=0, help="what all of them are drawn from")
    parser.addoption("--case", type=int, help="one case alone, by the number that a failure prints")


def pytest_generate_tests(metafunc):
    asked, alone = metafunc.config.getoption, metafunc.config.getoption("--case")
    for name, option in (("number", "--kills"), ("flower_number", "--flower-kills")):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(asked(option)) if alone is None else [alone])


@pytest.fixture(scope="session")
def proof(request, tmp_path_factory):
    os.environ["EFFUSE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    proof = Proof(tmp_path_factory.mktemp("proof"), request.config.getoption("--seed"))
    request.config.stash[STRUCK] = proof.struck
    return proof


def pytest_terminal_summary(terminalreporter, config):
    struck = config.stash.get(STRUCK, {})
    for what, n in sorted(struck.items()):
        terminalreporter.line(f"{n:6d} {what}")
    terminalreporter.line(f"{sum(struck.values()):6d} in all")
