"""The machines of a run, which the next run reuses."""

import dataclasses
import types

import torch
from toy import ToyUnet, toy_recipe

from effuse.core.data import Shape
from effuse.fast.graph.captured import Captured
from effuse.fast.speed import keep, machine_for, machines_for, slots
from effuse.machines.eager import Eager
from effuse.models.unet import CifarUnet


def test_the_next_run_of_a_process_reuses_the_machines(monkeypatch, tmp_path):
    """Another network drops the last one's recordings. A reproducible run gets new machines."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for folder in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(folder, str(tmp_path))  # restored afterwards
    train = toy_recipe().data.load("train")
    first = toy_recipe(speed="graph", model=ToyUnet(dropout=0.0)).resolved(train)
    wider = toy_recipe(speed="graph", model=ToyUnet(dropout=0.0, width=8)).resolved(train)
    cuda = torch.device("cuda")
    machines = machines_for(first, cuda, 40)
    monkeypatch.setattr(machines[0], "forget", (forgotten := []).append)
    machines[0]._steps[(first.model,)] = types.SimpleNamespace(used=True)
    machines[0].meter.trained(7)
    keep(machines)
    again = machines_for(first, cuda, 40)
    assert again == machines and again[0].meter.images == 0 and not forgotten
    assert machines_for(first, cuda, 40)[0] is not machines[0], "an unfinished run does not share its machines"
    keep(machines)
    assert machines_for(wider, cuda, 40) == machines and forgotten == [first.model]
    keep(machines)
    assert machines_for(wider.changed(["reproducible=True"]), cuda, 40)[0] is not machines[0]


def test_clients_with_dropout_share_a_gpu():
    """Masks are keyed by client. Only the size of a network limits the slots."""
    recipe = toy_recipe(clients=8, model=ToyUnet(dropout=0.1)).resolved(toy_recipe().data.load("train"))
    assert slots(recipe) == 5
    large = CifarUnet().resolved(Shape(32, 3, 10))
    assert slots(dataclasses.replace(recipe, model=large)) == 2
    assert slots(dataclasses.replace(recipe, model=large, clients=1)) == 1


def test_one_model_is_evaluated_on_recordings_where_there_is_a_gpu(monkeypatch, tmp_path):
    """`effuse sample`, `evaluate` and `prune` use it. It compiles nothing, and `speed=eager` remains the reference."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for folder in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(folder, str(tmp_path))
    recorded = machine_for(toy_recipe(), torch.device("cuda"))
    assert isinstance(recorded, Captured) and not recorded.compiled and recorded.arithmetic == "bf16"
    for recipe, place in ((toy_recipe(speed="eager"), "cuda"), (toy_recipe(), "cpu")):
        plain = machine_for(recipe, torch.device(place))
        assert type(plain) is Eager and plain.arithmetic == "fp32"
