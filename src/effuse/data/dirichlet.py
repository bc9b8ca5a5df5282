"""Dirichlet partitions: shares of every class, or of all images, drawn from Dirichlet(beta)."""

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
    """Divide every class by its own Dirichlet(beta) draw; draw again while a client has fewer than `minimum` images."""

    beta: Beta
    mask: bool = False  # a client that already holds an equal share gets no images of later classes
    minimum: Count = 10  # images that every client has at least
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
            # the published code does not correct rounding errors, so legacy splits do not either
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
            if held[rich] - units.sizes[unit] < self.minimum:  # the richest would have too few; also ends the loop
                raise PartitionError(
                    f"{self}: client {poor} has {held[poor]} images and none can spare more for minimum={self.minimum}; "
                    f"lower minimum or clients"
                )
            dealt[rich] = dealt[rich][dealt[rich] != unit]
            dealt[poor] = np.append(dealt[poor], unit)
            held[rich] -= units.sizes[unit]
            held[poor] += units.sizes[unit]
        return dealt


@spec
class QuantitySkew(Dealing):
    """Clients differ in size only: sizes are one Dirichlet(beta) draw, redrawn while one is too small."""

    beta: Beta
    minimum: Count = 10  # images that every client expects at least
    tries: Count = 1000  # draws before giving up

    def deal(self, units: Units, clients: int, rng: Random) -> list[np.ndarray]:
        _require_enough(self, units, clients)
        order = rng.permutation(len(units))  # drawn once: redraws change the sizes only
        for _ in range(self.tries):
            shares = draw_shares(rng, self.beta, clients)
            if shares.min() * units.images < self.minimum:
                continue
            dealt = units.cut(order, shares)
            if units.held(dealt).min() > 0:  # a large group may leave the next client empty
                return dealt
        raise PartitionError(
            f"{self}: in {self.tries} draws the smallest of {clients} clients always expected fewer than "
            f"minimum={self.minimum} images; lower minimum or clients, or raise beta or tries"
        )


def draw_shares(rng: Random, beta: float, clients: int) -> np.ndarray:
    """Shares from Dirichlet(beta); if a tiny beta underflows to 0/0, its limit: everything to one client."""
    with np.errstate(all="ignore"):
        shares = rng.dirichlet(np.repeat(beta, clients))
    return shares if np.isclose(shares.sum(), 1.0) else _all_to(rng.choice(clients), clients)


def _masked(shares: np.ndarray, below_average: np.ndarray, rng: Random) -> np.ndarray:
    shares = shares * below_average
    if shares.sum() > 0:
        return shares / shares.sum()
    candidates = np.flatnonzero(below_average)  # empty only if no images are left
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
