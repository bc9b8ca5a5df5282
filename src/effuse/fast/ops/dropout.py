"""Dropout whose mask is a function of (seed, layer, element): a step needs no generator, and a backward pass no stored mask.

Torch's dropout draws from a process's single default generator, so clients with dropout would have to train in turn. Here
every client has a seed of its own. Masks depend neither on other clients nor on the kernel that computes them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.model import Net

WORD = 0xFFFFFFFF
SPREAD = 0x9E3779B1  # separates neighbouring elements: without it, masks are correlated at lags of thousands of elements
# multipliers of a 32-bit mixing function that C. Wellons found by search: a change of any bit affects all
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


def threshold(rate: float) -> int:
    """Elements whose 24-bit hash is below this are dropped."""
    return round(rate * 2**24)


def signed(word: int) -> int:
    """The same 32 bits as a signed number, since compilers use 32-bit indices where possible."""
    return word - 2 * (word & 2**31)


def salt(layer: int) -> int:
    """A number that makes the masks of layers different."""
    return signed((layer + 1) * SPREAD & WORD)


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ h >> 16) * FIRST & WORD
    h = (h ^ h >> 15) * SECOND & WORD
    return h ^ h >> 16


def kept(seed: Tensor, layer: int, rate: float, index: Tensor) -> Tensor:
    """The mask of elements that stay. The kernels of `kernels/elements.py` compute the same bits."""
    second = _mixed((seed >> 32 ^ salt(layer)) & WORD)
    first = _mixed(seed + second & WORD)
    second = _mixed(first ^ second)  # or one step's mask would be a shifted copy of another's
    h = index * signed(SPREAD) + first & WORD
    h = (h ^ h >> 15) * FIRST & WORD ^ second
    h = (h ^ h >> 16) * SECOND & WORD
    return h >> 8 >= threshold(rate)


def places(x: Tensor) -> Tensor:
    """The index of each element in channels-last order, whatever the memory layout."""
    order = [x.shape[0], *x.shape[2:], x.shape[1]]
    return torch.arange(x.numel(), device=x.device).view(order).movedim(-1, 1)


def dropped(x: Tensor, seed: Tensor, layer: int, rate: float) -> Tensor:
    """Dropout in plain torch."""
    return torch.where(kept(seed, layer, rate, places(x)), x * (1 / (1 - rate)), 0)


class KeyedDropout(nn.Module):
    """Replaces torch's dropout; the whole network shares one seed."""

    p: float
    seed: Tensor
    layer: int

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.seed, self.layer, self.p) if self.training else x


def key_dropout(net: nn.Module) -> None:
    """Number the dropout layers of a network, and give them one seed."""
    device = next((p.device for p in net.parameters()), None)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    drops: list[Any] = [m for m in net.modules() if type(m) is nn.Dropout and 0 < m.p < 1]
    for layer, module in enumerate(drops):
        module.__class__, module.layer = KeyedDropout, layer
        module.register_buffer("seed", seed, persistent=False)


def seed_of(net: nn.Module) -> Tensor | None:
    """The seed of a network's dropout, if it has dropout."""
    return next((m.seed for m in net.modules() if isinstance(m, KeyedDropout)), None)


class KeyedNet(Net):
    """A network whose evaluations with other weights use other masks."""

    others = 0  # such evaluations since the seed last changed

    def scratch(self) -> dict[str, Tensor]:
        buffers, seed = super().scratch(), seed_of(self.module)
        if seed is not None:
            self.others += 1
            buffers |= {k: b + (self.others << 32) for k, b in self.module.named_buffers() if b is seed}
        return buffers
