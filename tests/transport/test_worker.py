"""What a worker does around a job: it caches its clients' states, and keys and guards private clients."""

import dataclasses

import pytest
import torch
from private_fits import private
from toy import ADAM, ToyImages, ToyStateful, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.algorithm import job_of
from effuse.core.data import Shape, Shard
from effuse.core.errors import RecipeError
from effuse.core.federation import Order
from effuse.core.params import Params
from effuse.core.privacy import Budget
from effuse.core.protection import Protection
from effuse.core.rng import Stream
from effuse.core.workbench import Client
from effuse.machines.eager import Eager
from effuse.runs.driver import run
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.transport.state import MemorySnapshots, Snapshots
from effuse.transport.worker import StateCache, Worker, message_digest


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


def private_worker(**data) -> tuple[Worker, Client]:
    """A worker of one client, whose image is private."""
    images = dataclasses.replace(ToyImages().load("train"), private=True, **data)
    client = Client(Eager(torch.device("cpu")), Denoise(schedule=Linear(steps=25)), 2, 0, Shard.whole(images))
    algorithm = private(FedAvg(local=ADAM))
    worker = Worker(algorithm, 0, lambda k: client, lambda k: MemorySnapshots())
    worker.protections = {0: Protection(Budget(epsilon=10.0), 1.0)}
    return worker, client


def test_the_noise_of_a_private_client_is_keyed_by_the_content_of_its_message():
    """One changed weight is another message, and so are equal numbers under another name or in another shape."""
    worker, client = private_worker()
    job = job_of(worker.algorithm, "train").arguments
    model = ToyUnet(dropout=0.0).resolved(Shape(4, 1, 2)).initial(Stream(("test",)))
    name = next(iter(model.params))
    changed = model.holding(Params({**model.params, name: model.params[name] + 2.0**-20}))
    seen = []
    for sent in (model, changed, model):
        worker.perform(Order("train", 0, 0, 0, 0, None, ""), job(model=sent))
        seen.append(client.message)
    assert seen[0] == seen[2] != seen[1]
    assert message_digest(job(model=model), job) == seen[0]
    values = [Params(p) for p in ({"a": torch.ones(2)}, {"b": torch.ones(2)}, {"a": torch.ones(2, 1)})]
    assert len({message_digest(p, Params) for p in values}) == 3


def test_private_images_without_protection_are_refused_whatever_a_job_does_with_them():
    """A fit refuses them itself; a job that only counts labels, or sums images, would not."""
    worker, client = private_worker()
    worker.protections = {}
    job = job_of(worker.algorithm, "train").arguments
    model = ToyUnet(dropout=0.0).resolved(Shape(4, 1, 2)).initial(Stream(("test",)))
    with pytest.raises(RecipeError, match="job 'train': private images reached a worker"):
        worker.perform(Order("train", 0, 0, 0, 0, None, ""), job(model=model))
    assert client.releases == []
