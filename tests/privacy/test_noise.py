"""The noise of sites: a cipher's numbers, normal, fresh, and never the same under another key or nonce."""

import math
import sys

import pytest
import torch

from effuse.core.errors import RunError
from effuse.privacy import noise
from effuse.privacy.noise import SecureNoise, box_muller, integers

CPU = torch.device("cpu")
KEY, NONCE = bytes(range(32)), bytes(range(16))


def drawn(key: bytes = KEY, nonce: bytes = NONCE) -> list[torch.Tensor]:
    source = SecureNoise(key, nonce)
    return [source.normal(1001, CPU), source.included(1000, 0.5), source.normal(1001, CPU), source.included(1000, 0.5)]


def test_only_the_same_key_and_nonce_repeat():
    other_key, other_nonce = bytes([1, *KEY[1:]]), bytes([*NONCE[:15], 0])
    for ours, again, another, fresh in zip(drawn(), drawn(), drawn(key=other_key), drawn(nonce=other_nonce)):
        assert torch.equal(ours, again)
        # independent batches agree on half of 1,000 units, within five standard errors of 15.8; floats agree on none
        bound = 0 if ours.is_floating_point() else 580
        assert (ours == another).sum() <= bound and (ours == fresh).sum() <= bound


def test_calls_continue_one_stream_that_never_returns():
    """Among 300,000 words of 53 bits the chance that any two are equal is 5e-6; batches and noise have keys of their own."""
    together, apart = SecureNoise(KEY, NONCE), SecureNoise(KEY, NONCE)
    assert torch.equal(together.included(1000, 0.3), torch.cat([apart.included(n, 0.3) for n in (1, 499, 0, 500)]))
    words = torch.cat([integers(s.update(bytes(8 * 75_000))) for s in (apart._noise, apart._poisson) * 2])
    assert len(words.unique()) == 300_000


def test_much_noise_is_made_in_blocks_that_continue_the_stream(monkeypatch):
    """Of an odd count, the last number of a pair is dropped."""
    monkeypatch.setattr(noise, "BLOCK", 64)
    parts = SecureNoise(KEY, NONCE)
    assert torch.equal(SecureNoise(KEY, NONCE).normal(150, CPU), torch.cat([parts.normal(n, CPU) for n in (64, 64, 22)]))
    assert len(SecureNoise(KEY, NONCE).normal(151, CPU).unique()) == 151
    assert SecureNoise(KEY, NONCE).normal(0, CPU).shape == (0,)


def test_words_become_integers_of_53_bits():
    words = torch.tensor([0, -1, 1 << 11, (1 << 11) - 1, -(1 << 63)])
    assert integers(words.numpy().tobytes()).tolist() == [0, 2**53 - 1, 1, 0, 2**52]


def test_the_largest_and_smallest_words_give_finite_numbers():
    """u = 2^-53 has the radius sqrt(-2 log u) = sqrt(106 log 2) = 8.572, and u = 1 the radius 0."""
    assert box_muller(torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == pytest.approx([8.57167, 0.0], abs=1e-5)
    ends = box_muller(torch.tensor([2.0**53 - 1, 2.0**51], dtype=torch.float64))
    assert ends.abs().tolist() == [0.0, 0.0]
    # u = exp(-1/2), rounded to 53 bits, has the radius 1; a quarter of a turn is the second number
    turned = box_muller(torch.tensor([round(math.exp(-0.5) * 2**53) - 1.0, 2.0**51], dtype=torch.float64))
    assert turned.tolist() == pytest.approx([0.0, 1.0], abs=1e-12)


def test_noise_is_standard_normal():
    """Of a million numbers, against the standard errors of moments 1 to 4 and Dvoretzky, Kiefer and Wolfowitz' bound.

    The standard errors are 1, sqrt(2), sqrt(15), sqrt(96) thousandths. The largest distance of the distribution functions
    exceeds e with a chance below 2 exp(-2 n e^2): 1e-9 at e = 0.00327.
    """
    n = 1_000_000
    made = SecureNoise(KEY, NONCE).normal(n, CPU)
    assert made.dtype == torch.float32
    values = made.double()
    for power, moment, error in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs((values**power).mean() - moment) < 5 * error / 1000
    reached = torch.special.ndtr(values.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((reached - steps[:-1]).max(), (steps[1:] - reached).max()) < 0.00327
    # neighbours, and both numbers of a pair, are uncorrelated: within five standard errors
    halves = values.view(2, -1)
    assert abs((values[1:] * values[:-1]).mean()) < 5e-3 and abs((halves[0] * halves[1]).mean()) < 5 * 1.42e-3


def test_rates_of_zero_and_one_are_exact_and_others_are_met():
    """A share of 0.3 among 100,000 has a standard error of 0.00145."""
    source = SecureNoise(KEY, NONCE)
    assert not source.included(1000, 0.0).any() and source.included(1000, 1.0).all()
    assert abs(source.included(100_000, 0.3).double().mean() - 0.3) < 5 * 0.00145
    assert source.included(0, 0.5).shape == (0,) and source.included(3, 0.5).dtype == torch.bool


@pytest.mark.parametrize(
    "key, nonce, words", [(b"", NONCE, "a secret of 0 bytes .* needs 32"), (KEY, b"123", "a nonce of 3 bytes .* needs 16")]
)
def test_a_damaged_secret_or_nonce_is_refused(key, nonce, words):
    with pytest.raises(RunError, match=words):
        SecureNoise(key, nonce)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(RunError, match=r"needs the package cryptography; run pip install 'effuse\[flower\]'"):
        SecureNoise(KEY, NONCE)
