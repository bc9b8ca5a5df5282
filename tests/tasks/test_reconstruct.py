"""The loss of an autoencoder, by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from effuse.core.model import Net
from effuse.core.task import Batch
from effuse.tasks.reconstruct import Reconstruct, distance, divergence, images_of


class Answers(nn.Module):
    """Logits of zero, z with mean 1 and log variance 0, two of each; it shows what it was called with."""

    def forward(self, x: Tensor, t: None, labels: Tensor, noise: Tensor):
        self.called = x, labels, noise
        return torch.zeros_like(x), torch.ones(len(x), 2), torch.zeros(len(x), 2)


def test_the_distance_of_grey_images_is_the_cross_entropy_of_their_pixels():
    """A logit of 0 means 1/2: ln 2 for each of four pixels, whatever the image; a logit of 2 for white: ln(1 + e^-2)."""
    x = torch.tensor([-1.0, 1.0, 0.0, 0.5]).view(1, 1, 2, 2)
    assert distance(torch.zeros_like(x), x).item() == pytest.approx(4 * math.log(2))
    white = torch.ones(1, 1, 1, 1)
    assert distance(2 * white, white).item() == pytest.approx(math.log(1 + math.exp(-2)))


def test_the_distance_of_colour_images_is_the_squared_error_of_their_values_from_0_to_1():
    """1/2 against 1, 0 and 3/4: 1/4 + 1/4 + 1/16 for a pixel of three colours, and twice that for two pixels."""
    x = torch.tensor([1.0, -1.0, 0.5]).view(1, 3, 1, 1).expand(-1, -1, 1, 2)
    assert distance(torch.zeros_like(x), x).item() == pytest.approx(2 * 9 / 16)


def test_the_divergence_from_the_standard_normal_distribution():
    """Mean 1, variance 1: 1/2 for each z. Mean 0, variance 4: -(1 + ln 4 - 4) / 2 = 0.806853."""
    assert divergence(torch.ones(1, 2), torch.zeros(1, 2)).item() == pytest.approx(1.0)
    assert divergence(torch.zeros(1, 1), torch.full((1, 1), math.log(4))).item() == pytest.approx(0.806853, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_the_loss_is_distance_plus_beta_times_divergence(beta):
    """4 ln 2 + beta for every image; padding counts for nothing."""
    task, net = Reconstruct(beta=beta), Answers()
    x, labels = torch.randn(3, 1, 2, 2).clamp(-1, 1), torch.tensor([0, 1, 2])
    drawn = task.draw(3, x.shape[1:], labels, torch.Generator().manual_seed(0))
    batch = Batch(x, labels, task, drawn, weight=torch.tensor([1.0, 1.0, 0.0]))
    assert task.loss(Net(net), batch).item() == pytest.approx(4 * math.log(2) + beta)
    assert net.called[0] is x and net.called[1] is labels and net.called[2].shape == x.shape


def test_images_of_logits():
    """sigma(0) = 1/2 is grey, 0 in [-1, 1]; ln 3 means 3/4, that is 1/2."""
    logits = torch.tensor([0.0, math.log(3), -100.0, 100.0])
    torch.testing.assert_close(images_of(logits), torch.tensor([0.0, 0.5, -1.0, 1.0]))
