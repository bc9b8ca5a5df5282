"""What the recorded step keeps in static buffers, on a CPU: a recording is played by calling what was recorded."""

import types

import pytest
import torch
from toy import ToyImages

from effuse.core.captured import WARM_UP, Captured
from effuse.core.data import Shape, Shard
from effuse.core.machine import Eager, Work
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.diffusion.objective import Denoise
from effuse.models.unet import Unet

CPU, TASK = torch.device("cpu"), Denoise()
ARCH = Unet(widths=(8, 16), layers=1, attention=(), middle_attention=False, groups=8).resolved(Shape(8, 1, 2))
MODEL = ARCH.initial(Stream((0,)))


@pytest.fixture(autouse=True)
def played(monkeypatch):
    def recorded(self, step, stream):
        for _ in range(WARM_UP):
            step()
        return types.SimpleNamespace(replay=torch.enable_grad()(step))

    monkeypatch.setattr(Captured, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)


def blended(grads, params, given):
    return {k: given["alpha"] * g + (1 - given["alpha"]) * given["delta"][k] for k, g in grads.items()}


def fit(machine, seed, rho, alpha):
    """Seven steps, every fourth of them ragged: what the fit says, and the weights after it."""
    machine.release(None)
    net = machine.load(MODEL)
    work = Work(
        solver=SGD(lr=0.05, batch=16, steps=7), shard=Shard.whole(ToyImages(n=50, side=8).load("train")), lr=0.05,
        stream=Stream((seed,)), place=0, where="here", rho=rho, gradient=True, direction=blended,
        given={"alpha": alpha, "delta": MODEL.params * 0.01},
    )  # fmt: skip
    return machine.fit(net, work)[0], Params.of(net)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_fits_one_after_another_are_the_eager_ones():
    """Other seeds, distances uphill and coefficients on the same two recordings: sums and coefficients start afresh in each."""
    fast, eager = Captured(CPU, TASK, compiled=False), Eager(CPU, TASK)
    for seed, (rho, alpha) in enumerate([(0.1, 0.1), (1.0, 0.5), (None, 0.5), (0.1, 0.1), (None, 0.9)]):
        (a, y), (b, z) = fit(eager, seed, rho, alpha), fit(fast, seed, rho, alpha)
        assert b.loss == pytest.approx(a.loss, rel=1e-5) and (a.steps, a.images) == (b.steps, b.images)
        assert (a.gradient - b.gradient).norm() < 1e-4 * a.gradient.norm()
        assert (y - z).norm() < 1e-4 * (y - MODEL.params).norm()
        assert all(t.is_contiguous() for t in b.gradient.tensors)
    assert fast.captures == 2, "with and without a second pass"
