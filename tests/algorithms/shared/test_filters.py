"""Filters of drawn images: FedDiff's Fourier magnitudes by hand, and what they are compared with."""

import dataclasses

import pytest
import torch
from private_fits import Chosen
from toy import ToyImages

from effuse.algorithms.shared.filters import AtRandom, Fmf, magnitudes
from effuse.algorithms.shared.synthesis import AuxiliarySet
from effuse.core.data import Shard
from effuse.core.errors import RecipeError
from effuse.core.privacy import Budget
from effuse.core.protection import Protection
from effuse.core.rng import Stream
from effuse.core.workbench import Client
from effuse.machines.eager import Eager

CPU = torch.device("cpu")


class Server:
    """As much of a federation as a filter needs."""

    rehearsing = False

    def __init__(self):
        self.workbench = Client(Eager(CPU), None, 1, 0, Shard.whole(ToyImages().load("train")))
        self.workbench.begin(Stream((0, 0, "filter")), 0)


def client(budget: Budget | None = None, n: int = 40, **changes) -> Client:
    data = dataclasses.replace(ToyImages(n=n).load("train"), private=budget is not None, **changes)
    made = Client(Eager(CPU), None, 1, 0, Shard.whole(data))
    made.begin(Stream((0, 0, "upload")), 0)
    made.protection = None if budget is None else Protection(budget, 1.0)
    return made


def images(*pixels, origin=None) -> AuxiliarySet:
    stacked = torch.tensor(pixels, dtype=torch.uint8)[:, None]
    n = len(stacked)
    return AuxiliarySet(stacked, torch.zeros(n, dtype=torch.int64), torch.tensor(origin or [0] * n))


def test_the_score_of_a_point_against_a_grey_image():
    """z = [[1, 0], [0, 0]] has magnitude 1/2 everywhere (orthonormal); a constant 1/2 has 1 at the lowest frequency and 0
    elsewhere. The difference is 1/2 in four places: a score of 1, and 2 without the norm. Without the lowest frequency it is
    the root of 3/4."""
    drawn = images([[255, 0], [0, 0]])
    told = {0: magnitudes(torch.full((1, 2, 2), 0.5))}
    assert told[0].flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert Fmf().scores(drawn, told).item() == pytest.approx(1.0)
    assert Fmf(norm="backward").scores(drawn, told).item() == pytest.approx(2.0)
    assert Fmf(dc=False).scores(drawn, told).item() == pytest.approx(0.75**0.5)
    log = torch.tensor([1.5, 1.5, 1.5, 1.5]).log() - torch.tensor([2.0, 1.0, 1.0, 1.0]).log()
    assert Fmf(log=True).scores(drawn, told).item() == pytest.approx(log.norm().item())


def test_parseval_bounds_what_an_image_adds():
    """The norm of the magnitudes is that of the image: at most the root of its number of values, 32 for 1x32x32."""
    x = torch.rand(5, 3, 32, 32)
    assert torch.allclose(magnitudes(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
    quarter = magnitudes(torch.full((1, 32, 32), 0.25))
    assert quarter[0, 0, 0].item() == pytest.approx(8.0) and quarter.sum().item() == pytest.approx(8.0, abs=1e-3)


def test_a_client_tells_the_mean_magnitudes_of_its_images():
    """Grey squares have the lowest frequency only: four times (side 4) the mean of their brightness."""
    made = client()
    brightness = made.data.dataset.images.float().mean() / 255
    told = Fmf().described(made)
    assert told[0, 0, 0].item() == pytest.approx(4 * brightness.item(), rel=1e-5)
    assert told.flatten()[1:].abs().max() < 1e-5
    assert made.releases == []


def test_white_is_one_whatever_the_depth():
    """Stored with 16 bits, the same images are 257 times as large; white is 65,535."""
    eight = client()
    deep = client(images=eight.data.dataset.images.int() * 257, peak=65535)
    torch.testing.assert_close(Fmf().described(deep), Fmf().described(eight))


def test_told_magnitudes_carry_noise_of_their_sensitivity():
    """z = 3 and an image of 16 values, whose norm is at most 4: where all noise is one, each of the 16 means moves by
    3 * 4 / n; n = 40 gives 0.3."""
    quiet, noisy = Fmf().described(client()), client(Budget(epsilon=1.0))
    noisy.protection = Protection(Budget(epsilon=1.0), None, noise=lambda stream, device: Chosen(value=1.0))
    assert (Fmf(noise=3.0).described(noisy) - quiet).flatten().tolist() == pytest.approx([0.3] * 16, abs=1e-5)
    assert [(r.what, r.noise, r.rate, r.steps) for r in noisy.releases] == [("magnitudes", 3.0, 1.0, 1)]
    with pytest.raises(RecipeError, match="magnitudes would leave the client without noise"):
        Fmf(noise=0.0).described(client(Budget(epsilon=1.0)))


def test_every_patient_counts_one_in_the_mean():
    """Patient 0 has 30 images and each other one: a mean over eleven patients. The sensitivity is that of one image."""
    groups = torch.arange(40).sub(29).clamp(min=0)
    made = client(groups=groups)
    made.protection = Protection(Budget(epsilon=1.0, unit="group"), None, noise=lambda stream, device: Chosen(value=1.0))
    brightness = made.data.dataset.images.float().mean((1, 2, 3)) / 255
    mean = (brightness[:30].mean() + brightness[30:].sum()) / 11
    told = Fmf(noise=3.0).described(made)
    assert told[0, 0, 0].item() == pytest.approx(4 * mean.item() + 3 * 4 / 11, rel=1e-5)
    assert told[0, 1, 1].item() == pytest.approx(3 * 4 / 11, rel=1e-5)


def test_an_image_is_held_against_its_own_clients_mean():
    """Client 0's mean is black, client 1's white: a white image is as far from one as it is near the other.

    Noise may tell a negative mean, which counts as zero.
    """
    white = magnitudes(torch.ones(1, 2, 2))
    drawn = images([[255, 255], [255, 255]], [[255, 255], [255, 255]], origin=[0, 1])
    for black in (torch.zeros(1, 2, 2), torch.full((1, 2, 2), -3.0)):
        assert Fmf().scores(drawn, {0: black, 1: white}).tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


def test_the_floor_of_gamma_is_removed():
    """19 images at 5 %: floor(0.95) = 0 are removed; 40 at 5 %: 2. Brighter images are farther from a black client."""
    pixels = [[[i, i], [i, i]] for i in range(40)]
    told = {0: torch.zeros(1, 2, 2), 1: torch.zeros(1, 2, 2)}
    assert len(Fmf().kept(images(*pixels[:19]), told, None, Server())) == 19
    assert Fmf().kept(images(*pixels), told, None, Server()).tolist() == list(range(38))
    # of each client's 20 images one is removed: the brightest of each, 19 and 39
    split = images(*pixels, origin=[0] * 20 + [1] * 20)
    kept = Fmf(scope="client").kept(split, told, None, Server()).tolist()
    assert kept == [*range(19), *range(20, 39)]
    assert Fmf().kept(split, told, None, Server()).tolist() == list(range(38))


def test_the_control_removes_as_many_at_random():
    drawn = images(*([[[i, i], [i, i]] for i in range(40)]))
    kept = AtRandom(gamma=0.05).kept(drawn, {}, None, Server()).tolist()
    assert len(kept) == 38 and kept == sorted(set(kept)) and kept != list(range(38))
