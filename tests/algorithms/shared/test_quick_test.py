"""QuickTest's decisions, and the leading components of its reference. Its scores in runs: test_fedddpm.py."""

import pytest
import torch

from effuse.algorithms.shared.quick_test import QuickTest, leading
from effuse.metrics.distances import frechet, moments


def test_quick_test_traces():
    """gamma .4, threshold .2: 10 is stored; 9 gives 9.6; 9.5 is within .2 of it and leaves it."""
    test = QuickTest(gamma=0.4, threshold=0.2)
    assert test.judge(None, 10.0) == (False, 10.0)
    assert test.judge(10.0, 9.0) == (False, pytest.approx(9.6))
    assert test.judge(9.6, 9.5) == (True, 9.6)
    assert test.judge(9.6, 9.75) == (True, 9.6) and test.judge(9.6, 9.81)[0] is False
    # at the threshold itself, in exact floats
    assert QuickTest(threshold=0.25).judge(10.0, 9.75) == QuickTest(threshold=0.25).judge(10.0, 10.25) == (True, 10.0)


def test_all_leading_components_leave_the_distance_alone():
    x, y = torch.randn(50, 5, dtype=torch.float64), 1 + 2 * torch.randn(60, 5, dtype=torch.float64)
    plain = frechet(moments(x), moments(y))
    for components, same in ((None, True), (5, True), (2, False)):
        basis, reference = leading(y, components)
        assert basis.shape == (5, components or 5)
        assert (frechet(moments(x @ basis), reference) == pytest.approx(plain)) == same


def test_a_leading_component_is_where_the_reference_varies_most():
    """Four points, at 1 and -1 on one axis, 3 and -3 on the other: variances 2/3 and 18/3, so the second axis leads."""
    y = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]], dtype=torch.float64)
    basis, reference = leading(y, 1)
    assert basis.abs().flatten().tolist() == pytest.approx([0.0, 1.0]) and reference.covariance.item() == pytest.approx(6.0)
