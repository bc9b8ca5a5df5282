"""Spans: their seconds add up, also for nested spans and parallel threads."""

import json
import threading

import pytest

from effuse.core import spans
from effuse.core.spans import WAITING, profiling, span


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    now = [0.0]
    monkeypatch.setattr(spans.time, "perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def seconds(profile):
    return {name: s["seconds"] for name, s in profile.report()["spans"].items()}


def test_the_time_of_an_inner_span_is_not_charged_to_the_outer_one(clock):
    """1 s outside, 2 s of a step, 3 s of data within it, 4 s more of the step: 6 + 3 + 1 = 10."""
    with profiling() as profile:
        clock(1)
        with span("step"):
            clock(2)
            with span("data"):
                clock(3)
            clock(4)
    assert seconds(profile) == {"data": 3, "step": 6, "other": 1}
    report = profile.report()
    assert report["seconds"] == 10 and sum(s["share"] for s in report["spans"].values()) == pytest.approx(1)


def test_parallel_threads_share_the_time(clock):
    """2 s of one thread alone, then 4 s of two, while the main thread waits: 2 + 2 s and 2 s."""
    steps = [threading.Event() for _ in range(4)]

    def first():
        with span("step"):
            steps[0].set()
            steps[2].wait()

    def second():
        with span("client"):
            steps[1].set()
            steps[3].wait()

    with profiling() as profile, span("aggregate"), span(WAITING):
        one, two = threading.Thread(target=first), threading.Thread(target=second)
        one.start()
        steps[0].wait()
        clock(2)
        two.start()
        steps[1].wait()
        clock(4)
        steps[2].set()
        one.join()
        steps[3].set()
        two.join()
    assert seconds(profile) == {"step": 4, "client": 2, "aggregate": 0, "other": 0}


def test_nothing_is_measured_without_profiling():
    assert span("step") is span("data")


def test_a_long_run_leaves_a_small_trace(clock, monkeypatch):
    """Of five spans of a second each, the trace shows three; the sums are of all five."""
    monkeypatch.setattr(spans, "MOST_EVENTS", 3)
    with profiling() as profile:
        for _ in range(5):
            with span("step"):
                clock(1)
    trace = json.loads(json.dumps(profile.trace()))
    assert [e["ts"] for e in trace["traceEvents"]] == [0, 1e6, 2e6] and all(e["dur"] == 1e6 for e in trace["traceEvents"])
    assert trace["otherData"]["dropped"] == 2 and seconds(profile)["step"] == 5


def test_a_span_ends_with_an_error_too(clock):
    with pytest.raises(ValueError), profiling() as profile:
        with span("step"):
            clock(1)
            raise ValueError
    assert seconds(profile) == {"step": 1, "other": 0}
    assert span("step") is span("data"), "profiling has ended"
