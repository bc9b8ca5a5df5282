"""Helpers that compare whole runs on recorded steps with eager ones."""

import dataclasses
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toy import ToyUnet, toy_recipe

from effuse.core.data import Dataset, Source, Split
from effuse.core.recipe import Evaluate
from effuse.core.spec import spec
from effuse.data.dirichlet import QuantitySkew
from effuse.diffusion.samplers import Ddim
from effuse.fast.graph.captured import Captured
from effuse.fast.graph.private import PrivateSteps
from effuse.fast.graph.recording import WARM_UP
from effuse.fast.graph.sampling import Evaluation
from effuse.fast.graph.step import TrainingStep
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import FID
from effuse.models.unet import network_class
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder


@spec
class Speckled(Source):
    """Seventy random images, none of them symmetric."""

    flip: bool = False
    shift: int = 0

    def load(self, split: Split) -> Dataset:
        n = 70 if split == "train" else 8
        pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
        moves = {"flip": self.flip, "shift": self.shift} if split == "train" else {}
        return Dataset(pixels, torch.arange(n) % 2, ("dark", "light"), **moves)


def ragged_recipe(algorithm, **changes):
    """Clients of unequal sizes, so that some batches are incomplete; no dropout, whose masks depend on padding."""
    values = {
        "algorithm": algorithm,
        "model": ToyUnet(dropout=0.0),
        "data": Speckled(),
        "partition": QuantitySkew(beta=2.0),
        "rounds": 3,
        "sampler": Ddim(steps=3, batch=8),
        "evaluate": Evaluate(grid=0, every=2, metrics=(FID(n=20, encoder=Pixels(side=2), split="train"),)),
    }
    return toy_recipe(**(values | changes))


def outcome(recipe, path, device="auto"):
    """The losses, counts and metrics of a run, and its model."""
    result = run(recipe, path, device=device)
    lines = [json.loads(x) for x in (path / "rounds.jsonl").read_text().splitlines()]
    counts = [(x["images"], x["evaluations"], x["traffic"]["bytes"]) for x in lines]
    server = RunFolder(path).load_checkpoint().server
    return [x["loss"] for x in lines if x["loss"] is not None], counts, result.metrics, server.model.params


def assert_alike(ours, theirs):
    """Equal up to fp32 rounding, which is less than any algorithm's effect on the weights, such as FedProx's term."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    assert ours[1] == theirs[1]
    for name in theirs[2]:
        assert ours[2][name].value == pytest.approx(theirs[2][name].value, rel=1e-2), name
    assert (ours[3] - theirs[3]).norm() < 1e-3 * theirs[3].norm()


def play_on_a_cpu(patch) -> None:
    """Make recordings that run on a CPU: a replay calls the recorded function again."""
    network_class()  # its import uses torch.cuda.Stream, which is replaced below

    def recorded(self, step, stream):
        for _ in range(WARM_UP):
            step()
        return types.SimpleNamespace(replay=torch.enable_grad()(step))

    patch.setattr(Captured, "recorded", recorded)
    patch.setattr(torch.cuda, "Stream", lambda device: None)


def taken(lock: "threading.RLock") -> bool:
    """Whether another thread would have to wait for the lock."""

    def wait() -> bool:
        free = lock.acquire(blocking=False)
        if free:
            lock.release()
        return not free

    with ThreadPoolExecutor(1) as other:
        return other.submit(wait).result()


OF_A_FIT = ("lr", "epochs", "steps", "schedule", "state", "privacy")  # the fields of a solver that need no other recording


def noted_recordings(patch) -> list:
    """A list to which every new recording appends its machine and purpose."""
    found, evaluation = [], Evaluation.__init__

    def noted(kind, begin):
        def begin_step(self, machine, arch, work, frozen):
            fields = dataclasses.fields(work.solver)
            solver = tuple((f.name, getattr(work.solver, f.name)) for f in fields if f.name not in OF_A_FIT)
            private = work.private and (work.private.clip, work.private.repeats, work.private.physical)
            added = (work.loss, work.direction, tuple(sorted(work.given)), work.uphill is None, work.report_gradient, frozen)
            data = work.shard.dataset
            found.append((machine, kind, arch, type(work.solver), solver, private, added, data.flip, data.shift))
            begin(self, machine, arch, work, frozen)

        return begin_step

    def begin_evaluation(self, machine, arch, x, t, labels):
        found.append((machine, arch, tuple(x.shape), t.dtype, labels))
        evaluation(self, machine, arch, x, t, labels)

    for kind in (TrainingStep, PrivateSteps):
        patch.setattr(kind, "__init__", noted(kind, kind.__init__))
    patch.setattr(Evaluation, "__init__", begin_evaluation)
    return found
