"""FedPhD's arithmetic on histograms of labels: homogeneity, edge selection, aggregation weights (Long et al., 2025)."""

from collections.abc import Sequence

import numpy as np


def homogeneity(counts: np.ndarray, q_u: np.ndarray) -> np.ndarray:
    """mu = 2 - |q - q_u| (Eqs. 18, 20) of histograms along the last axis; an empty histogram counts as q_u."""
    n = counts.sum(-1, keepdims=True)
    q = np.divide(counts, n, out=np.broadcast_to(q_u, counts.shape).copy(), where=n > 0)
    return 2 - np.linalg.norm(q - q_u, axis=-1)


def edge_probabilities(
    own: np.ndarray, edges: np.ndarray, a: float, b: float, q_u: np.ndarray, scale: float = 1.0
) -> np.ndarray:
    """P_n(e) of Eq. 25, for one client or several: ReLU(a mu'_e - n'_e + b), normalised; uniform where all are zero.

    A prime denotes the edge's value with the client's own images added.
    """
    joined = edges + own[..., None, :]
    numerators = np.maximum(0.0, a * homogeneity(joined, q_u) - joined.sum(-1) / scale + b)
    total = numerators.sum(-1, keepdims=True)
    return np.divide(numerators, total, out=np.full(numerators.shape, 1 / len(edges)), where=total > 0)


def aggregation_weight(counts: Sequence[float], a: float, b: float, q_u: np.ndarray, scale: float = 1.0) -> float:
    """ReLU(n + a mu + b) of one client or edge (Eqs. 21 and 23)."""
    mu = float(homogeneity(np.array(counts), q_u))
    return max(0.0, sum(counts) / scale + a * mu + b)
