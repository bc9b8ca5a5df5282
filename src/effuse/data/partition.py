"""Partitions without Dirichlet draws: even, sorted shards, few classes, biased clients, domains, long tails."""

import dataclasses
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from effuse.core.build import with_values
from effuse.core.data import Dataset, Partition
from effuse.core.errors import PartitionError
from effuse.core.spec import spec
from effuse.data.dealing import Dealing, Random, Units, generator

Count = Annotated[int, Field(ge=1)]


@spec
class Iid(Dealing):
    """Shuffle the images and deal them evenly."""

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        return deal_evenly(units, np.arange(len(units)), clients, rng)


@spec
class Shards(Dealing):
    """Sort by label, cut into equal shards, give every client the same number of them (McMahan et al., 2017)."""

    per_client: Count = 2

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        count = clients * self.per_client
        if count > len(units):
            raise PartitionError(f"{self}: {len(units)} units cannot fill {count} shards; lower per_client or clients")
        shards = np.array_split(np.argsort(units.labels, kind="stable"), count)  # the first shards take the remainder
        hands = rng.permutation(count).reshape(clients, self.per_client)
        return [np.concatenate([shards[i] for i in hand]) for hand in hands]


@spec
class Classes(Dealing):
    """Every client holds exactly `per_client` classes; the clients of a class share its images evenly."""

    per_client: Count = 2

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        present = np.unique(units.labels)
        if not len(present) <= clients * self.per_client or self.per_client > len(present):
            raise PartitionError(
                f"{self}: {clients} clients of {self.per_client} classes each do not fit {len(present)} classes; "
                f"choose per_client from {-(-len(present) // clients)} to {len(present)}"
            )
        holders: list[list[int]] = [[] for _ in present]
        for client in rng.permutation(clients):
            # assign the classes with the fewest holders first, ties at random: every class gets a similar number of holders
            ties = rng.permutation(len(present))
            rarest = sorted(range(len(present)), key=lambda c: (len(holders[c]), ties[c]))
            for c in rarest[: self.per_client]:
                holders[c].append(int(client))
        return _share_classes(units, present, holders, clients, rng)


@spec
class NID2(Dealing):
    """FedDifRC's NID2: six clients hold one class each, the others all classes.

    `shared`: the holders of a class share its images evenly, so that the others hold far more. `equal`: all clients hold
    equally many, as in FedDisco's NIID-2, from which NID2 comes; the rest is left out.
    """

    biased: Count = 6  # clients with a single class
    sizes: Literal["shared", "equal"] = "shared"

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        if clients <= self.biased:
            raise PartitionError(f"{self}: {clients} clients; use at least {self.biased + 1}, or lower biased")
        present = np.unique(units.labels)
        order = rng.permutation(len(present))
        unbiased = list(range(self.biased, clients))
        holders = [list(unbiased) for _ in present]
        for client in range(self.biased):
            holders[order[client % len(order)]].append(client)
        if self.sizes == "shared":
            return _share_classes(units, present, holders, clients, rng)
        return self._equally(units, present, holders, clients, rng)

    def _equally(
        self, units: Units, present: np.ndarray, holders: list[list[int]], clients: int, rng: Random
    ) -> list[np.ndarray]:
        """m units of every class for each of the others, and as many of its class for each biased client."""
        shuffled = [rng.permutation(units.of_class(label)) for label in present]
        others, classes = clients - self.biased, len(present)
        # a class of n units gives m to each of the others and C m to each client that has it alone
        m = min(len(of) // (others + classes * (len(who) - others)) for of, who in zip(shuffled, holders))
        if m < 1:
            raise PartitionError(f"{self}: too few images for equal sizes; lower biased or clients, or use sizes=shared")
        hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for of, who in zip(shuffled, holders):
            counts = [m if client >= self.biased else classes * m for client in who]
            for client, piece in zip(who, np.split(of, np.cumsum(counts))):
                hands[client].append(piece)
        return [np.concatenate(hand) for hand in hands]


@spec
class Domains(Dealing):
    """Every client holds images of one domain (a source of a `union`); a domain is dealt evenly."""

    per_domain: tuple[Count, ...]  # clients of each domain, in the order of the union's sources
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None  # the share of its domain per client; None: all is dealt

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        if units.domains is None:
            raise PartitionError(f"{self}: the data has no domains; use union(sources=[...])")
        found = int(units.domains.max()) + 1
        if len(self.per_domain) != found or sum(self.per_domain) != clients:
            raise PartitionError(f"{self}: per_domain must have {found} entries that add up to clients={clients}")
        if self.fraction is not None and self.fraction * max(self.per_domain) > 1 + 1e-9:
            raise PartitionError(
                f"{self}: {max(self.per_domain)} clients cannot each hold fraction={self.fraction} of one domain; "
                f"use {1 / max(self.per_domain):.3g} or less"
            )
        dealt: list[np.ndarray] = []
        for domain, count in enumerate(self.per_domain):
            members = np.flatnonzero(units.domains == domain)
            if self.fraction is None:
                dealt += deal_evenly(units, members, count, rng)
            else:
                dealt += units.cut(rng.permutation(members), np.repeat(self.fraction, count + 1))[:count]
        return dealt


@spec
class LongTail(Partition):
    """Keep int(n_max * rho ** (-j / (C - 1))) images of class j, then deal them by another partition."""

    rho: Annotated[float, Field(ge=1, allow_inf_nan=False)]  # size of the largest class divided by that of the smallest
    then: Partition = Iid()

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        seed = seed if self.seed is None else self.seed
        rng = generator(self, seed)
        labels = dataset.labels.cpu().numpy()
        kept = []
        for label, count in enumerate(self.counts(dataset.histogram())):
            kept.append(rng.permutation(np.flatnonzero(labels == label))[:count])
        rows = np.sort(np.concatenate(kept))
        then = with_values(self.then, "partition.then", by_group=self.by_group or self.then.by_group)
        return [rows[part] for part in then.split(_without_pixels(dataset, rows), clients, seed)]

    def counts(self, sizes: list[int]) -> list[int]:
        """The number of images kept of each class; a class with fewer keeps all."""
        steps = max(len(sizes) - 1, 1)
        tail = (max(1, int(max(sizes) * self.rho ** (-j / steps))) for j in range(len(sizes)))
        return [min(size, count) for size, count in zip(sizes, tail)]


def deal_evenly(units: Units, members: np.ndarray, clients: int, rng: Random) -> list[np.ndarray]:
    """Shuffle units and deal them so that clients hold similar numbers of images."""
    order = rng.permutation(members)
    if (units.sizes[order] == 1).all():
        return np.array_split(order, clients)
    hands: list[list[int]] = [[] for _ in range(clients)]
    held = np.zeros(clients, np.int64)
    for unit in order:  # give each unit to the client with the fewest images
        client = int(held.argmin())
        hands[client].append(unit)
        held[client] += units.sizes[unit]
    return [np.array(hand, np.int64) for hand in hands]


def _share_classes(
    units: Units, present: np.ndarray, holders: list[list[int]], clients: int, rng: Random
) -> list[np.ndarray]:
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, clients_of_class in zip(present, holders):
        pieces = deal_evenly(units, units.of_class(label), len(clients_of_class), rng)
        for client, piece in zip(clients_of_class, pieces):
            hands[client].append(piece)
    return [np.concatenate(hand) for hand in hands]


def _without_pixels(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """Some rows of a data set for a partition, without copying images."""
    index = torch.from_numpy(rows)
    return dataclasses.replace(
        dataset,
        images=torch.empty((len(rows), *dataset.images.shape[1:]), dtype=dataset.images.dtype, device="meta"),
        labels=dataset.labels.cpu()[index],
        groups=None if dataset.groups is None else dataset.groups.cpu()[index],
        domains=None if dataset.domains is None else dataset.domains.cpu()[index],
    )
