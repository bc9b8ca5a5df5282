"""Dropout whose mask is a function of (seed, layer, element): a step needs no generator, and a backward pass no stored mask.

Torch's own dropout draws from the one default generator of a process, so that clients with dropout must take turns. Here the
seed is a tensor of the client's; masks depend neither on who else is at work nor on the kernel that computes them.
"""

import torch
from torch import Tensor, nn

from effuse.core.model import Net

WORD = 0xFFFFFFFF
SPREAD = 0x9E3779B1  # neighbours far apart: without it, masks knew themselves at lags of thousands of places
# multipliers of a 32-bit mixing function that C. Wellons found by search: a change of any bit reaches all
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


def threshold(rate: float) -> int:
    """The 24-bit numbers below it are dropped."""
    return round(rate * 2**24)


def signed(word: int) -> int:
    """The same 32 bits as a number that fits a signed word: compilers count places in 32 bits where they can."""
    return word - 2 * (word & 2**31)


def salt(layer: int) -> int:
    """What tells layers apart."""
    return signed((layer + 1) * SPREAD & WORD)


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ h >> 16) * FIRST & WORD
    h = (h ^ h >> 15) * SECOND & WORD
    return h ^ h >> 16


def kept(seed: Tensor, layer: int, rate: float, index: Tensor) -> Tensor:
    """Which elements stay; the kernels of `kernels/elements.py` compute the same, bit by bit."""
    second = _mixed((seed >> 32 ^ salt(layer)) & WORD)
    first = _mixed(seed + second & WORD)
    second = _mixed(first ^ second)  # or one step's mask would be another's, moved
    h = index * signed(SPREAD) + first & WORD
    h = (h ^ h >> 15) * FIRST & WORD ^ second
    h = (h ^ h >> 16) * SECOND & WORD
    return h >> 8 >= threshold(rate)


def places(x: Tensor) -> Tensor:
    """The number of each element with channels, the second dimension, last: the same whatever the memory layout."""
    order = [x.shape[0], *x.shape[2:], x.shape[1]]
    return torch.arange(x.numel(), device=x.device).view(order).movedim(-1, 1)


def dropped(x: Tensor, seed: Tensor, layer: int, rate: float) -> Tensor:
    """Dropout in plain torch."""
    return torch.where(kept(seed, layer, rate, places(x)), x * (1 / (1 - rate)), 0)


class KeyedDropout(nn.Module):
    """Dropout keyed by a seed that the whole network shares, in place of torch's own."""

    p: float
    seed: Tensor
    layer: int

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.seed, self.layer, self.p) if self.training else x


def key_dropout(net: nn.Module) -> None:
    """Give every dropout of a network a number, and all of them one seed."""
    device = next((p.device for p in net.parameters()), None)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    drops = [m for m in net.modules() if type(m) is nn.Dropout and 0 < m.p < 1]
    for layer, module in enumerate(drops):
        module.__class__, module.layer = KeyedDropout, layer
        module.register_buffer("seed", seed, persistent=False)


def seed_of(net: nn.Module) -> Tensor | None:
    """The seed of a network's dropout, where it has any."""
    return next((m.seed for m in net.modules() if isinstance(m, KeyedDropout)), None)


class KeyedNet(Net):
    """A network whose evaluations with other weights drop out other elements."""

    others = 0  # such evaluations since the seed last moved

    def scratch(self) -> dict[str, Tensor]:
        buffers, seed = super().scratch(), seed_of(self.module)
        if seed is not None:
            self.others += 1
            buffers |= {k: b + (self.others << 32) for k, b in self.module.named_buffers() if b is seed}
        return buffers
