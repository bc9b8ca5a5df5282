"""A site's side: it checks the terms, keeps its data and its state, and carries out orders."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from effuse.core.capabilities import Discloses
from effuse.core.data import Dataset, Shard, Source
from effuse.core.errors import (
    DataError,
    EffuseError,
    FederationError,
    ModelError,
    RecipeError,
    RunError,
    TrainingError,
    WireError,
    shown,
)
from effuse.core.federation import Order
from effuse.core.files import clear_partial, held, parsed, write_atomically, writing
from effuse.core.grammar import hidden
from effuse.core.privacy import Budget
from effuse.core.recipe import Recipe
from effuse.core.wire import decode
from effuse.core.workbench import Client
from effuse.data.sources import relabelled
from effuse.fast import machines_for
from effuse.privacy.ledger import Ledger
from effuse.privacy.noise import KEY_BYTES
from effuse.tasks.classify import Classify
from effuse.transport.device import pick_device
from effuse.transport.flower.consent import MIN_DIGITS, Consent, read_as_shown
from effuse.transport.flower.course import Course, Handle
from effuse.transport.flower.guarded import (
    DELTA,
    Guarded,
    Limit,
    Withheld,
    charging,
    disclosures,
    run_secret,
    spending,
    without_values,
)
from effuse.transport.flower.log import log_in
from effuse.transport.flower.messages import Enrolment, Invitation
from effuse.transport.plan import Plan, plan
from effuse.transport.refusals import refuse_model
from effuse.transport.state import Snapshots
from effuse.transport.worker import Worker

# errors whose sentences the server is sent; those about data and files may name patients and paths
DISCLOSED = (FederationError, ModelError, RecipeError, TrainingError, WireError, Withheld)


class Site:
    """One client, on the machine that holds its data."""

    def __init__(
        self,
        folder: Path,
        client: int,
        data: Source | None,
        consent: Consent,
        device: str,
        say: Callable[[str], None],
        limit: Limit = Limit(),  # noqa: B008
    ) -> None:
        limit.check()
        if data is None and limit != Limit():
            raise FederationError(
                "--data recipe is a simulated site, whose noise protects nobody; "
                "leave --epsilon, --delta and --ledger out, or give --data of your own"
            )
        self.limit = limit
        self.folder, self.client, self.data, self.consent, self._show = folder, client, data, consent, say
        self.device = pick_device(device)
        self.session = secrets.token_hex(8)
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may hold models of this site's data
        self._log = log_in(folder)
        self.train = data.load("train") if data is not None else None  # unreadable data fails before anyone waits
        self.held_out = "" if data is None else f"; held out: {_held_out(data)}"
        self.worker: Worker | None = None
        self._carry_out: Handle
        self._threads = self._cores = torch.get_num_threads()  # all of this machine's, or OMP_NUM_THREADS

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: two processes of one client would delete each other's state."""
        with held(self.folder / ".lock") as acquired:
            if not acquired:
                raise FederationError(f"{self.folder} is in use by another `effuse join`; end it first")
            yield

    def offered(self, invitation: Invitation) -> Recipe:
        """The recipe of these terms, refused unless this site may show it and consents to it."""
        recipe = read_as_shown(invitation)
        if self.data is not None:
            recipe.require_portable()
        self.consent.check(invitation)
        return recipe

    def agree(self, invitation: Invitation) -> Recipe:
        """The recipe of these terms, if the site accepts them; the first accepted manifest is shown and pinned."""
        recipe = self.offered(invitation)
        pinned = self.folder / "manifest.json"
        if pinned.exists():
            found, offered = parsed(pinned.read_bytes(), pinned), invitation.digest
            digest = found.get("digest") if isinstance(found, dict) else None
            known = digest if isinstance(digest, str) else "(damaged)"
            if known != offered and self.consent.digest is not None:  # which `offered` has compared
                self.report(f"--allow names another manifest than {known[:MIN_DIGITS]}, which was pinned; it is replaced")
                pinned.unlink()
            elif known != offered:
                raise FederationError(
                    f"client {self.client} has agreed to the manifest {known[:MIN_DIGITS]} and not to "
                    f"{offered[:MIN_DIGITS]}; to accept that one too, join with --allow {invitation.name}@{offered}"
                )
        if not pinned.exists():
            self.report(f"the server's manifest is {invitation.name}@{invitation.digest}:")
            for key, value in invitation.recipe.items():
                self.report(f"  {key}={value}")
            manifest = {key: getattr(invitation, key) for key in ("digest", "name", "recipe", "classes")}
            write_atomically(pinned, (json.dumps(manifest, indent=2) + "\n").encode())
            self.report(f"it is now pinned in {pinned}; any other will be refused")
        return recipe

    def enrol(self, invitation: Invitation) -> Enrolment:
        """Agree, and prepare the worker: data on the device, machine built."""
        recipe = self.agree(invitation)
        if self.worker is None:
            clear_partial(self.folder)
            self.worker, self._carry_out = self._prepared(recipe, invitation)
        return Enrolment(self.client, self.session)

    def perform(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Carry out an order."""
        if self.worker is None:
            raise FederationError(f"client {self.client} was sent an order before the terms")
        torch.set_num_threads(self._threads)  # a setting of the calling thread; it changes float sums
        return self._carry_out(head, body)

    def report(self, words: str) -> None:
        """Show a sentence on the screen, and write it to the site's log."""
        self._log.info(line := shown(words))
        self._show(line)

    def failed(self, error: Exception) -> str:
        """Report an error at the site, with its traceback in the log; returns the sentence for the server."""
        cause = error.__cause__ if isinstance(error, Withheld) and error.__cause__ else error
        words = shown(f"refused: {cause}" if isinstance(cause, EffuseError) else f"failed: {type(cause).__name__}: {cause}")
        self._log.error(words, exc_info=error)
        self._show(words)
        return self.disclosed(error)

    def disclosed(self, error: Exception) -> str:
        """The sentence for the server: about its own terms and orders, without paths; else only the error's type."""
        if isinstance(error, DISCLOSED):
            return hidden(str(error).replace(str(self.folder), "its folder"))
        return f"{type(error).__name__}; the details are in the site's own log"

    def shard(self, recipe: Recipe, classes: tuple[str, ...]) -> Shard:
        """The images that this site trains on: all of its own data, or a simulated site's share of the recipe's data."""
        if self.train is None:
            train = recipe.data.load("train").to(self.device)
            shards = recipe.shards(train)
            if not 0 <= self.client < len(shards):
                raise FederationError(f"there is no client {self.client}; the recipe has clients 0 to {len(shards) - 1}")
            return shards[self.client]
        train = self.train
        labelled = [t for t in recipe.algorithm.trains(recipe) if t.arch.conditional or isinstance(t.task, Classify)]
        if (
            recipe.model.conditional
            or isinstance(recipe.task, Classify)
            or labelled
            or isinstance(recipe.algorithm, Discloses)
        ):
            train = relabelled(train, classes)
        refuse_images(recipe, train)
        refuse_model(recipe, train)
        self.limit.accept(recipe, len(train))
        return Shard.whole(recipe.protected(train).to(self.device))

    def counted(self, shard: Shard) -> str:
        """How many images take part, by class, and how many are held out; shown at the site and never sent."""
        classes = ", ".join(f"{name} {n:,}" for name, n in zip(shard.dataset.classes, shard.histogram))
        return f"{len(shard):,} image{'s' * (len(shard) != 1)}: {classes}{self.held_out}"

    def planned(self, recipe: Recipe, shard: Shard) -> Plan:
        """What this client will release in a whole run, and the noise of its fits."""
        if self.train is None:  # a simulated site: as in a simulation
            shards = recipe.shards(recipe.data.load("train")) if recipe.budget is not None else []
            return plan(recipe, shards, only=[self.client])
        return plan(recipe, [without_values(shard)] * recipe.clients, only=[self.client])

    def ledger(self, recipe: Recipe, invitation: Invitation) -> Ledger | None:
        """The ledger of this site's own data; None where nothing has noise, or the site is simulated."""
        if self.train is None:
            return None
        budget = recipe.budget
        for disclosure in disclosures(recipe):  # without a budget; what it costs is recorded, and no cap limits it
            epsilon, delta = disclosure.charge or (0.0, 0.0)
            budget = Budget(epsilon=epsilon, delta=delta or DELTA)
        return None if budget is None else self.limit.opened(budget, self.train.digest, invitation.digest)

    def _prepared(self, recipe: Recipe, invitation: Invitation) -> tuple[Worker, Handle]:
        """The worker, and what carries out its orders."""
        shard = self.shard(recipe, invitation.classes)
        machine = machines_for(recipe, self.device, len(shard))[0]
        # for the same bits as a simulation, a site uses the threads of one simulated client; otherwise all cores
        simulated = recipe.reproducible or self.data is None
        self._threads = (machine.threads or recipe.threads) if simulated else self._cores
        snapshots = Snapshots(self.folder, run=invitation.digest)

        def client(k: int) -> Client:
            if k != self.client:
                raise FederationError(f"this is client {self.client}, not client {k}")
            made = Client(machine, recipe.task, recipe.rounds, k, shard)
            if ledger is not None and recipe.budget is None:
                made.charge = charging(ledger, about)
            return made

        ledger = self.ledger(recipe, invitation)
        about = f"{invitation.digest} {'' if self.train is None else self.train.digest}".encode()
        secret = b"" if recipe.reproducible else run_secret(self._secret(), about)
        worker = Worker(recipe.algorithm, recipe.seed, client, lambda k: snapshots, recipe.wire, secret)
        worker.protections = (planned := self.planned(recipe, shard)).protections
        carry_out = worker.handle
        if ledger is not None and recipe.budget is not None:
            ledger.foresee("this run", planned.releases(self.client))
            own = planned.protections[self.client]
            carry_out = Guarded(worker, recipe, client(self.client), ledger, own, about).handle
        for line in spending(planned, self.client, ledger):
            self.report(line)
        self.report(f"client {self.client} is ready with {self.counted(shard)}")
        course = Course(recipe, client, shard, self.folder, invitation.digest, carry_out)
        course.report = self.report
        return worker, course.handle

    def _secret(self) -> bytes:
        """The site's own part of its randomness: a server that knew the batches and the noise could invert updates."""
        path = self.folder / "secret"
        if not path.exists():
            write_atomically(path, secrets.token_bytes(KEY_BYTES), mode=0o600)
        if len(secret := path.read_bytes()) != KEY_BYTES:
            raise RunError(
                f"{path} has {len(secret)} bytes and not {KEY_BYTES}; restore it from a backup, or delete it for a new one"
            )
        return secret


def _held_out(data: Source) -> str:
    """How many images are held out for the site's own testing; a site may train without any."""
    try:
        return f"{len(data.load('test')):,}"
    except DataError as error:
        return f"none that can be read ({error})"


def refuse_images(recipe: Recipe, train: Dataset) -> None:
    """Refuse images whose size or channels differ from the federation's; a site cannot change the network."""
    (side, channels), (own_side, own_channels) = ((s.side, s.channels) for s in (recipe.model.shape, train.shape))
    if (side, channels) != (own_side, own_channels):
        raise RecipeError(
            f"the federation's images are {side}x{side} with {_colours(channels)}, "
            f"this site's are {own_side}x{own_side} with {_colours(own_channels)}; "
            f"add resize(side={side}) and channels(n={channels}) to the transforms of --data"
        )


def _colours(channels: int) -> str:
    return f"{channels} channel{'s' * (channels > 1)}"


def described(head: bytes) -> str:
    """An order as the site shows it."""
    order = decode(head, Order)
    return f"round {order.t + 1}, job '{order.job}'"
