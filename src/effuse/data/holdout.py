"""A fixed test split for data without one. It is not random: every run and site holds out the same images."""

import numpy as np


def held_out(labels: np.ndarray, fraction: float, groups: np.ndarray | None = None) -> np.ndarray:
    """A mask of the test images: in every class each 1/fraction-th in order, or whole groups if there are groups."""
    if groups is not None:
        names, number = np.unique(groups, return_inverse=True)
        return _every(len(names), fraction)[number.reshape(-1)]  # a patient in both splits would bias every test
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        test[members] = _every(len(members), fraction)
    return test


def _every(count: int, fraction: float) -> np.ndarray:
    """For 0.2 the 5th, 10th, ... of `count` things."""
    marks = np.floor(np.arange(count + 1) * fraction + 1e-9)
    return np.diff(marks) > 0
