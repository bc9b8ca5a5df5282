"""The benchmarks run, and what they promise holds."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent / "benchmarks"


def measured(script: str, *options: str) -> dict:
    command = [sys.executable, str(ROOT / script), "--quick", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_averaging_holds_few_copies_and_an_idle_round_costs_what_a_plain_loop_does():
    """200 updates of the 3 M model in under 8 copies of it; CPU time in turns, so that a busy machine does not matter."""
    found = measured("round_overhead.py")
    assert found["peak_copies_of_200_updates"] < 8
    for row in found["rounds"]:
        assert row["ratio"] < 1.5, row


def test_throughput_compares_like_with_like():
    rows = measured("throughput.py", "--only", "digits", "--clients", "2", "--device", "cpu")["rows"]
    assert {row["variant"] for row in rows} == {"plain", "eager"}
    assert all(row["per_second"] > 0 for row in rows)
