"""The cache between runs: values are computed once, also if several processes need them at the same time."""

import subprocess
import sys

import pytest
import torch

from effuse.core.errors import RunError
from effuse.metrics.store import cached

KEY = ("toy", 1)


def never():
    raise AssertionError("it is there already")


def test_cached_values_are_not_computed_again_and_damaged_ones_are(tmp_path):
    one = {"mean": torch.arange(3.0)}
    assert torch.equal(cached(tmp_path / "new", "moments", KEY, lambda: one)["mean"], one["mean"])
    assert torch.equal(cached(tmp_path / "new", "moments", KEY, never)["mean"], one["mean"])
    (file,) = (tmp_path / "new").glob("moments-*.safetensors")
    file.write_bytes(b"half a fi")
    assert cached(tmp_path / "new", "moments", KEY, lambda: {"mean": torch.ones(1)})["mean"].tolist() == [1.0]
    assert cached(tmp_path / "new", "moments", KEY, never)["mean"].tolist() == [1.0]
    with pytest.raises(AssertionError):
        cached(tmp_path / "new", "moments", ("toy", 2), never)
    assert cached(None, "moments", KEY, lambda: one) is one


WANTS = """
import os, sys, time
from pathlib import Path
import torch
from effuse.metrics.store import cached

def compute():
    open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
    time.sleep(1)
    return {"weights": torch.tensor([os.getpid()])}

print("ready", flush=True)
input()
print(cached(Path(sys.argv[1]), "classifier", ("toy",), compute)["weights"].item())
"""


def test_one_of_several_processes_computes(tmp_path):
    """Training a classifier may give other bits in every process, and all processes of a table must use the same one."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WANTS, tmp_path / "cache", tmp_path / "log"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0].strip() for process in started}
    assert found == {*(tmp_path / "log").read_text().split()} and len(found) == 1


def test_a_failure_leaves_no_lock_and_no_file(tmp_path):
    """The next call computes the value."""
    with pytest.raises(AssertionError):
        cached(tmp_path, "features", KEY, never)
    assert cached(tmp_path, "features", KEY, lambda: {"x": torch.ones(1)})["x"].tolist() == [1.0]


def test_an_unwritable_cache_is_named_in_the_error(tmp_path):
    (tmp_path / "cache").write_text("a file is no folder")
    with pytest.raises(RunError, match="cache.*check the folder"):
        cached(tmp_path / "cache", "features", KEY, lambda: {"x": torch.ones(1)})
