"""Simulated outages. What FedPhD does in them: test_fedphd.py."""

import pytest

from effuse.algorithms.shared.outages import outage_warnings, reachable_edges, validate_outages

OUTAGES = ((2, 1), (3, 0), (3, 2))


def test_reachable_edges():
    assert [reachable_edges(OUTAGES, 3, r) for r in (1, 2, 3)] == [[0, 1, 2], [0, 2], [1]]


@pytest.mark.parametrize(
    ("outages", "why"),
    [
        (((0, 0),), "there is no round 0"),
        (((1, 3),), "there is no round 1 with an edge 3"),
        ((*OUTAGES, (3, 1)), "no edge is left in round 3"),
    ],
)
def test_impossible_outages_are_refused(outages, why):
    validate_outages(OUTAGES, 3)
    with pytest.raises(ValueError, match=why):
        validate_outages(outages, 3)


def test_outages_after_the_last_round_cause_warnings():
    assert outage_warnings(OUTAGES, 3) == []
    assert outage_warnings(OUTAGES, 2) == ["outages: round 3 is after the last one, 2"] * 2
