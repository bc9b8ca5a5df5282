"""A site's worker under a ledger: an order is paid before it computes, and its reply is stored before it leaves."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from effuse.core.algorithm import job_of
from effuse.core.data import Shard
from effuse.core.errors import EffuseError, FederationError, RecipeError
from effuse.core.federation import Order
from effuse.core.privacy import Budget, Release
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.visit import copied, map_params, placed
from effuse.core.wire import decode, encode
from effuse.core.workbench import Client
from effuse.machines.hollow import Hollow
from effuse.privacy.accountant import merged
from effuse.privacy.histogram import Disclosure
from effuse.privacy.ledger import Ledger, ledger_path, order_key
from effuse.privacy.noise import KEY_BYTES, SecureNoise, SecureNumbers
from effuse.transport.plan import Plan
from effuse.transport.state import MemorySnapshots, Snapshots, frame, unframe
from effuse.transport.worker import Receipt, Worker

DELTA = 1e-5  # of a site's cap, unless it gives one
REPRODUCIBLE = "reproducible=True: the server could draw this site's noise again and subtract it; leave it out"
KEPT = 32  # stored replies of a run: a resumed server repeats what it did since its last checkpoint


class Limit(NamedTuple):
    """What a site allows all runs on its data together, and where that is recorded."""

    epsilon: float | None = None  # None: what the recipe's budget says
    delta: float | None = None
    ledger: Path | None = None  # None: a file named after the data

    def check(self) -> None:
        """Refuse values that are no budget."""
        if self.epsilon is not None and not 0 < self.epsilon < float("inf"):
            raise FederationError(f"--epsilon {self.epsilon}: it must be positive, such as 10")
        if self.delta is not None and (self.epsilon is None or not 0 < self.delta < 1):
            raise FederationError(f"--delta {self.delta}: give it with --epsilon, and between 0 and 1, such as 1e-5")

    def accept(self, recipe: Recipe, images: int) -> None:
        """Refuse a recipe that would not protect a site's own images as it promises."""
        if recipe.canaries:
            raise RecipeError(
                f"canaries={recipe.canaries}: they are set aside in simulations, to test the noise; "
                "a site trains on all of its own images, so leave canaries out"
            )
        if recipe.budget is None and self.epsilon is not None:
            raise RecipeError(
                f"this site takes part within epsilon {self.epsilon:g} only, and the recipe has no budget; "
                "set budget=budget(epsilon=...), and privacy=dp_sgd() of its solvers"
            )
        if recipe.budget is not None and recipe.budget.delta * images >= 1:
            raise RecipeError(
                f"budget.delta={recipe.budget.delta:g}: this promise also holds where one of {images} images, drawn by lot, "
                "is sent as it is; set delta well below one over the number of images, such as 1e-5"
            )
        if recipe.budget is not None and recipe.reproducible:
            raise RecipeError(REPRODUCIBLE)
        if recipe.reproducible and disclosures(recipe):
            raise RecipeError(REPRODUCIBLE)

    def cap(self, budget: Budget) -> Budget:
        """The site's cap; without one of its own, the recipe's budget."""
        if self.epsilon is None:
            return budget
        return Budget(epsilon=self.epsilon, delta=self.delta or DELTA, unit=budget.unit)

    def opened(self, budget: Budget, data: str, run: str) -> Ledger:
        """The ledger of the data with this digest, for one run."""
        return Ledger(self.ledger or ledger_path(data), self.cap(budget), run, budget)


def disclosures(recipe: Recipe) -> list[Disclosure]:
    """The noisy disclosures of counts that a recipe without a budget asks for."""
    values = (getattr(recipe.algorithm, f.name) for f in dataclasses.fields(recipe.algorithm))
    return [v for v in values if isinstance(v, Disclosure) and v.charge is not None and recipe.budget is None]


def run_secret(secret: bytes, about: bytes) -> bytes:
    """A site's secret for one manifest and one data set: no noise of one run is drawn again in another."""
    return hashlib.blake2b(about, key=secret, person=b"effuse.run", digest_size=KEY_BYTES).digest()


def charging(ledger: Ledger, about: bytes) -> Callable[[Stream, Release], None]:
    """What charges noise without a budget. One stream draws the same noise on the same counts, which is one release."""

    def charge(stream: Stream, release: Release) -> None:
        address = json.dumps([stream.key, dataclasses.asdict(release)]).encode()
        ledger.record(order_key(about, address), "counts of labels", [release])

    return charge


class Withheld(EffuseError):
    """A job that failed on private images: the server learns that, and the site's log has the reason."""


class Unpaid(Snapshots):
    """A client's snapshots. A new one is held back until its order has been paid and its reply is stored.

    Otherwise a server could ask for both of two states that were paid once. There is no copy in memory either.
    """

    on_disk = False

    def __init__(self, folder: Path, run: str) -> None:
        super().__init__(folder, run=run)
        self.pending: tuple[str, bytes] | None = None

    def put(self, name: str, blob: bytes) -> None:
        self.pending = name, blob

    def commit(self) -> None:
        """Write what was held back."""
        if self.pending is not None:
            super().put(*self.pending)
            self.pending = None


class Guarded:
    """Carries out the orders of one client: what they release is charged first.

    A repeated order gets the stored reply. What an order costs is known by doing it on shapes before.
    """

    def __init__(
        self, worker: Worker, recipe: Recipe, client: Client, ledger: Ledger, protection: Protection, about: bytes
    ) -> None:
        self.worker, self.ledger, self.about = worker, ledger, about
        own = worker.snapshots(client.id)
        self.snapshots = Unpaid(own.folder, own.run)
        self._key = ""  # of the order that is carried out, if it was charged
        self._released: list[Release] = []
        numbers: Callable[[Stream], Any] = lambda stream: SecureNumbers(self._noise(stream))  # noqa: E731
        worker.snapshots = lambda k: self.snapshots
        worker.protections = {client.id: protection._replace(noise=self._noise, numbers=numbers)}
        worker.on_release = lambda order, release: self._released.append(release)
        # the same job on shapes: with the true number of images, and nothing else of them
        hollow = Client(Hollow(), client.task, client.rounds, client.id, without_values(client.data))
        self._states = MemorySnapshots()
        self.rehearsal = Worker(recipe.algorithm, recipe.seed, lambda k: hollow, lambda k: self._states, recipe.wire)
        self.rehearsal.protections = {client.id: protection}
        self.rehearsal.on_release = worker.on_release

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Carry out an order, or send again what it was answered with; the reply may leave when this returns."""
        order = decode(head, Order)
        self.worker.client(order.client)  # fails if it is another client's
        what = f"round {order.t + 1}, job '{order.job}'"
        state = b"" if order.base is None else self.snapshots.blob(order.base)
        # what the last checkpoint names changes no reply
        same = encode(dataclasses.replace(order, durable=""), Order)
        key = order_key(self.about, state, same, body)
        if (stored := self.ledger.reply(key)) is not None:
            return self._again(stored)
        releases = self._rehearsed(order, body, what)
        if any(release.noise is None for release in releases):
            raise FederationError(
                f"{what}: this run's plan leaves out client {order.client}, so its noise is not settled; ask another client"
            )
        if releases:
            self.ledger.charge(key, what, releases)
        self._key = key if releases else ""
        receipt, reply = self._carried_out(what, releases, head, body)
        if releases:
            self.ledger.store(key, frame(receipt, reply, *([self.snapshots.pending[1]] if self.snapshots.pending else [])))
            self.ledger.keep(KEPT)
        self.snapshots.commit()
        return receipt, reply

    def _again(self, stored: bytes) -> tuple[bytes, bytes]:
        """A stored reply; the state that it names is written again, since it may have been deleted or replaced."""
        receipt, reply, *state = unframe(stored)
        name = decode(receipt, Receipt).snapshot
        if state and name is not None:
            self.snapshots.put(name, state[0])
            self.snapshots.commit()
        return receipt, reply

    def _rehearsed(self, order: Order, body: bytes, what: str) -> tuple[Release, ...]:
        """What an order would release."""
        arguments = decode(body, job_of(self.worker.algorithm, order.job).arguments)
        meta = torch.device("meta")
        # loose tensors keep their numbers where a job needs them, as in the rehearsal of a run
        on_shapes = (lambda: copied(map_params(arguments, lambda t: t.to(meta))), lambda: placed(arguments, meta))
        for sent in on_shapes:
            self._states.prune(set())
            if order.base is not None:
                self._states.write(order.base, self.snapshots.read(order.base))
            self._released = []
            try:
                self.rehearsal.perform(order, sent())
                return tuple(self._released)
            except EffuseError:
                raise
            except Exception as error:
                reason = error
        raise FederationError(
            f"{what} cannot be done on shapes ({type(reason).__name__}), so this site cannot know what it would cost; "
            "change the algorithm"
        ) from reason

    def _carried_out(self, what: str, paid: tuple[Release, ...], head: bytes, body: bytes) -> tuple[bytes, bytes]:
        self._released, self.snapshots.pending = [], None
        try:
            answer = self.worker.handle(head, body)
        except Exception as error:  # its words may hold numbers of private images
            self.snapshots.pending = None
            raise Withheld(f"{what} failed on private images; the reason is in the site's own log") from error
        if merged(self._released) != merged(paid):
            self.snapshots.pending = None
            raise FederationError(f"{what} released something else than it was charged for; nothing was sent")
        return answer

    def _noise(self, stream: Stream, device: torch.device | None = None) -> SecureNoise:
        """Noise that neither the server nor a second order can draw again; the stream is known to the server."""
        return SecureNoise(self.worker.secret, self.ledger.nonce(self._key))


def without_values(shard: Shard) -> Shard:
    """A shard of as many images in the same groups, without their values and labels: no cost may depend on those."""
    data = shard.dataset
    return dataclasses.replace(
        shard,
        dataset=dataclasses.replace(data, images=data.images.to("meta"), labels=torch.zeros_like(data.labels, device="cpu")),
    )


def spending(planned: Plan, client: int, ledger: Ledger | None = None) -> list[str]:
    """What a whole run may cost one client, and what its ledger says, in words; nothing without a budget."""
    spent, budget = planned.spent(), planned.recipe.budget
    if budget is None and ledger is not None:
        mechanisms = " and ".join(map(str, disclosures(planned.recipe)))
        before, delta = ledger.spent()
        return [
            f"counts of labels leave this site with the noise of {mechanisms}; models leave it without noise",
            f"ledger {ledger.path}: epsilon {before:.4g} charged so far (delta {delta:g}); every new draw is charged",
        ]
    if spent is None or budget is None:
        return []
    own = spent["clients"].get(str(client), {"epsilon": 0.0, "sigma": None, "releases": 0})
    noise = "" if own["sigma"] is None else f" with sigma {own['sigma']:.4g}"
    lines = [
        f"this run may cost epsilon {own['epsilon']:.4g} (delta {budget.delta:g}) for each {budget.unit}: "
        f"{own['releases']} releases{noise}, by {budget.accountant}",
        f"promised: {spent['adjacency']}; not covered: {spent['not_covered']}, and how long a job takes",
    ]
    if ledger is not None:
        (before, delta), after = ledger.spent(), ledger.beside(planned.releases(client))
        lines.append(
            f"ledger {ledger.path}: epsilon {before:.4g} charged so far, {after:.4g} with this run (delta {delta:g}); "
            f"this site's cap is {ledger.cap.epsilon:g}"
        )
    return lines
