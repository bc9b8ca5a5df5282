"""The arithmetic of guides: pooled stages, principal axes, random vectors, and which image stands for another."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from effuse.core.model import Arch, Net
from effuse.core.prelude import Given, RecipeError
from effuse.core.task import Batch


def pooled(maps: Sequence[Tensor], given: Given) -> Tensor:
    """The wanted stages of each image as one vector: channels reduced by the basis, if any, and pooled over positions.

    A mean is taken first: it is the mean of reduced positions too, since the basis is linear.
    """
    vectors: list[Tensor] = []
    for k, channels in enumerate(maps):
        if f"stage{k}" not in given:
            continue
        x = channels.float().flatten(2).transpose(1, 2)  # image, position, channel
        if "l2" not in given:
            x = x.mean(1, keepdim=True)
        if f"axes{k}" in given:
            x = (x - given[f"centre{k}"]) @ given[f"axes{k}"]
        # a root mean square, not a norm: that grows with the positions, and the stages' sizes differ
        vectors.append(x.square().mean(1).sqrt() if "l2" in given else x[:, 0])
    return torch.cat(vectors, dim=1)


def denoised(net: Net, batch: Batch, given: Given) -> Tensor:
    """The pooled stages of a denoiser, of each image with noise."""
    x = given["a"] * batch.x + given["s"] * batch.drawn["noise"]
    t = torch.zeros_like(batch.labels) + given["t"]
    more: dict[str, Any] = {"condition": batch.columns["condition"]} if "condition" in batch.columns else {}
    return pooled(net(x, t, batch.columns["labels"], give="stages", **more), given)


def recognised(net: Net, batch: Batch, given: Given) -> Tensor:
    """The features of a classifier, as one stage of one position."""
    return pooled((net(batch.x, give="features")[:, :, None, None],), given)


def features_of(arch: Arch, where: str) -> int:
    """How many features a classifier has."""
    if not arch.featured or arch.parts:
        raise RecipeError(f"{where}: {arch.name} is no classifier with features; use a resnet(...) or a cnn(...)")
    width: int = arch.hollow_net()(*arch.example(), give="features").shape[1]
    return width


def another(labels: Tensor, order: Tensor) -> Tensor:
    """For each image another one of its class, each taken once: the next of the class in that order. An only one stays."""
    chosen = torch.empty_like(order)
    for label in labels.unique():
        own = order[labels[order] == label]
        chosen[own] = own.roll(-1)
    return chosen


def largest(covariance: Tensor, width: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues as columns, the largest entry of each positive."""
    axes = torch.linalg.eigh(covariance.cpu())[1].flip(1)[:, :width]
    signs = axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    return (axes * signs).float()


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns; columns of norm one where there are more than rows."""
    drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (torch.linalg.qr(drawn)[0] if columns <= rows else F.normalize(drawn, dim=0)).float()
