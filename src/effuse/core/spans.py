"""A profile of a run: named spans whose seconds add up to the total. Nothing is measured unless profiling is on."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

# in the order of the report; `client` is a job's own code and the loading of weights, `workers` the wait for processes
KINDS = ("data", "step", "sample", "client", "aggregate", "evaluate", "checkpoint", "wire", "workers")
WAITING = ""  # a thread waits for other threads of this process, which are charged the time
MOST_EVENTS = 20_000  # in a trace, about 2 MB; the sums are over all events

_profile: "Profile | None" = None
_OFF = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Charge the time within to `name`, without the time of spans inside it. It must not contain a `yield`."""
    return _OFF if _profile is None else _Span(_profile, name)


@contextlib.contextmanager
def profiling() -> Iterator["Profile"]:
    """Measure every span within."""
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
        # the open spans of each thread, the innermost last
        self._open: dict[int, list[tuple[str, float]]] = defaultdict(list)
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        _wait_for_device()
        with self._lock:
            now = self._charge()
            self._open[threading.get_ident()].append((name, now))

    def leave(self) -> None:
        _wait_for_device()
        with self._lock:
            now, thread = self._charge(), threading.get_ident()
            name, began = self._open[thread].pop()
            if not self._open[thread]:
                del self._open[thread]
            if len(self.events) < MOST_EVENTS and name != WAITING:
                self.events.append((name, thread, began, now - began))
            else:
                self.dropped += name != WAITING

    def close(self) -> None:
        with self._lock:
            self.total = self._charge() - self.began

    def _charge(self) -> float:
        """Charge the time since the last change to the innermost spans; threads that work at the same time share it."""
        now = time.perf_counter()
        busy = [names[-1][0] for names in self._open.values() if names[-1][0] != WAITING]
        for name in busy:
            self.seconds[name] += (now - self._last) / len(busy)
        self._last = now
        return now

    def report(self) -> dict[str, Any]:
        """Seconds and share of every kind of span, and of the time in none."""
        seconds = {k: self.seconds[k] for k in KINDS if k in self.seconds}
        seconds["other"] = self.total - sum(seconds.values())
        shares = {k: {"seconds": s, "share": s / self.total} for k, s in seconds.items()}
        return {"seconds": self.total, "spans": shares}

    def trace(self) -> dict[str, Any]:
        """The spans in the trace event format of Chrome and Perfetto."""
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
    """Wait for this thread's GPU stream only, because another thread's may be capturing a graph."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
