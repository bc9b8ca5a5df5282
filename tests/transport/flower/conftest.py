"""A clock for a server that waits for silent sites: time passes only while the server sleeps, and tests do not wait."""

import time
import types

import pytest

from effuse.transport.flower import enrolment, server, terms


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The seconds that the server slept."""
    naps: list[float] = []
    clock = types.SimpleNamespace(
        monotonic=lambda: 1e6 + sum(naps), sleep=naps.append, strftime=time.strftime, gmtime=time.gmtime
    )
    for module in (enrolment, server, terms):
        monkeypatch.setattr(module, "time", clock)
    return naps


@pytest.fixture
def impatient(monkeypatch) -> None:
    """A server that polls, lists nodes and invites silent clients every hundredth of a second."""
    for module, name in ((server, "POLL"), (server, "LIST_NODES"), (enrolment, "INVITE_AGAIN")):
        monkeypatch.setattr(module, name, 0.01)
