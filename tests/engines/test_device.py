"""Where a run computes: machines that outlive their run."""

import torch
from toy import ToyUnet, toy_recipe

from effuse.engines.device import keep, machines_for


def test_the_next_run_of_a_process_finds_the_last_ones_machines(monkeypatch):
    """The same task: the same machines, emptied of what only the last network needed; another task: new ones."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    train = toy_recipe().data.load("train")
    first = toy_recipe(speed="graph", model=ToyUnet(dropout=0.0)).resolved(train)
    wider = toy_recipe(speed="graph", model=ToyUnet(dropout=0.0, width=8)).resolved(train)
    cuda = torch.device("cuda")
    ours = machines_for(first, cuda, 40)
    monkeypatch.setattr(ours[0], "forget", (forgotten := []).append)
    ours[0]._steps[(first.model,)] = "a recording"
    ours[0].meter.trained(7)
    keep(ours)
    again = machines_for(first, cuda, 40)
    assert again == ours and again[0].meter.images == 0 and not forgotten
    assert machines_for(first, cuda, 40)[0] is not ours[0], "a run that is not over shares its machines with nobody"
    keep(ours)
    assert machines_for(wider, cuda, 40) == ours and forgotten == [first.model]
    keep(ours)
    assert machines_for(wider.changed(["reproducible=True"]), cuda, 40)[0] is not ours[0]
