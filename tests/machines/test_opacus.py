"""Opacus as an oracle of the clipped sum, on networks that keep their tensors contiguous: elsewhere it is wrong."""

import opacus
import pytest
import torch
import torch.nn.functional as F
from private_fits import CPU, Chosen, private_work
from torch import Tensor

from effuse.core.data import Dataset, Shape, Shard
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.privacy import DpSgd
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.machines.eager import Eager
from effuse.models.resnet import Cnn, Resnet
from effuse.tasks.classify import Classify

ARCHS = {
    "cnn": Cnn(widths=(8, 16), groups=4).resolved(Shape(8, 1, 4)),
    "resnet": Resnet(widths=(8, 16), blocks=(1, 1), groups=4).resolved(Shape(8, 1, 4)),
}
TAKEN, LR = [0, 3, 4, 9], 0.25


def images() -> Shard:
    pixels = torch.randint(0, 256, (10, 1, 8, 8), generator=Stream(("images",)).torch(), dtype=torch.uint8)
    return Shard.whole(Dataset(pixels, torch.arange(10) % 4, ("a", "b", "c", "d")))


def gradients(model: Model) -> dict[str, Tensor]:
    """Opacus' gradients of the images that take part: a row for each."""
    net = model.arch.build()
    net.load_state_dict(dict(model.params))
    wrapped, data = opacus.GradSampleModule(net), images().dataset
    F.cross_entropy(wrapped(data.floats(data.images[TAKEN])), data.labels[TAKEN]).backward()
    return {k: p.grad_sample.flatten(1) for k, p in net.named_parameters()}


def step(model: Model, clip: float, repeats: int) -> Params:
    """The change of our weights by one step without noise: minus lr times the clipped sum over q n = 5."""
    machine, shard = Eager(CPU), images()
    net = machine.load(model)
    solver = SGD(lr=LR, batch=5, steps=1, privacy=DpSgd(clip=clip, repeats=repeats, physical=3))
    machine.fit(net, private_work(solver, shard, Classify(), noise=Chosen(TAKEN)))
    return Params.of(net) - model.params


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", ARCHS)
def test_the_clipped_sum_is_that_of_opacus(name: str, repeats: int) -> None:
    """Two of four images are clipped. Two equal rows of an image have the gradient of one: the task draws nothing."""
    model = ARCHS[name].initial(Stream((1,)))
    grads = gradients(model)
    norms = torch.cat(list(grads.values()), dim=1).norm(dim=1)
    clip = norms.sort().values[1:3].mean().item()
    scale = (clip / norms).clamp(max=1.0)
    wanted = Params({k: -LR / 5 * (scale @ g).view(model.params[k].shape) for k, g in grads.items()})
    assert (step(model, clip, repeats) - wanted).norm() < 1e-5 * wanted.norm()
