"""A site's ledger: what all runs have charged its data, in a file that outlives every run.

Each line is on disk before the call that wrote it returns, so no kill and no power cut can lose a charge.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from effuse.core.errors import FederationError, RecipeError, RunError
from effuse.core.files import held, sync_file, writing
from effuse.core.privacy import Budget, Release
from effuse.privacy.accountant import epsilon_of, merged


@dataclasses.dataclass(frozen=True)
class Entry:
    """A charge: who asked for what, and the releases that it paid for."""

    time: str
    run: str  # the digest of the run's manifest
    key: str  # the digest of the order
    what: str
    unit: str  # what the releases protect: an image, or a group
    releases: tuple[Release, ...]


class Ledger:
    """The ledger of one data set, and the replies that it paid for.

    A repeated order gets its stored reply, which costs nothing. An order is charged once until its reply is stored;
    where the reply is gone, the same order is a new release. The order of calls: `reply`, `charge`, `nonce`, `store`.
    """

    def __init__(self, path: Path, cap: Budget, run: str = "", budget: Budget | None = None) -> None:
        self.path, self.cap, self.run, self.budget = path, cap, run, budget
        self.replies = path.with_suffix("")
        self._attempts: dict[str, BinaryIO] = {}  # the reply files of this process's unfinished orders; each is locked
        self._made = False

    def charge(self, key: str, what: str, releases: Sequence[Release]) -> None:
        """Pay for an order, or refuse it; until its reply is stored, the same order costs nothing more."""
        path = self._place(key)
        with self._locked() as book:
            paid = book.unfinished.get(key)
            due = paid is None or paid.releases != tuple(releases)
            if due:
                self._check(book, what, releases, book.entries)
                self._check_run(book, what, releases)
            with contextlib.ExitStack() as undo:
                if key not in self._attempts:
                    file = undo.enter_context(open(path, "a+b", opener=_private))
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:  # one charge would pay for two releases
                        raise FederationError(f"{what}: another process on this data is doing this order; end it") from None
                    self._attempts[key] = file
                    undo.callback(self._attempts.pop, key)
                if due:
                    self._write_charge(book, key, what, releases)
                undo.pop_all()

    def record(self, key: str, what: str, releases: Sequence[Release]) -> None:
        """Charge once what no cap limits and every repetition would release with the same noise."""
        with self._locked() as book:
            if key not in book.unfinished:
                self._write_charge(book, key, what, releases)

    def foresee(self, what: str, releases: Sequence[Release]) -> None:
        """Refuse a whole run that the cap does not allow beside what other runs have charged."""
        with self._locked() as book:
            self._check(book, what, releases, [entry for entry in book.entries if entry.run != self.run])

    def beside(self, releases: Sequence[Release]) -> float:
        """The epsilon that these releases and the charges of other runs compose to."""
        with self._locked() as book:
            before = _paid([entry for entry in book.entries if entry.run != self.run])
        return epsilon_of([*before, *releases], self.cap.delta, self.cap.accountant)

    def nonce(self, key: str) -> bytes:
        """Sixteen bytes for the noise of one fit of a charged order; none are ever returned twice, not even after a kill."""
        self._attempt(key)
        with self._locked() as book:
            count = book.nonces + 1
            book.write(kind="nonce", run=self.run, key=key, count=count)
        # a clone of this machine may repeat random bytes, and a restored file its count; both at once are unlikely
        return hashlib.blake2b(str(count).encode(), key=os.urandom(32), digest_size=16, person=b"effuse.nonce").digest()

    def store(self, key: str, blob: bytes) -> None:
        """Keep the reply of a charged order; it may be sent when this returns."""
        file = self._attempt(key)
        with writing(self._place(key)):
            file.truncate(0)
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
            sync_file(self.replies)
        with self._locked() as book:
            if key not in book.unfinished:
                raise RunError(
                    f"{self.path}: the charge of an order is gone; restore the file, which was replaced while in use"
                )
            book.write(kind="reply", run=self.run, key=key, digest=hashlib.sha256(blob).hexdigest())
        self._attempts.pop(key).close()

    def reply(self, key: str) -> bytes | None:
        """The stored reply of an order; None where there is none, or where it is incomplete."""
        path = self._place(key)
        with self._locked() as book:
            digest, _ = book.replies.get(key, ("", ""))
            try:
                blob = path.read_bytes() if digest else b""
            except FileNotFoundError:
                return None
        return blob if digest and hashlib.sha256(blob).hexdigest() == digest else None

    def keep(self, n: int) -> None:
        """Delete all stored replies of this run but the last n; their orders, if repeated, are charged again."""
        with self._locked() as book:
            ours = [key for key, (_, run) in book.replies.items() if run == self.run]
            for key in ours[: max(len(ours) - n, 0)]:
                self._place(key).unlink(missing_ok=True)

    def spent(self) -> tuple[float, float]:
        """The epsilon that all charges compose to, at the delta of the cap."""
        with self._locked() as book:
            return epsilon_of(_paid(book.entries), self.cap.delta, self.cap.accountant), self.cap.delta

    def entries(self) -> list[Entry]:
        """All charges, oldest first."""
        with self._locked() as book:
            return book.entries

    def close(self) -> None:
        """Give up unfinished orders, so that another process on this data may do them; they stay charged."""
        while self._attempts:
            self._attempts.popitem()[1].close()

    def _write_charge(self, book: "_Book", key: str, what: str, releases: Sequence[Release]) -> None:
        said = [dataclasses.asdict(release) for release in releases]
        book.write(kind="charge", run=self.run, key=key, what=what, unit=self.cap.unit, releases=said)

    def _check(self, book: "_Book", what: str, releases: Sequence[Release], entries: Sequence[Entry]) -> None:
        """Refuse what the cap does not allow beside these charges."""
        cap, before = self.cap, _paid(entries)
        if cap.unit != "image" and any(entry.unit != cap.unit for entry in book.entries):
            raise FederationError(
                f"{what} would protect each {cap.unit}, but this site's data has been charged for each image; "
                "let the site name another --ledger"
            )
        if _within(cap, [*before, *releases]):
            return
        parts = releases, before, [*before, *releases]
        asked, spent, together = (epsilon_of(part, cap.delta, cap.accountant) for part in parts)
        raise FederationError(
            f"{what} would cost epsilon {asked:.4g}; with the {spent:.4g} that this site's data has spent that is "
            f"{together:.4g}, and the site's cap is {cap.epsilon:g} (delta {cap.delta:g}, {cap.accountant}); "
            "ask for less, or let the site raise --epsilon"
        )

    def _check_run(self, book: "_Book", what: str, releases: Sequence[Release]) -> None:
        """Refuse what the run's own budget does not allow, however much the site allows all runs together."""
        budget, before = self.budget, _paid([entry for entry in book.entries if entry.run == self.run])
        if budget is None or _within(budget, [*before, *releases]):
            return
        spent = epsilon_of(before, budget.delta, budget.accountant)
        raise FederationError(
            f"{what}: this run has spent epsilon {spent:.4g}, and with this order it would exceed its budget of "
            f"{budget.epsilon:g} (delta {budget.delta:g}, {budget.accountant}); begin another run, with another seed"
        )

    def _place(self, key: str) -> Path:
        """The file of an order's reply; its lock says that a process is at work on it."""
        if not re.fullmatch("[0-9a-f]{16,128}", key):
            raise FederationError(f"an order's key is {key!r}; it must be a hexadecimal digest")
        return self.replies / key

    def _attempt(self, key: str) -> BinaryIO:
        if key not in self._attempts:
            raise FederationError(f"the order {key[:12]} has not been charged here; charge it before it is carried out")
        return self._attempts[key]

    @contextlib.contextmanager
    def _locked(self) -> Iterator["_Book"]:
        """The ledger as it is on disk, while no other process can write on it."""
        with writing(self.path):
            if not self._made:
                _make(self.path, self.replies)
                self._made = True
            with held(self.path, wait=True), open(self.path, "r+b", buffering=0) as file:
                yield _Book(self.path, file)


class _Book:
    """The lines of a ledger. Each names the digest of the line before it, so that none can go missing unseen."""

    def __init__(self, path: Path, file: Any) -> None:
        self.file = file
        self.entries: list[Entry] = []
        self.unfinished: dict[str, Entry] = {}  # charges without a reply
        self.replies: dict[str, tuple[str, str]] = {}  # digest and run, by key, oldest first
        self.nonces = 0
        self.last = ""
        blob = file.read()
        whole = blob.rfind(b"\n") + 1
        if whole < len(blob):  # killed while writing: that call never returned
            file.truncate(whole)
            os.fsync(file.fileno())
        for number, line in enumerate(blob[:whole].splitlines(keepends=True), 1):
            try:
                self._take(line)
            except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, RecipeError) as error:
                raise RunError(
                    f"{path}, line {number}: damaged or changed by hand ({error}); nothing is released until the file is "
                    "restored from a backup"
                ) from None

    def write(self, **said: Any) -> None:
        """Add a line; it is on disk when this returns."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"time": stamp, **said, "after": self.last}).encode() + b"\n"
        self.file.seek(0, os.SEEK_END)
        if self.file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self.file.fileno())
        self._take(line)

    def _take(self, line: bytes) -> None:
        said = json.loads(line)
        if said["after"] != self.last:
            raise ValueError("it does not follow the line before it")
        kind, key = said["kind"], said["key"]
        if kind == "charge":
            paid = tuple(Release(**release) for release in said["releases"])
            merged(paid)  # refuses what is no release
            self.entries.append(Entry(said["time"], said["run"], key, said["what"], said["unit"], paid))
            self.unfinished[key] = self.entries[-1]
            self.replies.pop(key, None)
        elif kind == "reply":
            self.unfinished.pop(key)
            self.replies[key] = said["digest"], said["run"]
        elif kind == "nonce":
            self.nonces = int(said["count"])
        else:
            raise ValueError(f"{kind!r} is unknown to this version")
        self.last = hashlib.sha256(line).hexdigest()[:32]


def _paid(entries: Sequence[Entry]) -> list[Release]:
    return [release for entry in entries for release in entry.releases]


def _within(budget: Budget, releases: Sequence[Release]) -> bool:
    """Whether releases keep a budget. Renyi divergences, which never ask for less, are tried first: they are quick."""
    return any(epsilon_of(releases, budget.delta, by) <= budget.epsilon for by in ("rdp", budget.accountant))


def ledger_folder() -> Path:
    """Where ledgers are: EFFUSE_LEDGERS, or effuse/ledgers in the user's folder of states."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("EFFUSE_LEDGERS") or Path(home) / "effuse" / "ledgers")


def ledger_path(digest: str) -> Path:
    """The ledger of the data with this digest."""
    return ledger_folder() / f"{digest}.jsonl"


def order_key(*parts: bytes) -> str:
    """The digest of all that an order depends on: the manifest, the state it starts from, the order and the message."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make(path: Path, replies: Path) -> None:
    """Create a ledger and its folders, for their owner only; all names are on disk when this returns."""
    new = [folder for folder in path.parents if not folder.exists()]
    replies.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in new:
        folder.chmod(0o700)
    with open(path, "ab", opener=_private) as file:
        os.fsync(file.fileno())
    for folder in (path.parent, *(f.parent for f in new)):
        sync_file(folder)
