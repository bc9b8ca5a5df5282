"""A site's side: it judges the terms, keeps its data and state, and carries out orders with everything ready."""

import contextlib
import dataclasses
import json
import logging
import logging.handlers
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from effuse.core.capabilities import Discloses
from effuse.core.data import Dataset, Shard, Source
from effuse.core.errors import DataError, EffuseError, FederationError, ModelError, RecipeError, TrainingError, WireError
from effuse.core.federation import Order
from effuse.core.files import held, write_atomically, writing
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.wire import decode
from effuse.core.workbench import Client
from effuse.fast import machines_for
from effuse.tasks.classify import Classify
from effuse.transport.device import pick_device
from effuse.transport.flower.messages import Enrolment, Invitation
from effuse.transport.refusals import refuse_model
from effuse.transport.state import Snapshots
from effuse.transport.worker import Worker

# errors about data and files may name patients and paths
ABOUT_THE_SERVER = (FederationError, ModelError, RecipeError, TrainingError, WireError)
LOG_BYTES, LOG_FILES = 1 << 20, 3  # of site.log: size at which it is rotated, and how many older ones are kept
FEWEST = 12  # hexadecimal digits of a hash that name a manifest


@dataclasses.dataclass(frozen=True)
class Consent:
    """Which manifests a site accepts: any one at first, or only that of a file, or only that of a hash."""

    recipe: dict[str, str] | None = None
    name: str | None = None
    digest: str | None = None

    @classmethod
    def given(cls, file: Path | None, allow: str | None) -> "Consent":
        """From the command line's `--recipe FILE` and `--allow RECIPE@HASH`."""
        name, at, digest = (allow or "").partition("@")
        if allow is not None and (not at or len(digest) < FEWEST or set(digest) - set("0123456789abcdef")):
            raise FederationError(
                f"--allow {allow}: expected RECIPE@HASH with {FEWEST} or more digits of the manifest's hash"
            )
        return cls(Recipe.restore(read_manifest(file)["recipe"]).saved() if file else None, name or None, digest or None)

    def check(self, hello: Invitation) -> None:
        """Refuse what was not agreed to."""
        if self.digest is not None and (hello.name != self.name or not hello.digest.startswith(self.digest)):
            raise FederationError(f"this site accepts {self.name}@{self.digest} only, not {hello.name}@{hello.digest}")
        if self.recipe is not None and self.recipe != hello.recipe:
            key = next(k for k in (*self.recipe, *hello.recipe) if self.recipe.get(k) != hello.recipe.get(k))
            theirs, ours = hello.recipe.get(key), self.recipe.get(key)
            raise FederationError(f"this site accepts its own recipe only: {key} is {theirs} there and {ours} here")


class Site:
    """One client where its data is."""

    def __init__(
        self, folder: Path, client: int, data: Source | None, consent: Consent, device: str, say: Callable[[str], None]
    ) -> None:
        self.folder, self.client, self.data, self.consent, self._say = folder, client, data, consent, say
        self.device = pick_device(device)
        self.session = secrets.token_hex(8)
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # state may hold models of this site's data alone
        self._log = log_in(folder)
        self.train = data.load("train") if data is not None else None  # what cannot be read is told before anyone waits
        self.held_out = "" if data is None else f"; held out: {_held_out(data)}"
        self.worker: Worker | None = None
        self._threads = self._cores = torch.get_num_threads()  # all of this machine's, or what OMP_NUM_THREADS says

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder: two processes of one client would take each other's state."""
        with held(self.folder / ".lock") as ours:
            if not ours:
                raise FederationError(f"{self.folder} is in use by another `effuse join`; end it first")
            yield

    def agree(self, hello: Invitation) -> Recipe:
        """The recipe of these terms, if they are what was agreed to; the first that come are shown and pinned."""
        self.consent.check(hello)
        pinned = self.folder / "manifest.json"
        if pinned.exists():
            known = json.loads(pinned.read_text())["digest"]
            if known != hello.digest:
                raise FederationError(
                    f"client {self.client} has agreed to the manifest {known[:FEWEST]} and not to {hello.digest[:FEWEST]}; "
                    "the site may accept another after removing manifest.json from its folder"
                )
        recipe = Recipe.restore(hello.recipe)
        if not pinned.exists():
            self.say(f"the server's manifest is {hello.name}@{hello.digest}:")
            for key, value in hello.recipe.items():
                self.say(f"  {key}={value}")
            manifest = {"digest": hello.digest, "name": hello.name, "recipe": hello.recipe, "classes": hello.classes}
            write_atomically(pinned, (json.dumps(manifest, indent=2) + "\n").encode())
            self.say(f"it is now pinned in {pinned}; any other will be refused")
        return recipe

    def enrol(self, hello: Invitation) -> Enrolment:
        """Agree and get ready: data on the device, machine built."""
        recipe = self.agree(hello)
        if self.worker is None:
            self.worker = self._ready(recipe, hello.classes)
        return Enrolment(self.client, self.session)

    def perform(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Carry out an order."""
        if self.worker is None:
            raise FederationError(f"client {self.client} was sent an order before the terms")
        torch.set_num_threads(self._threads)  # of this thread: thread count changes float sums
        return self.worker.handle(head, body)

    def say(self, words: str) -> None:
        """Tell whoever watches, and the site's log."""
        self._log.info(words)
        self._say(words)

    def failed(self, error: Exception) -> str:
        """Tell of an error here, with its traceback in the site's log; returns what the server is told of it."""
        words = f"refused: {error}" if isinstance(error, EffuseError) else f"failed: {type(error).__name__}: {error}"
        self._log.error(words, exc_info=error)
        self._say(words)
        return self.admitted(error)

    def admitted(self, error: Exception) -> str:
        """What the server is told of an error: sentences about its own terms and orders, and of others no more than their kind."""
        if isinstance(error, ABOUT_THE_SERVER):
            return str(error).replace(str(self.folder), "its folder")
        return f"{type(error).__name__}; the site's own log says more"

    def shard(self, recipe: Recipe, classes: tuple[str, ...]) -> Shard:
        """What this site trains on: all of its own data, or its share of the recipe's where sites are simulated."""
        if self.train is None:
            train = recipe.data.load("train").to(self.device)
            shards = recipe.shards(train)
            if not 0 <= self.client < len(shards):
                raise FederationError(f"there is no client {self.client}; the recipe has clients 0 to {len(shards) - 1}")
            return shards[self.client]
        train = self.train
        if recipe.model.conditional or isinstance(recipe.task, Classify) or isinstance(recipe.algorithm, Discloses):
            train = relabelled(train, classes)
        refuse_images(recipe, train)
        refuse_model(recipe, train)
        return Shard.whole(train.to(self.device))

    def counted(self, shard: Shard) -> str:
        """The images that take part, by class, and how many do not: for whoever answers for them, and nobody else."""
        classes = ", ".join(f"{name} {n:,}" for name, n in zip(shard.dataset.classes, shard.histogram))
        return f"{len(shard):,} image{'s' * (len(shard) != 1)}: {classes}{self.held_out}"

    def _ready(self, recipe: Recipe, classes: tuple[str, ...]) -> Worker:
        shard = self.shard(recipe, classes)
        machine = machines_for(recipe, self.device, len(shard))[0]
        # as in a simulation, where clients share them, if it is to end in the same bits; otherwise a site has its machine for itself
        shared = recipe.reproducible or self.data is None
        self._threads = (machine.threads or recipe.threads) if shared else self._cores
        kept = Snapshots(self.folder)

        def client(k: int) -> Client:
            if k != self.client:
                raise FederationError(f"this is client {self.client}, not client {k}")
            return Client(machine, recipe.task, recipe.rounds, k, shard)

        secret = b"" if recipe.reproducible else self._secret()
        self.say(f"client {self.client} is ready with {self.counted(shard)}")
        return Worker(recipe.algorithm, recipe.seed, client, lambda k: kept, recipe.wire, secret)

    def _secret(self) -> bytes:
        """The site's own part of its randomness: a server that knew batches and noise could invert updates."""
        path = self.folder / "secret"
        if not path.exists():
            with writing(path):
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(handle, "wb") as file:
                    file.write(secrets.token_bytes(32))
        return path.read_bytes()


class PrivateFile(logging.handlers.RotatingFileHandler):
    """A log that nobody else may read: its sentences may name patients and paths."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


def log_in(folder: Path) -> logging.Logger:
    """The site's log; a logger of its own, so that two sites in one process do not write into each other's."""
    handler = PrivateFile(folder / "site.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
    form = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    form.converter = time.gmtime
    handler.setFormatter(form)
    log = logging.Logger("effuse.site")
    log.addHandler(handler)
    return log


def _held_out(data: Source) -> str:
    """How many images are left for the site's own testing; nobody is kept from training for want of them."""
    try:
        return f"{len(data.load('test')):,}"
    except DataError as error:
        return f"none that can be read ({error})"


def refuse_images(recipe: Recipe, train: Dataset) -> None:
    """Images of another size or other colours than the federation's: whoever has them cannot change the network."""
    (side, channels), ours = ((s.side, s.channels) for s in (recipe.model.shape, train.shape))
    if (side, channels) != ours:
        raise RecipeError(
            f"the federation's images are {side}x{side} with {_colours(channels)}, this site's are {ours[0]}x{ours[0]} with "
            f"{_colours(ours[1])}; add resize(side={side}) and channels(n={channels}) to the transforms of --data"
        )


def _colours(channels: int) -> str:
    return f"{channels} channel{'s' * (channels > 1)}"


def relabelled(data: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images under the federation's numbers for their classes; a site need not have images of every class."""
    strange = [name for name in data.classes if name not in classes]
    if strange:
        raise DataError(f"the federation has no class '{strange[0]}'; its classes: {', '.join(classes)}")
    numbers = torch.tensor([classes.index(name) for name in data.classes])
    return dataclasses.replace(data, labels=numbers[data.labels], classes=classes)


def told(head: bytes) -> str:
    """An order as a line for whoever watches the site."""
    order = decode(head, Order)
    return f"round {order.t}, job '{order.job}'"
