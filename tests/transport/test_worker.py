"""What a worker remembers of its clients' states, so that it need not read them again."""

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
    assert recent.get(0, "1_0") is None, "one state a client: the last one"


def test_what_is_remembered_is_nobody_elses():
    """Neither the job that kept a tensor and writes on it afterwards, nor the one that is handed it, changes what is remembered."""
    recent, kept = StateCache(), state(1.0)
    recent.put(0, "1_0", kept)
    kept["w"]["w"].data.fill_(5.0)
    recent.get(0, "1_0")["w"]["w"].data.fill_(7.0)
    assert recent.get(0, "1_0")["w"]["w"].tolist() == [1.0] * 4


def test_a_limit_of_bytes_drops_what_was_used_longest_ago():
    """16 bytes each, 40 in all: two states stay. Client 0 is looked at before client 2 comes, so client 1 goes."""
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
    """Three clients, four rounds: nothing is read, since each client begins with what it wrote; forgetting changes no bit."""
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM), rounds=4)
    named, read = [], Snapshots.read

    def noted(self, name):
        named.append(name)
        return read(self, name)

    monkeypatch.setattr(Snapshots, "read", noted)
    remembered = run(recipe, tmp_path / "remembered", engine=engine)
    assert [n for n in named if n is not None] == []
    monkeypatch.setattr(StateCache, "get", lambda *_: None)
    forgotten = run(recipe, tmp_path / "forgotten", engine=engine)
    assert len([n for n in named if n is not None]) == 9, "three clients in rounds 1, 2 and 3"
    assert remembered.weights_sha256 == forgotten.weights_sha256
