"""Noise that nobody can draw again: from a cipher under a site's own secret."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from effuse.core.errors import RunError
from effuse.core.noise import Noise

KEY_BYTES, NONCE_BYTES = 32, 16
BITS = 53  # of a uniform number: as many as a double holds
BLOCK = 1 << 20  # normal numbers made at a time, which bounds the memory for doubles


class SecureNoise(Noise):
    """AES-256 in counter mode; another nonce, or another key, gives independent numbers.

    A nonce must never be used for two fits: the difference of two noisy sums with equal noise has no noise.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        for name, value, length in (("secret", key, KEY_BYTES), ("nonce", nonce, NONCE_BYTES)):
            if len(value) != length:
                raise RunError(
                    f"a {name} of {len(value)} bytes cannot key private noise, which needs {length}; make a new one"
                )
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # of an extra
        except ImportError:
            raise RunError(
                "private training at a site needs the package cryptography; run pip install 'effuse[flower]'"
            ) from None

        def cipher(purpose: bytes) -> Cipher:
            # a key of its own for each nonce and purpose, so that every counter begins at 0 and none meets another
            own = hashlib.blake2b(nonce, key=key, person=purpose, digest_size=32).digest()
            return Cipher(algorithms.AES(own), modes.CTR(bytes(16)))

        self._poisson, self._noise = (cipher(purpose).encryptor() for purpose in (b"effuse.poisson", b"effuse.noise"))

    def included(self, units: int, rate: float) -> Tensor:
        return integers(self._poisson.update(bytes(8 * units))) * 2.0**-BITS < rate

    def normal(self, n: int, device: torch.device) -> Tensor:
        made = torch.empty(n, device=device)
        for start in range(0, n, BLOCK):
            part = made[start : start + BLOCK]
            pairs = (len(part) + 1) // 2
            part.copy_(box_muller(integers(self._noise.update(bytes(16 * pairs))).to(device))[: len(part)])
        return made


class SecureNumbers:
    """The noise on a few disclosed numbers, from private noise."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    def normal(self, loc: float, scale: float, size: int) -> np.ndarray:
        return loc + scale * self._normal(size)

    def laplace(self, loc: float, scale: float, size: int) -> np.ndarray:
        a, b, c, d = self._normal(4 * size).reshape(4, size)
        return loc + scale * (a * b + c * d)  # its characteristic function is 1 / (1 + t^2)

    def _normal(self, size: int) -> np.ndarray:
        return self.noise.normal(size, torch.device("cpu")).double().numpy()


def integers(stream: bytes) -> Tensor:
    """Integers below 2^53, as doubles, from 8 bytes each."""
    if not stream:
        return torch.empty(0, dtype=torch.float64)
    words = torch.frombuffer(bytearray(stream), dtype=torch.int64)
    return ((words >> (64 - BITS)) & ((1 << BITS) - 1)).double()  # the shift copies the sign, the mask removes it


def box_muller(whole: Tensor) -> Tensor:
    """Normal numbers from as many integers: Box and Muller, 1958. The largest possible is sqrt(106 log 2) = 8.57."""
    first, second = whole.view(2, -1)
    radius = ((first + 1) * 2.0**-BITS).log_().mul_(-2).sqrt_()  # of a uniform number in (0, 1]: its logarithm is finite
    angle = second * (2 * math.pi * 2.0**-BITS)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
