"""Runs that are struck at any moment: each in a process forked from this warm one, so that a kill costs a moment.

A stroke falls on the k-th event of a kind. Events are counted in an undisturbed run, and k is drawn as a share of them.
"""

import builtins
import ctypes
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from timeless import timeless

from effuse.machines.eager import Eager
from effuse.runs.folder import RunFolder
from effuse.transport import processes
from effuse.transport.worker import Worker

SURVIVED, STOPPED, FAILED = 0, 10, 11  # how a forked process ends: it finished, by an own error, or by a foreign one


class Stroke(NamedTuple):
    """What happens, at which share of all events of a kind."""

    what: str  # kill, power, torn, full or timer
    event: str  # write, sync, rename, delete, job, fit or draw; for a timer, time
    at: float  # between 0 and 1
    worker: int | None = None  # in this worker process; None: in the server's

    def __str__(self) -> str:
        where = "" if self.worker is None else f" in worker {self.worker}"
        return f"{self.what} at {self.at:.4f} of all {self.event}s{where}"


class Fate:
    """Counts the events of this process, and strikes at one of them."""

    def __init__(self, root: Path, stroke: Stroke | None = None, known: Counter[str] | None = None, seed: int = 0) -> None:
        self.root, self.stroke, self.draw = str(root.resolve()), stroke, random.Random(seed)
        self.known = known or Counter()
        self.counts: Counter[str] = Counter()
        self.loose: dict[str, int] = {}  # files that may not have reached the disk -> bytes that have
        self.worker: int | None = None
        self.full = False

    def number(self) -> int:
        """Which event of its kind the stroke falls on, from 1."""
        assert self.stroke is not None
        return 1 + int(self.stroke.at * max(0, self.known[self.stroke.event] - 1))

    def happens(self, event: str, data: Any = None, file: Any = None) -> None:
        self.counts[event] += 1
        stroke = self.stroke
        if self.full and event == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if stroke is None or (stroke.event, stroke.worker) != (event, self.worker) or self.counts[event] != self.number():
            return
        if stroke.what == "full":
            self.full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if stroke.what == "torn":
            file.write(data[: self.draw.randrange(len(data) + 1)])
            file.flush()
        if stroke.what == "power":
            for path, held in self.loose.items():
                if os.path.exists(path):
                    os.truncate(path, self.draw.randint(held, max(held, os.path.getsize(path))))
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Watch what this process writes and computes; it is forked, so nothing is undone."""
        sync, rename, delete, fit, draw = os.fsync, os.replace, os.unlink, Eager.fit, Eager.generate
        perform, plain_open = Worker.perform, builtins.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            found = plain_open(file, mode, *args, **kwargs)
            path = os.path.realpath(file) if isinstance(file, (str, os.PathLike)) else ""
            if not path.startswith(self.root) or not set(mode) & set("wax+"):
                return found
            self.loose[path] = self.loose.get(path, os.path.getsize(path))
            return Watched(found, self)

        def synced(handle: int) -> None:
            self.happens("sync")
            sync(handle)
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path in self.loose:
                self.loose[path] = os.path.getsize(path)

        def renamed(old: Any, new: Any, **kwargs: Any) -> None:
            self.happens("rename")
            rename(old, new, **kwargs)
            if (held := self.loose.pop(os.path.realpath(old), None)) is not None:
                self.loose[os.path.realpath(new)] = held

        def deleted(path: Any, **kwargs: Any) -> None:
            if str(path).startswith(self.root):
                self.happens("delete")
            delete(path, **kwargs)

        def after(event: str, plain: Callable) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                done = plain(*args, **kwargs)
                self.happens(event)
                return done

            return call

        builtins.open = io.open = opened
        os.fsync, os.replace, os.unlink = synced, renamed, deleted
        Eager.fit, Eager.generate = after("fit", fit), after("draw", draw)
        Worker.perform = after("job", perform)
        forked = SimpleNamespace(**vars(subprocess))
        forked.Popen = lambda command, **options: ForkedWorker(self, [int(word) for word in command[4:]])
        processes.subprocess = forked


class Watched:
    """A file whose writes are events."""

    def __init__(self, file: Any, fate: Fate) -> None:
        self.file, self.fate = file, fate

    def write(self, data: Any) -> int:
        self.fate.happens("write", data, self.file)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.file.close()


class ForkedWorker:
    """A worker process that is forked instead of started, since an import of torch takes longer than a whole run."""

    numbers = 0

    def __init__(self, fate: Fate, handles: list[int]) -> None:
        number, self.code = ForkedWorker.numbers, None
        ForkedWorker.numbers += 1
        self.pid = os.fork()
        if self.pid:
            return
        dies_with_parent()
        fate.worker, fate.counts = number, Counter()
        first = 3
        for handle in sorted(handles):  # the server's ends of the sockets must be its own alone
            os.closerange(first, handle)
            first = handle + 1
        os.closerange(first, 4096)
        ended(lambda: processes_serve(handles))

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 60.0)
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("worker", until)
            else:
                time.sleep(0.005)
        return self.code


def processes_serve(handles: list[int]) -> None:
    from effuse.transport.serving import serve

    serve(*handles)


def dies_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def ended(action: Callable[[], Any]) -> None:
    """Do something as the last act of a forked process; its exit code says how that ended."""
    from effuse.core.errors import EffuseError

    code = SURVIVED
    try:
        action()
    except EffuseError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = STOPPED
    except BaseException:
        traceback.print_exc()
        code = FAILED
    sys.stderr.flush()
    os._exit(code)


def forked(action: Callable[[], Any], log: Path, after: float | None = None) -> int:
    """The exit code of an action in a process of its own, whose output goes to a file; a timer kills it `after` seconds."""
    child = os.fork()
    if child == 0:
        dies_with_parent()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        ended(action)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)  # a child that has ended is a zombie until it is waited for
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(run: Path, traffic: bool = True) -> dict[str, Any]:
    """What a run must end in, whatever happened to it: all of its records but times."""
    records = [timeless(record) for record in RunFolder(run).records()]
    result, ledger = (json.loads((run / name).read_text()) for name in ("result.json", "ledger.json"))
    for key in ("seconds", "round_seconds"):
        del result[key]
    if not traffic:  # where orders were sent again, that was traffic, too
        for part in (*records, result):
            del part["traffic"]
        ledger = result["figures"] = None
    return {"result": result, "rounds.jsonl": records, "ledger": ledger}
