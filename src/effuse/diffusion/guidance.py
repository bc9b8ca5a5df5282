"""Classifier-free guidance: Ho and Salimans, 2022."""

from collections.abc import Callable

import torch
from torch import Tensor

from effuse.core.errors import ModelError
from effuse.core.sampler import Predict
from effuse.tasks.denoise import NULL


def refuse_guidance(w: float, conditional: bool) -> None:
    """Refuse guidance of an unconditional model."""
    if w and not conditional:
        raise ModelError(f"guidance={w:g} needs a class-conditional model; set guidance=0 or train with conditional=True")


def guided(net: Predict, labels: Tensor | None, w: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The network with guidance: (1 + w) times the conditional output minus w times the unconditional one.

    The weights sum to one, and epsilon, v and x0 are affine in each other at a given x_t. So this holds for all three.
    """
    if w == 0.0:
        return lambda x, t: net(x, t, labels)
    refuse_guidance(w, labels is not None)
    assert labels is not None
    both = torch.cat([labels, torch.full_like(labels, NULL)])

    def predict(x: Tensor, t: Tensor) -> Tensor:
        # one evaluation of twice the batch is faster than two
        conditional, unconditional = net(torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
        return (1.0 + w) * conditional - w * unconditional

    return predict
