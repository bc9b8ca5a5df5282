"""Drawing from an autoencoder."""

import math

import pytest
import torch

from effuse.core.errors import RecipeError
from effuse.diffusion.decode import Decode
from effuse.tasks.classify import Classify
from effuse.tasks.reconstruct import Reconstruct

SHAPE = torch.Size((5, 1, 2, 2))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("limit", [1.0, 3.0])
def test_the_noise_is_a_truncated_normal_distribution(limit):
    """Its variance is 1 - 2 a phi(a) / (2 Phi(a) - 1): 0.2911 at a = 1, and 0.9733 at 3."""
    z = Decode(truncate=limit).noise((200_000,), generator())
    density, inside = math.exp(-(limit**2) / 2) / math.sqrt(2 * math.pi), math.erf(limit / math.sqrt(2))
    assert z.abs().max() <= limit and z.abs().max() > 0.98 * limit
    assert z.mean().item() == pytest.approx(0, abs=0.01)
    assert z.var().item() == pytest.approx(1 - 2 * limit * density / inside, rel=0.02)


def test_one_evaluation_gives_the_images():
    """The network is called as a U-Net is: noise of an image's shape, time steps of zero, labels. It returns logits."""
    calls, ticks, labels = [], [], torch.arange(5)

    def net(x, t, y):
        calls.append((x, t, y))
        return x

    images = Decode().draw(net, Reconstruct(), SHAPE, labels, generator(), lambda: ticks.append(1))
    ((x, t, y),) = calls
    assert x.shape == SHAPE and t.tolist() == [0] * 5 and y is labels and ticks == [1]
    torch.testing.assert_close(images, torch.tanh(x / 2))
    assert torch.equal(x, Decode().noise(SHAPE, generator()))


def test_tasks_without_a_decoder_are_refused():
    Decode().ready(Reconstruct(), True)
    with pytest.raises(RecipeError, match=r"decode\(\) draws from an autoencoder, and classify\(\) trains none"):
        Decode().ready(Classify(), True)
