"""Keyed random numbers: one address is one stream, wherever and whenever it is used."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from effuse.core.rng import Stream, keyed, stream

HERE = stream(7, 3, "train", 0, 5, "fit")


def draws(source: Stream) -> list[float]:
    return torch.rand(4, generator=source.torch()).tolist()


def test_one_address_is_one_stream():
    again = stream(7, 3, "train", 0, 5, "fit")
    assert again == HERE and again.seed == HERE.seed
    assert draws(again) == draws(HERE)
    assert np.array_equal(again.numpy().random(4), HERE.numpy().random(4))


def test_every_part_of_the_address_matters():
    others = [
        stream(8, 3, "train", 0, 5, "fit"),
        stream(7, 4, "train", 0, 5, "fit"),
        stream(7, 3, "draw", 0, 5, "fit"),
        stream(7, 3, "train", 1, 5, "fit"),
        stream(7, 3, "train", 0, 6, "fit"),
        stream(7, 3, "train", 0, 5, "generate"),
        stream(7, 3, "train", 5, 0, "fit"),
        HERE.child("order"),
        HERE.child(1),
        HERE.child("1"),
        HERE.child(1, 2),
        HERE.child(12),
    ]
    assert len({s.seed for s in [HERE, *others]}) == 13
    assert len({tuple(draws(s)) for s in [HERE, *others]}) == 13
    assert len({tuple(s.numpy().random(4)) for s in [HERE, *others]}) == 13


def test_adjacent_addresses_are_uncorrelated():
    """400 streams of 50 numbers each: all correlations are within five standard errors (5 / sqrt(50) = 0.71)."""
    rows = torch.stack([torch.randn(50, generator=HERE.child(i).torch()) for i in range(400)])
    correlations = torch.corrcoef(rows) - torch.eye(400)
    assert correlations.abs().max() < 0.71 and correlations.mean().abs() < 0.01


def test_a_seed_fits_every_generator():
    seeds = [HERE.child(i).seed for i in range(500)]
    assert all(0 <= s < 2**63 for s in seeds) and max(seeds) > 2**61


def test_a_secret_changes_the_stream_and_is_inherited_but_never_shown():
    secret = stream(7, 3, "train", 0, 5, "fit", secret=b"xyzzy")
    assert secret.seed != HERE.seed and secret.child("a").seed != HERE.child("a").seed
    assert secret.child("a").secret == b"xyzzy"
    assert stream(7, 3, "train", 0, 5, "fit", secret=b"plugh").seed != secret.seed
    assert "xyzzy" not in repr(secret) and "xyzzy" not in str(secret.child("a"))


def test_keyed_is_repeatable_and_restores_the_default_generator():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with keyed(HERE):
        first = torch.rand(3), torch.nn.Linear(2, 2).weight.detach().clone()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(100)
    with keyed(HERE):
        second = torch.rand(3), torch.nn.Linear(2, 2).weight.detach().clone()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    with keyed(HERE.child("other")):
        assert not torch.equal(torch.rand(3), first[0])


def test_keyed_restores_the_default_generator_after_an_error():
    before = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError), keyed(HERE):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.random.get_rng_state(), before)


def test_keyed_nests():
    with keyed(HERE):
        alone = torch.rand(2).tolist()
    with keyed(HERE):
        first = torch.rand(1).item()
        with keyed(HERE.child("inner")):
            torch.rand(9)
        assert [first, torch.rand(1).item()] == alone


def test_threads_use_the_default_generator_in_turn():
    """Eight threads draw at once, each from its own stream. Each gets what it would get alone."""

    def draw(k: int) -> list[float]:
        with keyed(Stream((k,))):
            first = torch.rand(2)
            time.sleep(0.005)
            return [*first.tolist(), *torch.rand(2).tolist()]

    alone = [draw(k) for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(8))) == alone
