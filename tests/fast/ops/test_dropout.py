"""Dropout as a function of seed, layer and element."""

import pytest
import torch
from torch import nn

from effuse.core.model import draws_inside
from effuse.fast.ops.dropout import WORD, KeyedDropout, _mixed, dropped, kept, key_dropout, salt, seed_of

N = 1 << 20
PLACES = torch.arange(N)


def mask(seed: int, layer: int, rate: float = 0.5) -> torch.Tensor:
    return kept(torch.tensor(seed), layer, rate, PLACES)


def by_hand(seed: int, layer: int, rate: float, place: int) -> bool:
    """The same with Python's integers, cut to 32 bits after every operation."""
    word = 2**32

    def mixed(h: int) -> int:
        h = (h ^ h >> 16) * 0x7FEB352D % word
        h = (h ^ h >> 15) * 0x846CA68B % word
        return h ^ h >> 16

    second = mixed((seed >> 32) % word ^ (layer + 1) * 0x9E3779B1 % word)
    first = mixed((seed + second) % word)
    second = mixed(first ^ second)
    h = (place * 0x9E3779B1 + first) % word
    h = (h ^ h >> 15) * 0x7FEB352D % word ^ second
    h = (h ^ h >> 16) * 0x846CA68B % word
    return h >> 8 >= round(rate * 2**24)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -(2**63)])
def test_the_hash_is_the_written_one(seed: int) -> None:
    for layer in (0, 1, 200):
        found = kept(torch.tensor(seed), layer, 0.3, torch.tensor([0, 1, 17, 2**31, 2**32 - 1])).tolist()
        assert found == [by_hand(seed, layer, 0.3, place) for place in (0, 1, 17, 2**31, 2**32 - 1)]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate: float) -> None:
    """A million draws, thirty times: five standard deviations, sqrt(r (1 - r) / n), around 1 - r."""
    for seed in (0, 1, 7, 2**32, 2**62 + 5):
        for layer in range(6):
            share = mask(seed, layer, rate).double().mean().item()
            assert abs(share - (1 - rate)) < 5 * (rate * (1 - rate) / N) ** 0.5, (seed, layer)


def test_masks_are_uncorrelated() -> None:
    """Two independent fair masks agree at half the elements, up to 1 / (2 sqrt n); so do shifts of one mask."""
    base = mask(5, 0)
    others = {f"seed {s}": mask(s, 0) for s in (4, 6, 7, 5 + 2**32, 5 + 2**40)} | {
        f"layer {i}": mask(5, i) for i in (1, 2, 30)
    }
    others |= {
        f"{lag} places on": base.roll(-lag)
        for lag in (*range(1, 9), 16, 32, 128, 512, 3072, 4096, 8192, 12288, 32768, 131072)
    }
    for name, other in others.items():
        agreement = (base == other).double().mean().item()
        assert abs(agreement - 0.5) < 5 / (2 * N**0.5), name


def test_no_mask_is_another_one_shifted() -> None:
    """Elements enter the hash as index x 0x9E3779B1 + first. At the lag where two seeds coincide, masks must not agree."""
    word, places = 2**32, torch.arange(N)
    for seed in (5, 6, 1000):
        first = []
        for s in (seed, seed + 1):
            second = _mixed((torch.tensor(s) >> 32 ^ salt(0)) & WORD)
            first.append(int(_mixed(torch.tensor(s) + second & WORD)))
        lag = (first[1] - first[0]) * pow(0x9E3779B1, -1, word) % word
        moved = kept(torch.tensor(seed), 0, 0.5, places + lag)
        agreement = (mask(seed + 1, 0) == moved).double().mean().item()
        assert abs(agreement - 0.5) < 5 / (2 * N**0.5)


def test_patterns_of_four_elements_are_uniform() -> None:
    """Sixteen patterns of four neighbours, 16,384 of each: chi-squared with 15 degrees exceeds 45 once in ten thousand."""
    for seed in range(8):
        patterns = mask(seed, 3).view(-1, 4).long() @ torch.tensor([8, 4, 2, 1])
        counts = torch.bincount(patterns, minlength=16).double()
        assert ((counts - N / 64).square() / (N / 64)).sum() < 45


def test_a_mask_does_not_depend_on_the_memory_layout() -> None:
    x = torch.randn(2, 6, 4, 4)
    seed = torch.tensor(3)
    y = dropped(x, seed, 0, 0.3)
    assert torch.equal(y, dropped(x.contiguous(memory_format=torch.channels_last), seed, 0, 0.3))
    assert set((y / x).unique().tolist()) <= {0.0, *(v for v in (y / x).unique().tolist() if v == pytest.approx(1 / 0.7))}
    assert dropped(torch.ones(3, 5), seed, 0, 0.3).shape == (3, 5)


def test_a_network_has_one_seed_and_its_layers_differ() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0)))
    names = list(net.state_dict())
    assert draws_inside(net)
    key_dropout(net)
    assert not draws_inside(net) and list(net.state_dict()) == names
    assert isinstance(net[1], KeyedDropout) and net[1].seed is net[2][0].seed is seed_of(net)
    x = torch.ones(64, 8)
    assert not torch.equal(net[1](x), net[2][0](x)) and torch.equal(net[1](x), net[1](x))
    before = net[1](x)
    seed_of(net).add_(1)
    assert not torch.equal(net[1](x), before)
    assert torch.equal(net.eval()[1](x), x)


def test_dropout_of_whole_channels_still_draws() -> None:
    net = nn.Sequential(nn.Dropout2d(0.5))
    key_dropout(net)
    assert draws_inside(net) and seed_of(net) is None
