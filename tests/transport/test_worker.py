"""The worker's cache of its clients' states, which saves reading them from disk."""

import pytest
import torch
from toy import ADAM, ToyStateful, toy_recipe

from effuse.core.params import Params
from effuse.runs.driver import run
from effuse.transport.state import Snapshots
from effuse.transport.worker import StateCache


def state(value: float, n: int = 4) -> dict:
    return {"w": Params({"w": torch.full((n,), value)}), "visits": 3}


def test_a_state_is_found_by_the_name_of_its_snapshot_alone():
    recent = StateCache()
    recent.put(0, "1_0", state(1.0))
    assert recent.get(0, "1_0")["w"]["w"].tolist() == [1.0] * 4 and recent.get(0, "1_0")["visits"] == 3
    assert recent.get(0, "0_0") is None and recent.get(1, "1_0") is None and recent.get(0, None) is None
    recent.put(0, "2_0", state(2.0))
    assert recent.get(0, "1_0") is None, "only the last state of each client is cached"


def test_a_job_cannot_change_a_cached_state():
    """Neither a job that writes on a tensor after it was put, nor one that writes on what it got."""
    recent, original = StateCache(), state(1.0)
    recent.put(0, "1_0", original)
    original["w"]["w"].data.fill_(5.0)
    recent.get(0, "1_0")["w"]["w"].data.fill_(7.0)
    assert recent.get(0, "1_0")["w"]["w"].tolist() == [1.0] * 4


def test_over_the_limit_of_bytes_the_least_recently_used_state_is_dropped():
    """States of 16 bytes and a limit of 40: two stay. Client 0 is read before client 2 is put, so client 1's is dropped."""
    recent = StateCache(limit=40)
    recent.put(0, "1_0", state(0.0))
    recent.put(1, "1_0", state(1.0))
    recent.get(0, "1_0")
    recent.put(2, "1_0", state(2.0))
    assert [recent.get(k, "1_0") is not None for k in range(3)] == [True, False, True]
    recent.put(2, "2_0", state(2.0, n=11))
    assert recent.get(2, "2_0") is None, "44 bytes are over the limit by themselves"


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_a_state_is_read_from_disk_once_at_most(engine, tmp_path, monkeypatch):
    """Three clients, four rounds: each client begins with the cached state that it wrote; without a cache no bit changes."""
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM), rounds=4)
    names, read = [], Snapshots.read

    def recording(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Snapshots, "read", recording)
    cached = run(recipe, tmp_path / "cached", engine=engine)
    assert [name for name in names if name is not None] == []
    monkeypatch.setattr(StateCache, "get", lambda *_: None)
    uncached = run(recipe, tmp_path / "uncached", engine=engine)
    assert len([name for name in names if name is not None]) == 9, "three clients in rounds 1, 2 and 3"
    assert cached.weights_sha256 == uncached.weights_sha256
