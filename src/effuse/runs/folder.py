"""A run folder: the files of a run, and how they survive an interruption."""

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import effuse
from effuse.core.algorithm import Server
from effuse.core.data import Shard
from effuse.core.errors import EffuseError, FederationError, RunError, WireError
from effuse.core.files import clear_partial, held, parsed, reading, sync_file, write_atomically, writing
from effuse.core.ledger import EVALUATION
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.spec import field_hints, text
from effuse.core.wire import decode, encode
from effuse.runs.records import Result, RoundRecord, Split
from effuse.runs.release import versions
from effuse.transport.state import MARKS, SEALS, Snapshots, bound_to, damaged, saved_by_another, sealed


@message(name="checkpoint")
class Checkpoint:
    """Everything that a resumed run needs to end in the same result."""

    t: int  # the next round
    federated: int
    server: Server
    ema: Model | None
    averaged: int  # models in `ema`
    snapshots: dict[int, str]
    received: dict[str, tuple[int, ...]]  # for each message sent once, the clients that received it
    workbench: str | None  # the snapshot of the server's own optimiser
    ledger: dict[str, list[int]]
    metrics: str  # the last evaluation, as JSON; null before the first
    digests: list[str]  # of personal models, at the last evaluation
    lines: int  # bytes of rounds.jsonl up to this checkpoint
    seconds: float


@message(name="checkpoint.unevaluated")
class Unevaluated(Checkpoint):
    """A checkpoint before the evaluation of its last round, whose line is not yet in rounds.jsonl."""

    record: str  # that line without the evaluation


class RunFolder:
    """Paths and writes of one run."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def split(self) -> Path:
        return self.path / "partition.json"

    @property
    def digest(self) -> str:
        """The manifest's hash."""
        return bound_to(self.path)

    @property
    def prepared(self) -> Path:
        """The checkpoint at the end of the preparation, which stays for `--warm`."""
        return self.path / "prepared.safetensors"

    def require_new(self) -> None:
        """Refuse a folder that already holds a run."""
        if self.manifest.exists():
            raise RunError(
                f"{self.path} already holds a run; choose another --out, or continue it with `effuse resume {self.path}`"
            )

    def require_same(self, recipe: Recipe) -> None:
        """Refuse a run of another recipe than this one."""
        saved = Recipe.restore(read_manifest(self.path)["recipe"])
        wanted = recipe.shaped(saved.model.shape)
        for key in field_hints(Recipe):
            if (new := getattr(wanted, key)) != (old := getattr(saved, key)):
                was, now = text(old, full=False), text(new, full=False)
                raise RunError(f"{self.path} was run with {key}={was}, not {now}; choose another --out")

    def create(
        self, recipe: Recipe, name: str, engine: str, device: str, workers: int | None, data: dict[str, str], **more: Any
    ) -> None:
        """Write the manifest of a new run."""
        self.require_new()
        manifest = {
            "effuse": effuse.__version__,
            "name": name,
            "recipe": recipe.saved(),
            "data_sha256": data,
            "engine": engine,
            "device": device,
            "workers": workers,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(device),
        } | more
        self.write_json("manifest.json", manifest)

    @contextlib.contextmanager
    def locked(self, private: bool = False) -> Iterator[None]:
        """Lock the folder against other processes; other users cannot read a private one."""
        with writing(self.path):
            self.path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
            if private:
                self.path.chmod(0o700)  # mkdir leaves the mode of an existing folder
        with held(self.path / ".lock") as acquired:
            if not acquired:
                raise RunError(f"{self.path} is in use by another effuse process; wait for it or choose another --out")
            yield

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def write_split(self, shards: Sequence[Shard]) -> None:
        """Write who holds what, for reports."""
        write_atomically(self.split, json.dumps(split_of(shards).to_json()).encode() + b"\n")

    def read_split(self) -> Split | None:
        """Who holds what; None where that is not known here."""
        if not self.split.exists():
            return None
        with reading(self.split):
            blob = self.split.read_bytes()
        return Split.from_json(parsed(blob, self.split), str(self.split))

    def append(self, record: RoundRecord) -> None:
        """Add a line to rounds.jsonl."""
        with writing(self.rounds), open(self.rounds, "a") as file:
            file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")

    def read_result(self) -> Result:
        """The result of a finished run."""
        with reading(self.result):
            blob = self.result.read_bytes()
        return Result.from_json(parsed(blob, self.result), str(self.result))

    def records(self) -> list[RoundRecord]:
        return list(self.each_record())

    def each_record(self) -> Iterator[RoundRecord]:
        """The lines of rounds.jsonl, one at a time to save memory."""
        if self.rounds.exists():
            with reading(self.rounds), open(self.rounds, "rb") as file:
                # a last line without a newline is incomplete: it is being written, or the process was killed
                whole = (line for line in file if line.endswith(b"\n"))
                yield from (RoundRecord.from_json(parsed(line, self.rounds), str(self.rounds)) for line in whole)

    def save_checkpoint(self, checkpoint: Checkpoint, prepared: bool = False) -> None:
        """Write a checkpoint; that of a finished preparation also stays beside the later ones."""
        folder = self.path / "checkpoints"
        with writing(folder):
            folder.mkdir(exist_ok=True)
        if self.rounds.exists():  # the lines must be on disk before the checkpoint that counts them
            with writing(self.rounds):
                sync_file(self.rounds)
        blob = sealed(encode(checkpoint, Checkpoint, marks=MARKS | SEALS), self.digest)
        if prepared:
            write_atomically(self.prepared, blob)
        write_atomically(folder / f"{checkpoint.t:06d}.safetensors", blob)
        for old in self._checkpoints()[:-2]:  # the one before the last is for when the last is damaged
            old.unlink(missing_ok=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint."""
        newest = self._checkpoints()[-1:]
        return self._read(newest[0]) if newest else None

    def load_prepared(self) -> Checkpoint:
        """The checkpoint at the end of the preparation."""
        return self._read(self.prepared)

    def _read(self, path: Path) -> Checkpoint:
        if (why := self._unreadable(path)) is not None:
            raise RunError(why)
        with reading(path):
            blob = path.read_bytes()
        if (why := damaged(blob, path, self.digest)) is not None:
            raise RunError(f"{why}; restore it from a backup, or start a new run")
        try:
            checkpoint: Checkpoint = decode(blob, Checkpoint)
        except WireError as error:
            raise RunError(_damaged(path, error)) from None
        return checkpoint

    def fall_back(self, say: Callable[[str], None], here: bool) -> None:
        """Set a damaged checkpoint aside where the one before it is whole; with the clients' states, if they are `here`."""
        first: EffuseError | None = None
        for path in reversed(self._checkpoints()):
            try:
                self._require_whole(path, here)
            except (RunError, FederationError) as error:
                first = first or error
                continue
            for newer in [p for p in self._checkpoints() if p > path]:
                newer.rename(newer.with_suffix(".damaged"))
            if first is not None:
                say(f"WARNING: {first}")
                say(f"WARNING: going back to the checkpoint before it, {path}; the rounds since then are done again")
            return
        if first is not None:
            raise first

    def _require_whole(self, path: Path, here: bool) -> None:
        """Refuse a checkpoint that is damaged, or names a state that is."""
        checkpoint = self._read(path)
        for client, name in checkpoint.snapshots.items() if here else ():
            Snapshots(self.path / "clients" / str(client), run=self.digest).read(name)
        if checkpoint.workbench is not None:
            Snapshots(self.path / "server", run=self.digest).read(checkpoint.workbench)

    def unreadable(self) -> str | None:
        """Why the newest checkpoint's header cannot be read: another version saved it, or it is damaged."""
        return next((self._unreadable(path) for path in self._checkpoints()[-1:]), None)

    def _unreadable(self, path: Path) -> str | None:
        with reading(path), open(path, "rb") as file:
            size = file.read(8)
            head = size + file.read(min(int.from_bytes(size, "little"), path.stat().st_size))
        try:
            return saved_by_another(head, path)
        except WireError as error:
            return _damaged(path, error)

    def inherit(self, other: "RunFolder") -> None:
        """Copy the training of another run, without its evaluations."""
        ended = other.load_checkpoint()
        if ended is None:
            raise RunError(f"{other.path} has no checkpoint to continue from; run it again")
        if read_manifest(other.path).get("data_sha256") != read_manifest(self.path)["data_sha256"]:
            raise RunError(f"{other.path} was trained on different data; run it again, or restore the data")
        for record in other.each_record():
            traffic = dataclasses.replace(record.traffic, evaluation=None)
            self.append(dataclasses.replace(record, metrics=None, traffic=traffic))
        for states in ("clients", "server"):
            if (other.path / states).is_dir():
                shutil.copytree(other.path / states, self.path / states, dirs_exist_ok=True)
        for own in (self.path / "server", *self.path.glob("clients/*")):
            Snapshots(own, wait=False).adopt(self.digest)
        ledger = {account: sums for account, sums in ended.ledger.items() if not account.startswith(EVALUATION)}
        unevaluated: dict[str, Any] = {"metrics": "null", "digests": [], "ledger": ledger}
        self.save_checkpoint(dataclasses.replace(ended, **unevaluated, lines=self.rounds.stat().st_size))

    def copy_rounds(self, other: "RunFolder", size: int) -> None:
        """Begin rounds.jsonl with the first `size` bytes of another run's."""
        with reading(other.rounds), open(other.rounds, "rb") as file:
            lines = file.read(size)
        if len(lines) < size:
            raise RunError(
                f"{other.rounds} has {len(lines)} bytes, not the {size} of {other.prepared}; restore it from a backup"
            )
        write_atomically(self.rounds, lines)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("*.safetensors"))

    def cut(self, size: int) -> None:
        """Cut rounds.jsonl to its first `size` bytes, and delete partial files of an interrupted write."""
        found = self.rounds.stat().st_size if self.rounds.exists() else 0
        if found < size:
            raise RunError(f"{self.rounds} has {found} bytes, but the checkpoint counts {size}; restore it from a backup")
        if found:
            with writing(self.rounds), open(self.rounds, "r+b") as file:
                file.truncate(size)
        for folder in (self.path, self.path / "checkpoints", self.path / "server", *self.path.glob("clients/*")):
            clear_partial(folder)


def split_of(shards: Sequence[Shard]) -> Split:
    """How many images of each class, and how many groups, every client holds."""
    groups = [(own.dataset.groups, own.rows) for own in shards]
    counted = [len(every[rows].unique()) for every, rows in groups if every is not None] or None
    return Split([own.histogram for own in shards], counted)


def _damaged(path: Path, error: WireError) -> str:
    return f"{path} cannot be read ({error}); restore it from a backup, or start a new run"
