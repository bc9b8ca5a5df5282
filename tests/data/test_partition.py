"""Partitions: every rule on hand-made data, and properties of all of them over many seeds."""

import dataclasses

import numpy as np
import pytest
import torch

from effuse.core.build import build_text
from effuse.core.data import Dataset, Partition
from effuse.core.errors import PartitionError, RecipeError
from effuse.core.spec import text
from effuse.data.dirichlet import LabelSkew, QuantitySkew
from effuse.data.partition import NID2, Classes, Domains, Iid, LongTail, Shards
from effuse.data.sources import Labels, Union

MNIST_SIZES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
SMALL = Labels(sizes=(30, 40, 50, 60)).load("train")
TWO_DOMAINS = Union(sources=(Labels(sizes=(30, 30)), Labels(sizes=(50, 50)))).load("train")
COMPLETE = [
    Iid(),
    LabelSkew(beta=0.5, minimum=1),
    LabelSkew(beta=0.5, mask=True, minimum=1),
    LabelSkew(beta=0.01, minimum=3, top_up=True),
    QuantitySkew(beta=0.5, minimum=1),
    Shards(per_client=2),
    Classes(per_client=2),
    NID2(biased=3),
]


def grouped(dataset: Dataset, size: int) -> Dataset:
    """Every `size` consecutive images belong to one patient."""
    return dataclasses.replace(dataset, groups=torch.arange(len(dataset)) // size)


def labels_of(dataset: Dataset, part: np.ndarray) -> set[int]:
    return set(dataset.labels[torch.from_numpy(part)].tolist())


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("partition", COMPLETE, ids=str)
def test_every_image_goes_to_exactly_one_client_and_none_is_empty(partition: Partition, legacy: bool):
    partition = dataclasses.replace(partition, legacy=legacy)
    for seed in range(25):
        for clients in (4, 5):
            parts = partition.split(SMALL, clients, seed)
            assert len(parts) == clients and min(len(part) for part in parts) > 0
            assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(180))


@pytest.mark.parametrize("partition", COMPLETE, ids=str)
def test_by_group_no_patient_straddles_two_clients(partition: Partition):
    """180 images of 60 patients; a patient with two classes counts for the more frequent one."""
    dataset = grouped(SMALL, 3)
    partition = dataclasses.replace(partition, by_group=True)
    for seed in range(10):
        parts = partition.split(dataset, 4, seed)
        patients = [set((part // 3).tolist()) for part in parts]
        assert sum(len(p) for p in patients) == 60 == len(set.union(*patients))
        assert sum(len(part) for part in parts) == 180 and min(len(part) for part in parts) > 0


@pytest.mark.parametrize("partition", [*COMPLETE, LongTail(rho=2), Domains(per_domain=(4,))], ids=str)
def test_by_group_without_groups_is_refused(partition: Partition):
    with pytest.raises(PartitionError, match="the data has no groups"):
        dataclasses.replace(partition, by_group=True).split(SMALL, 4, seed=0)


@pytest.mark.parametrize("partition", [*COMPLETE, LongTail(rho=2, then=Shards())], ids=str)
def test_the_same_seed_deals_the_same_and_another_does_not(partition: Partition):
    once, again, other = (partition.split(SMALL, 4, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again))
    assert not all(np.array_equal(a, b) for a, b in zip(once, other))


def test_more_clients_than_images_is_refused():
    with pytest.raises(PartitionError, match="2 images cannot be dealt to 3 clients; lower clients"):
        Iid().split(Labels(sizes=(1, 1)).load("train"), 3, seed=0)


def test_more_clients_than_patients_is_refused():
    with pytest.raises(PartitionError, match="2 groups cannot be dealt to 3 clients"):
        Iid(by_group=True).split(grouped(Labels(sizes=(4, 4)).load("train"), 4), 3, seed=0)


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(len(part) for part in Iid().split(SMALL, 7, seed=0)) == [25, 25, 26, 26, 26, 26, 26]


def test_iid_by_group_balances_images_not_groups():
    """A patient with 6 images and six with 1, two clients: each unit goes to the smaller one, at worst 6+3 against 3."""
    dataset = Labels(sizes=(12,)).load("train")
    dataset = dataclasses.replace(dataset, groups=torch.tensor([0] * 6 + [1, 2, 3, 4, 5, 6]))
    for seed in range(20):
        sizes = sorted(len(part) for part in Iid(by_group=True).split(dataset, 2, seed))
        assert sizes in ([3, 9], [4, 8], [5, 7], [6, 6])


@pytest.mark.parametrize("sizes, each, most_labels", [(MNIST_SIZES, 600, 4), ((5000,) * 10, 500, 2)])
def test_shards_of_fedddpm(sizes: tuple[int, ...], each: int, most_labels: int):
    """100 clients, 200 shards: of 300 images on MNIST, which may have two labels; of 250 on CIFAR-10, which divides 5000."""
    dataset = Labels(sizes=sizes).load("train")
    for seed in range(3):
        parts = Shards(per_client=2).split(dataset, 100, seed)
        assert {len(part) for part in parts} == {each}
        assert max(len(labels_of(dataset, part)) for part in parts) <= most_labels


def test_shards_are_whole_runs_of_the_sorted_labels():
    """Eight images of two classes, two clients of two shards of two images."""
    dataset = Labels(sizes=(4, 4)).load("train")
    runs = {(0, 1), (2, 3), (4, 5), (6, 7)}
    for seed in range(5):
        parts = Shards(per_client=2).split(dataset, 2, seed)
        assert {tuple(half) for part in parts for half in part.reshape(2, 2).tolist()} == runs


def test_too_many_shards_are_refused():
    with pytest.raises(PartitionError, match="lower per_client or clients"):
        Shards(per_client=100).split(SMALL, 4, seed=0)


@pytest.mark.parametrize("clients, per_client", [(5, 2), (20, 2), (7, 3), (3, 10)])
def test_classes_gives_exactly_that_many_and_leaves_none_out(clients: int, per_client: int):
    dataset = Labels(sizes=(100,) * 10).load("train")
    for seed in range(10):
        held = [labels_of(dataset, part) for part in Classes(per_client=per_client).split(dataset, clients, seed)]
        assert {len(h) for h in held} == {per_client} and set.union(*held) == set(range(10))
        holders = [sum(label in h for h in held) for label in range(10)]
        assert max(holders) - min(holders) <= 1


@pytest.mark.parametrize("per_client", [1, 5])
def test_classes_that_do_not_fit_name_a_value_that_does(per_client: int):
    with pytest.raises(PartitionError, match="choose per_client from 2 to 4"):
        Classes(per_client=per_client).split(SMALL, 2, seed=0)


def test_nid2_has_six_clients_of_one_class_and_one_of_all():
    """CIFAR-10 sizes, 7 clients: a biased client has half of its class; the last has six halves and four classes: 35,000."""
    dataset = Labels(sizes=(5000,) * 10).load("train")
    parts = NID2().split(dataset, 7, seed=0)
    held = [labels_of(dataset, part) for part in parts]
    assert [len(h) for h in held] == [1] * 6 + [10] and len(set.union(*held[:6])) == 6
    assert [len(part) for part in parts] == [2500] * 6 + [35000]


def test_nid2_adds_unbiased_clients_and_needs_one():
    dataset = Labels(sizes=(60,) * 10).load("train")
    assert [len(labels_of(dataset, part)) for part in NID2().split(dataset, 10, seed=0)] == [1] * 6 + [10] * 4
    with pytest.raises(PartitionError, match="use at least 7, or lower biased"):
        NID2().split(dataset, 6, seed=0)


def test_nid2_of_equal_sizes():
    """CIFAR-10, 7 clients: a class of 5,000 with a biased holder gives it 10 m and the unbiased client m, so m = 454.

    Every client has 4,540 images; 31,780 of 50,000 are used, and four classes are at one client only, 454 images each.
    """
    dataset = Labels(sizes=(5000,) * 10).load("train")
    parts = NID2(sizes="equal").split(dataset, 7, seed=0)
    assert [len(part) for part in parts] == [4540] * 7 and len(np.unique(np.concatenate(parts))) == 31_780
    held = [labels_of(dataset, part) for part in parts]
    assert [len(h) for h in held] == [1] * 6 + [10] and len(set.union(*held[:6])) == 6
    assert dataset.histogram(torch.from_numpy(parts[6])) == [454] * 10


def test_nid2_of_equal_sizes_with_more_unbiased_clients():
    """Ten clients, sixty images a class: four unbiased ones, m = 60 // (10 + 4) = 4, so every client has 40 images."""
    dataset = Labels(sizes=(60,) * 10).load("train")
    parts = NID2(sizes="equal").split(dataset, 10, seed=0)
    assert [len(part) for part in parts] == [40] * 10 and len(np.unique(np.concatenate(parts))) == 400
    with pytest.raises(PartitionError, match="too few images for equal sizes"):
        NID2(sizes="equal").split(Labels(sizes=(10,) * 10).load("train"), 7, seed=0)


def test_two_biased_clients_of_one_class_have_different_images():
    """Three biased clients of two classes: two of one class, so m = 30 // (2 * 2 + 1) = 6, and all have 12 images."""
    dataset = Labels(sizes=(30, 30)).load("train")
    parts = NID2(biased=3, sizes="equal").split(dataset, 4, seed=0)
    assert [len(part) for part in parts] == [12] * 4 and len(np.unique(np.concatenate(parts))) == 48


def test_long_tail_counts_of_cifar10():
    dataset = Labels(sizes=(5000,) * 10).load("train")
    parts = LongTail(rho=10).split(dataset, 4, seed=0)
    kept = np.concatenate(parts)
    assert dataset.histogram(torch.from_numpy(kept)) == [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]
    assert len(kept) == len(np.unique(kept)) == 20431


def test_long_tail_applies_another_partition():
    dataset = Labels(sizes=(100,) * 4).load("train")
    parts = LongTail(rho=10, then=Classes(per_client=1)).split(dataset, 4, seed=0)
    assert sorted(len(part) for part in parts) == [10, 21, 46, 100]  # 100 * 10 ** (-j / 3)
    assert all(len(labels_of(dataset, part)) == 1 for part in parts)


def test_long_tail_by_group_reaches_the_inner_partition():
    dataset = grouped(Labels(sizes=(60, 60)).load("train"), 4)
    parts = LongTail(rho=3, by_group=True).split(dataset, 3, seed=0)
    patients = [set((part // 4).tolist()) for part in parts]
    assert sum(len(p) for p in patients) == len(set.union(*patients))


def test_long_tail_keeps_a_class_that_is_smaller_than_its_count():
    assert LongTail(rho=2).counts([100, 30, 100]) == [100, 30, 50]
    assert LongTail(rho=1e6).counts([10, 10]) == [10, 1]
    assert LongTail(rho=5).counts([10]) == [10]


def test_domains_gives_every_client_one_domain():
    parts = Domains(per_domain=(1, 2)).split(TWO_DOMAINS, 3, seed=0)
    assert [len(part) for part in parts] == [60, 50, 50]
    assert [set(TWO_DOMAINS.domains[torch.from_numpy(part)].tolist()) for part in parts] == [{0}, {1}, {1}]


def test_domains_with_a_fraction_takes_that_much_per_client():
    """A tenth of 60 and of 100 images; ten tenths are a whole domain."""
    assert [len(part) for part in Domains(per_domain=(1, 3), fraction=0.1).split(TWO_DOMAINS, 4, 0)] == [6, 10, 10, 10]
    parts = Domains(per_domain=(10, 10), fraction=0.1).split(TWO_DOMAINS, 20, 0)
    assert [len(part) for part in parts] == [6] * 10 + [10] * 10 and len(np.unique(np.concatenate(parts))) == 160


def test_domains_by_group_keeps_patients_whole():
    parts = Domains(per_domain=(2, 2), by_group=True).split(grouped(TWO_DOMAINS, 5), 4, seed=0)
    patients = [set((part // 5).tolist()) for part in parts]
    assert sum(len(p) for p in patients) == 32 == len(set.union(*patients))


@pytest.mark.parametrize(
    "per_domain, fraction, message",
    [
        ((1, 1, 1), None, "2 entries that add up to clients=3"),
        ((1, 1), None, "2 entries that add up to clients=3"),
        ((1, 2), 0.6, "use 0.5 or less"),
    ],
)
def test_domains_that_do_not_fit_are_refused(per_domain: tuple[int, ...], fraction: float | None, message: str):
    with pytest.raises(PartitionError, match=message):
        Domains(per_domain=per_domain, fraction=fraction).split(TWO_DOMAINS, 3, seed=0)


def test_domains_needs_domains():
    with pytest.raises(PartitionError, match="use union"):
        Domains(per_domain=(4,)).split(SMALL, 4, seed=0)


def test_partitions_print_and_parse_in_the_grammar():
    source = "long_tail(rho=10.0, then=label_skew(legacy=True, beta=0.5, mask=True))"
    partition = build_text(source, Partition, "partition")
    assert str(partition) == source
    assert build_text(text(partition), Partition, "partition") == partition


@pytest.mark.parametrize("source", ["label_skew(beta=0)", "shards(per_client=0)", "long_tail(rho=0.5)"])
def test_values_out_of_range_are_refused_when_parsed(source: str):
    with pytest.raises(RecipeError):
        build_text(source, Partition, "partition")
