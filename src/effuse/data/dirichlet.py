"""Dirichlet partitions: shares of every class, or of the whole, drawn from Dirichlet(beta)."""

from typing import Annotated

import numpy as np
from pydantic import Field

from effuse.core.errors import PartitionError
from effuse.core.spec import spec
from effuse.data.dealing import Dealing, Random, Units

Beta = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@spec
class LabelSkew(Dealing):
    """Every class is shared out by its own Dirichlet(beta) draw; all is redrawn while a client has too few images."""

    beta: Beta
    mask: bool = False  # a client that holds its fair part already gets nothing of the classes that follow
    minimum: Count = 10  # images that every client must have
    tries: Count = 1000  # draws before giving up
    top_up: bool = False  # keep the first draw and move images from the largest clients to those below `minimum`

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        _require_enough(self, units, clients)
        for _ in range(self.tries):
            dealt = self._draw(units, clients, rng)
            if units.held(dealt).min() >= self.minimum:
                return dealt
            if self.top_up:
                return self._topped_up(dealt, units, rng)
        raise PartitionError(
            f"{self}: in {self.tries} draws one of {clients} clients always had fewer than minimum={self.minimum} images; "
            f"lower minimum or clients, raise beta or tries, or set top_up=True"
        )

    def _draw(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        """The published order: shuffle a class, draw shares, mask, renormalise, cut."""
        hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
        held = np.zeros(clients, np.int64)
        for label in range(units.classes):
            members = units.of_class(label)
            rng.shuffle(members)
            shares = draw_shares(rng, self.beta, clients)
            if self.mask:
                shares = _masked(shares, held < units.images / clients, rng)
            # the published code's rounding is part of its split
            pieces = units.cut(members, shares, exactly=not self.legacy)
            held += units.held(pieces)
            for hand, piece in zip(hands, pieces):
                hand.append(piece)
        return [np.concatenate(hand) for hand in hands]

    def _topped_up(self, dealt: list[np.ndarray], units: Units, rng: Random) -> list[np.ndarray]:
        held = units.held(dealt)
        while held.min() < self.minimum:
            poor, rich = int(held.argmin()), int(held.argmax())
            unit = rng.choice(dealt[rich])
            if held[rich] - units.sizes[unit] < self.minimum:  # would only move the want; also what ends the loop
                raise PartitionError(
                    f"{self}: client {poor} has {held[poor]} images and none can spare the rest of minimum={self.minimum}; "
                    f"lower minimum or clients"
                )
            dealt[rich] = dealt[rich][dealt[rich] != unit]
            dealt[poor] = np.append(dealt[poor], unit)
            held[rich] -= units.sizes[unit]
            held[poor] += units.sizes[unit]
        return dealt


@spec
class QuantitySkew(Dealing):
    """Clients hold alike images in unlike numbers: sizes are one Dirichlet(beta) draw, redrawn while one is too small."""

    beta: Beta
    minimum: Count = 10  # images that the smallest client must expect
    tries: Count = 1000  # draws before giving up

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        _require_enough(self, units, clients)
        order = rng.permutation(len(units))  # once and first: redraws concern the sizes only
        for _ in range(self.tries):
            shares = draw_shares(rng, self.beta, clients)
            if shares.min() * units.images < self.minimum:
                continue
            dealt = units.cut(order, shares)
            if units.held(dealt).min() > 0:  # a large group may have swallowed a neighbour's share
                return dealt
        raise PartitionError(
            f"{self}: in {self.tries} draws the smallest of {clients} clients always expected fewer than "
            f"minimum={self.minimum} images; lower minimum or clients, or raise beta or tries"
        )


def draw_shares(rng: Random, beta: float, clients: int) -> np.ndarray:
    """Shares from Dirichlet(beta), or its limit, all to one client, where tiny beta underflows to 0/0."""
    with np.errstate(all="ignore"):
        shares = rng.dirichlet(np.repeat(beta, clients))
    return shares if np.isclose(shares.sum(), 1.0) else _all_to(rng.choice(clients), clients)


def _masked(shares: np.ndarray, open_to_more: np.ndarray, rng: Random) -> np.ndarray:
    shares = shares * open_to_more
    if shares.sum() > 0:
        return shares / shares.sum()
    candidates = np.flatnonzero(open_to_more)  # none is left only when nothing is left to deal
    return _all_to(rng.choice(candidates), len(shares)) if len(candidates) else np.full(len(shares), 1 / len(shares))


def _all_to(client: int, clients: int) -> np.ndarray:
    shares = np.zeros(clients)
    shares[client] = 1.0
    return shares


def _require_enough(partition: LabelSkew | QuantitySkew, units: Units, clients: int) -> None:
    if clients * partition.minimum > units.images:
        raise PartitionError(
            f"{partition}: {units.images} images cannot give {clients} clients minimum={partition.minimum} each; "
            f"lower minimum or clients"
        )
