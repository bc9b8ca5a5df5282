"""The formulas of the fidelity metrics, in float64, on features and probabilities.

The tests compare them with torchmetrics. That library takes no cached reference moments, needs sets of equal size for KID,
and shuffles with torch's global generator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effuse.core.rng import Stream

BLOCK = 2000  # rows compared at a time, so that memory grows linearly with the set


class Moments(NamedTuple):
    """The Gaussian that a Fréchet distance compares."""

    mean: Tensor
    covariance: Tensor


def moments(features: Tensor) -> Moments:
    """Mean and unbiased covariance."""
    x = features.double()
    mean = x.mean(dim=0)
    centred = x - mean
    return Moments(mean, centred.T @ centred / (len(x) - 1))


def frechet(a: Moments, b: Moments) -> float:
    """Squared Fréchet distance of two Gaussians.

    The trace of sqrt(A B) is that of sqrt(sqrt(A) B sqrt(A)): symmetric, so its eigenvalues are real at any sample size.
    """
    values, vectors = solved(torch.linalg.eigh, a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    inner = root @ b.covariance @ root
    (spectrum,) = solved(torch.linalg.eigvalsh, (inner + inner.T) / 2)
    cross = spectrum.clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross
    return max(0.0, float(distance))  # rounding may give a tiny negative value


def solved(solver: Callable[[Tensor], Any], matrix: Tensor) -> tuple[Tensor, ...]:
    """A solver's result for a matrix. A GPU's may fail on a singular one, and then a CPU's is used."""
    try:
        found = solver(matrix)
    except torch.linalg.LinAlgError:
        found = solver(matrix.cpu())
    return tuple(t.to(matrix.device) for t in ((found,) if isinstance(found, Tensor) else found))


def kernel_distance(x: Tensor, y: Tensor) -> float:
    """The unbiased squared MMD under the cubic kernel (x.y / dim + 1)^3, over all pairs."""
    x, y = x.double(), y.double()
    within_x = _kernel_sum(x, x) - float(_cubic((x * x).sum(dim=1), x.shape[1]).sum())
    within_y = _kernel_sum(y, y) - float(_cubic((y * y).sum(dim=1), y.shape[1]).sum())
    n, m = len(x), len(y)
    return within_x / (n * (n - 1)) + within_y / (m * (m - 1)) - 2 * _kernel_sum(x, y) / (n * m)


def _cubic(product: Tensor, dim: int) -> Tensor:
    return (product / dim + 1.0) ** 3


def _kernel_sum(x: Tensor, y: Tensor) -> float:
    return sum(float(_cubic(some @ y.T, x.shape[1]).sum()) for some in x.split(BLOCK))


def precision_recall(generated: Tensor, real: Tensor, k: int) -> tuple[float, float]:
    """Improved precision and recall: the share of each set that lies within a k-nearest-neighbour ball of the other."""
    x, y = generated.double(), real.double()
    return _covered(x, y, _radii(y, k)), _covered(y, x, _radii(x, k))


def _distances(x: Tensor, y: Tensor) -> Tensor:
    # by a matrix product in float64: accurate enough, and much faster than pair by pair
    squares = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1) - 2 * (x @ y.T)
    return squares.clamp(min=0).sqrt()


def _radii(x: Tensor, k: int) -> Tensor:
    # the nearest neighbour of a point is itself
    return torch.cat([_distances(some, x).kthvalue(k + 1, dim=1).values for some in x.split(BLOCK)])


def _covered(x: Tensor, centres: Tensor, radii: Tensor) -> float:
    inside = [(_distances(some, centres) <= radii).any(dim=1) for some in x.split(BLOCK)]
    return float(torch.cat(inside).double().mean())


def inception_scores(logits: Tensor, splits: int) -> Tensor:
    """exp of the mean divergence of p(y|x) from p(y), for each split of the images."""
    # conditional samples are ordered by class; shuffled, every split has all classes
    order = torch.from_numpy(Stream(("inception score",)).numpy().permutation(len(logits)))
    log_p = logits[order].double().log_softmax(dim=1)
    scores = []
    for some in log_p.tensor_split(splits):
        marginal = some.exp().mean(dim=0)
        divergence = (some.exp() * some).sum(dim=1).mean() - torch.special.xlogy(marginal, marginal).sum()
        scores.append(divergence.exp())
    return torch.stack(scores)


def mean_pairwise(x: Tensor) -> float:
    """The mean Euclidean distance over all pairs of different rows."""
    x = x.double()
    total = sum(float(_distances(some, x).sum()) for some in x.split(BLOCK))
    return total / (len(x) * (len(x) - 1))
