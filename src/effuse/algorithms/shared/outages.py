"""Simulated outages: edges that do not answer in given rounds, to test what an algorithm makes of it."""

from typing import TypeAlias

Outages: TypeAlias = tuple[tuple[int, int], ...]  # (round, edge); rounds count from 1, edges from 0


def reachable_edges(outages: Outages, edges: int, r: int) -> list[int]:
    """The edges that answer in round r."""
    return [e for e in range(edges) if (r, e) not in outages]


def validate_outages(outages: Outages, edges: int) -> None:
    """Refuse an outage of an edge that does not exist, and a round without any edge."""
    for r, e in outages:
        if not (r >= 1 and 0 <= e < edges):
            raise ValueError(f"outages: there is no round {r} with an edge {e}; rounds count from 1, edges from 0")
        if not reachable_edges(outages, edges, r):
            raise ValueError(f"outages: no edge is left in round {r}; leave one")


def outage_warnings(outages: Outages, rounds: int) -> list[str]:
    """A warning for every outage after the run's last round."""
    return [f"outages: round {r} is after the last one, {rounds}" for r, _ in outages if r > rounds]
