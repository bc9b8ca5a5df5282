"""The formulas, by hand where that is possible and against torchmetrics otherwise."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import poly_mmd

from effuse.metrics import distances
from effuse.metrics.distances import (
    Moments,
    frechet,
    inception_scores,
    kernel_distance,
    mean_pairwise,
    moments,
    precision_recall,
)


class Features(nn.Module):
    """Makes torchmetrics accept features in place of images."""

    num_features = 6

    def forward(self, x: Tensor) -> Tensor:
        return x


def clouds(n: int, m: int, dim: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(dim, dim, generator=g)
    return torch.randn(n, dim, generator=g) @ mix, torch.randn(m, dim, generator=g) + 0.5


def test_frechet_of_diagonal_gaussians() -> None:
    """Means (0,0) and (3,4): 25. Variances (1,4) and (9,16): (1-3)^2 + (2-4)^2 = 8. Together 33."""
    a = Moments(torch.zeros(2).double(), torch.diag(torch.tensor([1.0, 4.0])).double())
    b = Moments(torch.tensor([3.0, 4.0]).double(), torch.diag(torch.tensor([9.0, 16.0])).double())
    assert frechet(a, b) == pytest.approx(33.0, abs=1e-12)


def test_frechet_of_features_with_known_moments() -> None:
    """Corners of a square of side 2 have variance 4/3 per axis; scaled by 2 and moved by (1,0): 1 + 2 * (4/3) * (2-1)^2."""
    square = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    moved = 2 * square + torch.tensor([1.0, 0.0])
    assert frechet(moments(square), moments(moved)) == pytest.approx(1 + 8 / 3, abs=1e-12)


def test_frechet_of_correlated_gaussians() -> None:
    """Rotating both Gaussians of the diagonal case by one angle changes nothing."""
    c, s = math.cos(0.7), math.sin(0.7)
    turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    a, b = (Moments(zero, turn @ torch.diag(torch.tensor(v).double()) @ turn.T) for v in ([1.0, 4.0], [9.0, 16.0]))
    assert frechet(a, b) == pytest.approx(8.0, abs=1e-10)


def test_frechet_agrees_with_torchmetrics() -> None:
    x, y = clouds(50, 70)
    oracle = FrechetInceptionDistance(feature=Features()).set_dtype(torch.float64)
    oracle.update(x, real=False)
    oracle.update(y, real=True)
    # torchmetrics returns float32
    assert frechet(moments(x), moments(y)) == pytest.approx(float(oracle.compute()), rel=1e-6)


def test_frechet_with_fewer_samples_than_dimensions() -> None:
    """Both covariances are singular: still real, zero on itself, and |a|^2 under a shift by a."""
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    assert frechet(moments(x), moments(x)) == pytest.approx(0.0, abs=1e-5)
    assert frechet(moments(x), moments(x + 1.0)) == pytest.approx(40.0, abs=1e-4)


def test_a_solver_that_fails_is_replaced_by_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's solver may fail on a singular covariance. Here every first call fails."""
    x, y = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0))
    wanted = frechet(moments(x), moments(y))
    for name in ("eigh", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, _failing_once(getattr(torch.linalg, name)))
    assert frechet(moments(x), moments(y)) == wanted


def _failing_once(solver: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    tries = []

    def solve(matrix: Tensor) -> Any:
        tries.append(matrix)
        if len(tries) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return solver(matrix)

    return solve


def test_kernel_distance_by_hand() -> None:
    """One dimension, k(a,b) = (ab+1)^3. x = {0,1}: 1. y = {1,2}: 27. Across: 1, 1, 8, 27, mean 37/4. 1 + 27 - 37/2."""
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    assert kernel_distance(x, y) == pytest.approx(9.5, abs=1e-12)


def test_kernel_distance_of_unequal_sets_by_hand() -> None:
    """x = {0,1}: 1. y = {1,1,2}: pairs 8, 27, 27, mean 62/3. Across: 1,1,1,8,8,27, mean 46/6. 1 + 62/3 - 46/3 = 19/3."""
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [1.0], [2.0]])
    assert kernel_distance(x, y) == pytest.approx(19 / 3, abs=1e-12)


def test_kernel_distance_agrees_with_torchmetrics_and_ignores_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clouds(30, 30)
    expected = float(poly_mmd(y.double(), x.double()))
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-10)
    monkeypatch.setattr(distances, "BLOCK", 7)
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-10)


def test_precision_and_recall_of_hand_made_clusters() -> None:
    """Real: 0,1,2,3 and 100,101,102,103. Generated: seven at the first cluster, one far off: precision 7/8, recall 1/2."""
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0], [101.0], [102.0], [103.0]])
    made = torch.tensor([[0.1], [0.9], [1.2], [1.9], [2.1], [2.8], [3.1], [50.0]])
    precision, recall = precision_recall(made, real, k=3)
    assert precision == 7 / 8
    # the outlier's ball reaches from 2.1 to 97.9: it covers only 3, which others cover, too
    assert recall == 4 / 8


def test_precision_and_recall_of_equal_and_of_distant_sets() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    assert precision_recall(x, x, k=3) == (1.0, 1.0)
    assert precision_recall(x, x + 1000.0, k=3) == (0.0, 0.0)


def test_inception_score_is_the_number_of_classes_at_best() -> None:
    certain = torch.eye(5).repeat(4, 1) * 1000.0
    assert inception_scores(certain, 1).tolist() == pytest.approx([5.0], abs=1e-9)
    assert inception_scores(torch.zeros(20, 5), 2).tolist() == pytest.approx([1.0, 1.0], abs=1e-9)


def test_inception_score_agrees_with_torchmetrics() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its memory, and of the spread of a single split
        oracle = InceptionScore(feature=Features(), splits=1)
        oracle.update(logits)
        expected = float(oracle.compute()[0])
    assert float(inception_scores(logits, 1)) == pytest.approx(expected, rel=1e-5)


def test_mean_pairwise_by_hand() -> None:
    """A triangle of sides 3, 4 and 5."""
    assert mean_pairwise(torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])) == pytest.approx(4.0, abs=1e-12)
