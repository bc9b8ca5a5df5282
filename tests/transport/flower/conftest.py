"""A clock for a server that waits for silent sites: only its own sleep takes time, and takes none of ours."""

import time
import types

import pytest

from effuse.transport.flower import server as federation
from effuse.transport.flower import terms as pending


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The seconds that the server slept."""
    naps: list[float] = []
    clock = types.SimpleNamespace(
        monotonic=lambda: 1e6 + sum(naps), sleep=naps.append, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(federation, "time", clock)
    monkeypatch.setattr(pending, "time", clock)
    return naps
