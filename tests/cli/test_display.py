"""The progress of a run, by a clock that the tests set."""

import io
import re

import pytest
from rich.console import Console
from toy import toy_recipe

from effuse.cli import display
from effuse.cli.display import Display
from effuse.core.machine import Meter
from effuse.core.recipe import Evaluate
from effuse.runs.records import RoundRecord, Seconds, Sums, Traffic

ZERO = Sums(up=0, down=0, total=0)
TRAFFIC = Traffic(parameters=ZERO, bytes=Sums(up=500, down=500, total=1000), wire_bytes=ZERO, messages=ZERO, links={})


@pytest.fixture
def clock(monkeypatch):
    """The time, which only tests advance."""
    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def shown(monkeypatch, width: int | None) -> tuple[Display, io.StringIO]:
    """A display on a terminal of that width, or in a pipe; its live line is only drawn when a test asks."""
    screen = io.StringIO()
    options = {"force_terminal": True, "width": width} if width else {"width": 1000}
    monkeypatch.setattr(display, "console", lambda: Console(file=screen, highlight=False, markup=False, **options))
    return Display(), screen


def closed(federated: int, metrics=None, evaluation: float = 0.0) -> RoundRecord:
    seconds = Seconds(round=10.0, total=10.0 + evaluation)
    facts = {"t": federated - 1, "phase": "federate", "federated": federated, "loss": 0.5, "images": 100}
    return RoundRecord(**facts, seconds=seconds, traffic=TRAFFIC, metrics=metrics)


def begun(page: Display, rounds: int = 4, every: int = 0) -> Meter:
    meter = Meter()
    page.started(toy_recipe(rounds=rounds, evaluate=Evaluate(every=every)), "runs/a", 0, meter, 0)
    return meter


def test_the_phase_is_whole_at_80_columns(monkeypatch, clock):
    """The bar goes first, then what matters least; the phase and the time left stay."""
    lines = {}
    for width in (160, 80, 60, 50):
        page, _ = shown(monkeypatch, width)
        meter = begun(page, rounds=12_000)
        meter.images = 123_456
        clock[0] += 100
        page.replied(11_999, 1_234, 0.12345)
        lines[width] = str(page._line())
        assert len(lines[width]) <= width - 3 and lines[width].endswith("  round 12000, client 1234 done")
    assert "╌" in lines[160] and "╌" not in lines[80] and "images/s" in lines[160]
    assert "left" in lines[80] and "left" in lines[60] and "elapsed" not in lines[60]


def test_the_time_left_comes_from_finished_clients_and_does_not_rise(monkeypatch, clock):
    """Three clients, 4 rounds: a client after 10 s means 11 x 10 s; a slow second one leaves that where it is."""
    page, _ = shown(monkeypatch, 120)
    begun(page)
    assert " ? left" in str(page._line())
    clock[0] += 10
    page.replied(0, 0, 0.5)
    assert "1m50s left" in str(page._line())
    clock[0] += 50
    assert "1m50s left" in str(page._line())
    page.replied(0, 1, 0.5)
    assert "1m50s left" in str(page._line()), "60 s for two of twelve would be five minutes"
    page.replied(0, 2, 0.5)
    page.closed(closed(1))
    assert "3m00s left" in str(page._line()), "a new round tells what it knows: 60 s for each of three"


def test_an_evaluation_is_no_training(monkeypatch, clock):
    """100 images in 10 s stay 10 a second during an evaluation of 90 s, which counts for the time left."""
    page, screen = shown(monkeypatch, 120)
    meter = begun(page, rounds=2, every=1)
    clock[0] += 10
    meter.images = 100
    page.phase("checkpoint")
    page.evaluating(400)
    clock[0] += 90
    meter.evaluations = 100
    assert "10 images/s" in str(page._line()) and str(page._line()).endswith("  evaluating: 25%")
    page.closed(closed(1, {"fid": 3.0}, evaluation=90.0))
    assert "1m40s left" in str(page._line()), "10 s for a round and 90 s for its evaluation"
    assert "round 1/2, loss 0.5000, 10 images/s, 1.0 kB sent so far, fid 3, 1m40s left" in screen.getvalue()


def test_a_waiting_server_says_for_whom_and_until_when(monkeypatch, clock):
    page, _ = shown(monkeypatch, 120)
    page.waiting([0, 2], float("inf"))
    assert str(page._line()).endswith("waiting for clients 0, 2"), "before the first round"
    begun(page)
    page.waiting([2], clock[0] + 60)
    first = str(page._line())
    assert re.search(r"waiting for client 2 until \d\d:\d\d:\d\d$", first)
    clock[0] += 1
    assert str(page._line()) != first, "it ticks"
    page.waiting([], float("inf"))
    assert "waiting" not in str(page._line())


def test_a_pipe_gets_a_line_a_round_and_word_of_long_evaluations(monkeypatch, clock):
    page, screen = shown(monkeypatch, None)
    meter = begun(page, rounds=2)
    assert page.live is None
    page.closed(closed(1))
    page.evaluating(1000)
    for evaluations in (100, 200, 300):
        clock[0] += 15
        meter.sampled(100)
        assert meter.evaluations == evaluations
    page.closed(closed(2, {"kid": 0.25}, evaluation=45.0))
    lines = screen.getvalue().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    words = [line.partition(" ")[2] for line in lines]
    assert words[0] == "fedavg, 3 clients, 2 rounds, into runs/a" and words[1].startswith("round 1/2, loss 0.5000")
    assert words[2] == "evaluating: 20%, 30s so far", "15 s are not worth a line"
    assert words[3].endswith("kid 0.25") and len(words) == 4


def test_ci_is_no_terminal(monkeypatch):
    """FORCE_COLOR makes rich take any file for a terminal, and logs would be full of cursor movements."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not display.console().is_terminal and Display().live is None
