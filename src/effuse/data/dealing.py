"""The base of partitions that deal images to clients: the units to deal, their random generator, and common checks."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from effuse.core.data import Dataset, Partition
from effuse.core.errors import PartitionError

# Partitions use only the methods that both classes have.
Random: TypeAlias = np.random.RandomState | np.random.Generator


@dataclasses.dataclass(frozen=True)
class Units:
    """The units that are dealt: single images or, by group, all images of a group such as a patient."""

    owner: np.ndarray  # the unit of each image
    labels: np.ndarray  # the most frequent label of each unit; the lowest on a tie
    sizes: np.ndarray  # the number of images of each unit
    domains: np.ndarray | None
    classes: int

    @classmethod
    def of(cls, dataset: Dataset, by_group: bool) -> "Units":
        """The images of a data set, or its groups."""
        labels, classes = _array(dataset.labels), len(dataset.classes)
        domains = None if dataset.domains is None else _array(dataset.domains)
        if not by_group:
            return cls(np.arange(len(labels)), labels, np.ones(len(labels), np.int64), domains, classes)
        if dataset.groups is None:
            raise PartitionError("by_group=True, but the data has no groups; name them in the source or set by_group=False")
        _, owner = np.unique(_array(dataset.groups), return_inverse=True)
        majority = _majority(owner, labels, classes)
        if domains is not None:
            domains = _majority(owner, domains, int(domains.max()) + 1)
        return cls(owner, majority, np.bincount(owner), domains, classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> int:
        return len(self.owner)

    def of_class(self, label: int) -> np.ndarray:
        return np.flatnonzero(self.labels == label)

    def held(self, dealt: Sequence[np.ndarray]) -> np.ndarray:
        """The number of images in each client's units."""
        return np.array([self.sizes[hand].sum() for hand in dealt], np.int64)

    def cut(self, members: np.ndarray, shares: np.ndarray, exactly: bool = True) -> list[np.ndarray]:
        """Cut a row of units at floor(cumsum(shares) * images); `exactly` corrects rounding errors of the sum."""
        running = np.cumsum(self.sizes[members])
        total = running[-1] if len(running) else 0
        marks = np.floor(np.cumsum(shares) * total + exactly * 1e-9)[:-1]  # eight times 0.1 is 0.7999999999999999
        return np.split(members, np.searchsorted(running, marks, side="right"))

    def rows(self, dealt: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sorted image numbers of each client's units."""
        client = np.full(len(self), -1)
        for k, hand in enumerate(dealt):
            client[hand] = k
        return [np.flatnonzero(client[self.owner] == k) for k in range(len(dealt))]


class Dealing(Partition, ABC):
    """A partition that deals units to clients; a subclass implements `deal`."""

    @abstractmethod
    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        """Unit numbers for each client, disjoint."""

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        units = Units.of(dataset, self.by_group)
        if not 1 <= clients <= len(units):
            what = "groups" if self.by_group else "images"
            raise PartitionError(f"{self}: {len(units)} {what} cannot be dealt to {clients} clients; lower clients")
        dealt = self.deal(units, clients, generator(self, seed))
        empty = np.flatnonzero(units.held(dealt) == 0)
        if len(empty):
            raise PartitionError(f"{self}: client {empty[0]} of {clients} would have no data; lower clients or add data")
        return units.rows(dealt)


def generator(partition: Partition, seed: int) -> Random:
    """A new generator; the partition's own seed takes precedence over the one derived from the run's."""
    seed = seed if partition.seed is None else partition.seed
    if seed < 0:
        raise PartitionError(f"{partition}: seed {seed} is negative; use 0 or more")
    if partition.legacy:
        return np.random.RandomState(seed % 2**32)  # the legacy generator takes 32 bits
    return np.random.Generator(np.random.PCG64(seed))


def _majority(owner: np.ndarray, values: np.ndarray, kinds: int) -> np.ndarray:
    table = np.zeros((int(owner.max()) + 1, kinds), np.int64)
    np.add.at(table, (owner, values), 1)
    return table.argmax(axis=1)


def _array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
