"""One real federation: a SuperLink, TLS, node authentication, and a process for every site."""

import json
import os
import re
import subprocess
import sys

import pytest

from effuse.recipes import find_recipe
from effuse.runs import driver

SETTINGS = [
    "clients=3",
    "rounds=2",
    "reproducible=True",
    "threads=1",
    "sampler=None",
    "evaluate=evaluate(grid=0)",
    "algorithm=feddiffuse_udec(local=adam(lr=1e-3, batch=64, steps=2, state='kept'), cohort=2)",
]


@pytest.mark.slow("six processes; the other tests of this folder do the same without a network, and CI runs this one")
def test_a_stateful_recipe_with_part_of_its_clients_gives_the_simulators_weights(tmp_path):
    """UDEC keeps an encoder, a bottleneck and an optimiser at each client, and two of three clients take part in a round."""
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "effuse", "run", "demo", "--engine", "flower", "--json"]
    command += ["--out", str(tmp_path / "flower")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expected = driver.run(find_recipe("demo")[1].changed(SETTINGS), tmp_path / "simulator")
    assert result["weights_sha256"] == expected.weights_sha256
    assert result["traffic"]["bytes"] == expected.traffic.bytes.to_json()
    assert not (tmp_path / "flower" / "flower" / "keys").exists(), "keys are made for one process of the server"
    log = (tmp_path / "flower" / "federation.log").read_text()
    assert re.search("manifest demo@[0-9a-f]{64}; waiting for 3 clients", log), "the recipe's name, as sites may --allow it"
    assert no_process_left(str(tmp_path))


def no_process_left(path: str) -> bool:
    """Whether no process has the run's folder in its command line."""
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/cmdline", "rb") as file:
                if path.encode() in file.read():
                    return False
        except OSError:
            continue
    return True
