"""Dirichlet partitions: equal to the published splits, and correct in extreme cases."""

import numpy as np
import pytest
import torch

from effuse.core.data import Dataset
from effuse.core.errors import PartitionError
from effuse.data.dirichlet import LabelSkew, QuantitySkew, draw_shares
from effuse.data.sources import Labels

FASHION = Labels(sizes=(6000,) * 10).load("train")


def histograms(dataset: Dataset, parts: list[np.ndarray]) -> list[list[int]]:
    return [dataset.histogram(torch.from_numpy(part)) for part in parts]


def test_label_skew_gives_feddiffuse_published_matrix():
    parts = LabelSkew(beta=0.5, mask=True, legacy=True, seed=2023).split(FASHION, 5, seed=0)
    assert histograms(FASHION, parts) == [
        [4888, 1316, 378, 936, 146, 1177, 96, 2944, 1565, 0],
        [1, 259, 225, 244, 2378, 72, 44, 919, 728, 3043],
        [243, 121, 2622, 4584, 1010, 2481, 3, 1293, 0, 0],
        [2, 3979, 1959, 149, 0, 2265, 5484, 0, 0, 0],
        [866, 325, 816, 87, 2466, 5, 373, 844, 3707, 2957],
    ]
    assert [len(part) for part in parts] == [13446, 7913, 12357, 13838, 12446]


def test_label_skew_depends_on_class_sizes_not_on_positions():
    """Labels in another order give the same histograms, because only counts and draws matter."""
    order = torch.randperm(60000, generator=torch.Generator().manual_seed(0))
    shuffled = Dataset(images=FASHION.images, labels=FASHION.labels[order], classes=FASHION.classes)
    skew = LabelSkew(beta=0.5, mask=True, legacy=True, seed=2023)
    assert histograms(shuffled, skew.split(shuffled, 5, 0)) == histograms(FASHION, skew.split(FASHION, 5, 0))


def test_quantity_skew_gives_feddiffuse_published_sizes():
    parts = QuantitySkew(beta=0.5, legacy=True, seed=2023).split(FASHION, 5, seed=0)
    assert [len(part) for part in parts] == [529, 13, 46087, 11898, 1473]


def published(sizes: list[int], clients: int, beta: float, seed: int) -> list[int]:
    """The clients' sizes by the published code, reimplemented.

    Where a masked row of shares sums to 0.9999999999999999, its floor leaves an image to the next client.
    """
    rng, held, total = np.random.RandomState(seed), np.zeros(clients, int), sum(sizes)
    while held.min() < 10:
        held = np.zeros(clients, int)
        for size in sizes:
            rng.shuffle(np.arange(size))
            shares = rng.dirichlet(np.repeat(beta, clients)) * (held < total / clients)
            marks = (np.cumsum(shares / shares.sum()) * size).astype(int)[:-1]
            held += np.diff(np.concatenate([[0], marks, [size]]))
    return held.tolist()


def test_legacy_sizes_are_the_published_ones_to_the_image():
    for seed in range(40):
        parts = LabelSkew(beta=0.5, mask=True, legacy=True, seed=seed).split(FASHION, 10, seed=0)
        assert [len(part) for part in parts] == published([6000] * 10, 10, 0.5, seed), seed


def test_the_legacy_generator_is_private():
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    LabelSkew(beta=0.5, legacy=True).split(FASHION, 5, seed=1)
    assert (np.random.get_state()[1] == before).all()


def test_the_partitions_own_seed_precedes_the_runs():
    fixed = LabelSkew(beta=0.5, seed=3)
    assert histograms(FASHION, fixed.split(FASHION, 5, 0)) == histograms(FASHION, fixed.split(FASHION, 5, 1))
    free = LabelSkew(beta=0.5)
    assert histograms(FASHION, free.split(FASHION, 5, 0)) != histograms(FASHION, free.split(FASHION, 5, 1))


def test_a_derived_seed_of_63_bits_suits_both_generators():
    for legacy in (False, True):
        assert len(LabelSkew(beta=1.0, legacy=legacy).split(FASHION, 3, seed=2**62 + 1)) == 3


def test_a_negative_seed_is_refused():
    with pytest.raises(PartitionError, match="seed -1 is negative"):
        LabelSkew(beta=1.0, seed=-1).split(FASHION, 3, seed=0)


def test_the_mask_stops_clients_that_hold_an_equal_share():
    """N/K = 30: a client is masked for later classes once it has 30, so none can exceed 29 + one class of 10 = 39."""
    dataset = Labels(sizes=(10,) * 9).load("train")
    for seed in range(20):
        parts = LabelSkew(beta=0.3, mask=True, minimum=1).split(dataset, 3, seed)
        assert max(len(part) for part in parts) <= 39


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("beta", [1e-8, 1e-4, 1e-2])
def test_tiny_beta_gives_shares_and_never_nan(beta: float, legacy: bool):
    rng = np.random.RandomState(0) if legacy else np.random.default_rng(0)
    for _ in range(200):
        shares = draw_shares(rng, beta, 5)
        assert np.isfinite(shares).all() and shares.min() >= 0
        assert shares.sum() == pytest.approx(1)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_tiny_beta_ends_in_an_error_that_names_the_bounds(legacy: bool, mask: bool):
    dataset = Labels(sizes=(30, 30)).load("train")
    with pytest.raises(PartitionError, match="lower minimum or clients, raise beta or tries, or set top_up=True"):
        LabelSkew(beta=1e-8, mask=mask, legacy=legacy, tries=20).split(dataset, 5, seed=0)
    with pytest.raises(PartitionError, match="lower minimum or clients, or raise beta or tries"):
        QuantitySkew(beta=1e-8, legacy=legacy, tries=20).split(dataset, 5, seed=0)


@pytest.mark.parametrize("legacy", [False, True])
def test_top_up_keeps_the_draw_and_fills_small_clients(legacy: bool):
    """Two classes of 100 go to one client each; with six clients and minimum 10, four are topped up to exactly 10."""
    dataset = Labels(sizes=(100, 100)).load("train")
    for seed in range(10):
        parts = LabelSkew(beta=1e-8, top_up=True, legacy=legacy).split(dataset, 6, seed)
        sizes = sorted(len(part) for part in parts)
        assert sum(sizes) == 200 and sizes[:4] == [10, 10, 10, 10]
        assert len(np.unique(np.concatenate(parts))) == 200


def test_a_minimum_that_the_data_cannot_give_is_refused_at_once():
    dataset = Labels(sizes=(20, 20)).load("train")
    for partition in (LabelSkew(beta=1.0, tries=10**9), QuantitySkew(beta=1.0, tries=10**9)):
        with pytest.raises(PartitionError, match="40 images cannot give 5 clients minimum=10 each"):
            partition.split(dataset, 5, seed=0)
