"""How evenly clients spread over edges, and how mixed the edges become: FedPhD's Eq. 25 against random choice (its Fig. 6).

`python benchmarks/edge_balance.py` prints a table; the rule is the algorithm's own `edge_probabilities`.
"""

import argparse
import json
from typing import NamedTuple

import numpy as np

from effuse.algorithms.shared.homogeneity import edge_probabilities, homogeneity

CLASSES, IMAGES = 10, 2500  # of a client, in two classes


class Cycles(NamedTuple):
    """What many simulated cycles ended with."""

    assigned: np.ndarray  # cycles x edges: clients that came to each edge
    scores: np.ndarray  # cycles x edges: homogeneity at the cycle's end

    @property
    def variance(self) -> float:
        """Of the clients at edge 0."""
        return float(self.assigned[:, 0].var())


def two_class_clients(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Histograms of clients with two classes each; of every ten clients each class is held by two."""
    counts = np.zeros((clients, CLASSES))
    for first in range(0, clients, CLASSES):
        order, shift = rng.permutation(CLASSES), rng.integers(1, CLASSES)
        for k in range(first, min(first + CLASSES, clients)):
            counts[k, [order[k - first], order[(k - first + shift) % CLASSES]]] = IMAGES / 2
    return counts


def simulated(
    cycles: int,
    *,
    clients: int = 20,
    cohort: int = 4,
    edges: int = 2,
    rounds: int = 5,
    a: float = 15_000.0,
    b: float = 0.0,
    selection: str = "homogeneity",
    snapshot: bool = True,
    seed: int = 0,
) -> Cycles:
    """Cycles of `rounds` rounds; with `snapshot` all clients of a round see the edges as they were at its start."""
    rng = np.random.default_rng(seed)
    q_u = np.full(CLASSES, 1 / CLASSES)
    assigned, scores = np.zeros((cycles, edges)), np.zeros((cycles, edges))
    for cycle in range(cycles):
        own = two_class_clients(clients, rng)
        held = np.zeros((edges, CLASSES))
        for _ in range(rounds):
            here = own[rng.choice(clients, cohort, replace=False)]
            for some in [here] if snapshot else here[:, None]:
                uniform = np.full((len(some), edges), 1 / edges)
                P = uniform if selection == "random" else edge_probabilities(some, held, a, b, q_u)
                chosen = (P.cumsum(-1) > rng.random((len(some), 1))).argmax(-1)
                np.add.at(held, chosen, some)
                np.add.at(assigned[cycle], chosen, 1)
        scores[cycle] = homogeneity(held, q_u)
    return Cycles(assigned, scores)


def room(per_edge: int) -> float:
    """A b that keeps Eq. 25 positive when an edge holds its share of a cycle; 0 for two clients an edge."""
    return max(0.0, 5 * per_edge * IMAGES - 25_000.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the cycles")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    asked = parser.parse_args()
    cycles = max(1, asked.cycles // (20 if asked.quick else 1))
    rows = []
    if not asked.json:
        print("edges  C/N_e  choice        clients at edge 0: mean  variance   score: mean    std")
    for edges in (2, 3, 4):
        for per_edge in (2, 4, 6, 8):
            cohort = per_edge * edges
            b = room(per_edge)
            for selection in ("homogeneity", "random"):
                found = simulated(cycles, clients=5 * cohort, cohort=cohort, edges=edges, b=b, selection=selection)
                mean, score, deviation = found.assigned[:, 0].mean(), found.scores.mean(), found.scores.std()
                row = {
                    "edges": edges,
                    "per_edge": per_edge,
                    "selection": selection,
                    "mean": mean,
                    "variance": found.variance,
                }
                rows.append(row | {"score": score, "score_std": deviation})
                if not asked.json:
                    print(
                        f"{edges:5d}  {per_edge:5d}  {selection:12s}  {mean:23.2f}  {found.variance:8.2f}   "
                        f"{score:11.3f}  {deviation:5.3f}"
                    )
    if asked.json:
        print(json.dumps({"cycles": cycles, "rows": rows}))


if __name__ == "__main__":
    main()
