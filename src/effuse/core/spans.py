"""Where a run's time goes: named spans whose seconds add up to the whole; nothing is measured unless somebody asked."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

# what a reader is shown, in this order; `client` is a job's own code, loading weights; `workers` is waiting for processes
KINDS = ("data", "step", "sample", "client", "aggregate", "evaluate", "checkpoint", "wire", "workers")
WAITING = ""  # a thread that waits for others of this process: the time is theirs
MOST_EVENTS = 20_000  # in a trace, about 2 MB: a long run's trace shows how it began, its sums are of all

_profile: "Profile | None" = None
_OFF = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Charge the time within to `name`, less what spans inside it take; must not hold a `yield`."""
    return _OFF if _profile is None else _Span(_profile, name)


@contextlib.contextmanager
def profiling() -> Iterator["Profile"]:
    """Measure every span until the end."""
    global _profile
    _profile = Profile()
    try:
        yield _profile
    finally:
        _profile.close()
        _profile = None


class Profile:
    """Seconds by name, and the first spans one by one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, int, float, float]] = []  # name, thread, begin, seconds
        self.dropped = 0
        self.began = self._last = time.perf_counter()
        self.total = 0.0
        self._open: dict[int, list[tuple[str, float]]] = defaultdict(list)  # each thread's spans, the innermost last
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        _wait_for_device()
        with self._lock:
            now = self._charge()
            self._open[threading.get_ident()].append((name, now))

    def leave(self) -> None:
        _wait_for_device()
        with self._lock:
            now, me = self._charge(), threading.get_ident()
            name, began = self._open[me].pop()
            if not self._open[me]:
                del self._open[me]
            if len(self.events) < MOST_EVENTS and name != WAITING:
                self.events.append((name, me, began, now - began))
            else:
                self.dropped += name != WAITING

    def close(self) -> None:
        with self._lock:
            self.total = self._charge() - self.began

    def _charge(self) -> float:
        """Give the time since the last change to the innermost spans; threads at work together share it."""
        now = time.perf_counter()
        busy = [names[-1][0] for names in self._open.values() if names[-1][0] != WAITING]
        for name in busy:
            self.seconds[name] += (now - self._last) / len(busy)
        self._last = now
        return now

    def report(self) -> dict[str, Any]:
        """Seconds and share of every kind of span, and of what was in none."""
        seconds = {k: self.seconds[k] for k in KINDS if k in self.seconds}
        seconds["other"] = self.total - sum(seconds.values())
        shares = {k: {"seconds": s, "share": s / self.total} for k, s in seconds.items()}
        return {"seconds": self.total, "spans": shares}

    def trace(self) -> dict[str, Any]:
        """The spans as Chrome, Perfetto and others open them."""
        lanes: dict[int, int] = {}
        events = [
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": lanes.setdefault(thread, len(lanes)),
                "ts": round(1e6 * (began - self.began), 1),
                "dur": round(1e6 * seconds, 1),
            }
            for name, thread, began, seconds in self.events
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": self.report() | {"dropped": self.dropped}}


class _Span(contextlib.AbstractContextManager[None]):
    def __init__(self, profile: Profile, name: str) -> None:
        self.profile, self.name = profile, name

    def __enter__(self) -> None:
        self.profile.enter(self.name)

    def __exit__(self, *exception: Any) -> None:
        self.profile.leave()


def _wait_for_device() -> None:
    """A GPU runs behind; this thread's stream alone, because another's may be recording."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
