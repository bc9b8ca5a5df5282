"""What two hostile clients of ten do to a classifier of digits, by attack and by rule of aggregation.

    python benchmarks/hostile.py [--partition skewed|equal] [--seeds 0 1 2] [--quick] [--json]

The server is the one of `effuse serve`, and refuses what it would refuse there; only the network between is left out.
The hostile clients, 0 and 1, train as the others do, and then change their answer:

reversed     the update with the other sign
minus        minus the model
uphill x10   the update with the other sign, ten times as long
x1e6         the update, a million times as long
1e300        the reversed update, with a weight of 1e300

Accuracy is on held-out digits after the last round, as the mean over the seeds. `refused` is the share of hostile answers
that the server rejected, `named` the share of the accepted ones that its log told the operator to look at.
`blamed` is the share of honest answers that were rejected or named.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.aggregate import Average, Reducer
from effuse.core.federation import Order
from effuse.core.model import Model
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.reducers import Clipped, Krum, Median, Trimmed
from effuse.core.solvers import Adam
from effuse.core.wire import decode, encode
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import Iid
from effuse.data.sources import Digits
from effuse.metrics.accuracy import Accuracy
from effuse.models.resnet import Cnn
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.transport.context import EngineContext
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.messages import ANSWER, ENROLMENT, INVITATION, ORDER, Channel, Enrolment, Invitation, Packet
from effuse.transport.flower.server import Flower
from effuse.transport.flower.site import Site
from effuse.transport.flower.terms import Terms

CLIENTS, HOSTILE, ROUNDS = 10, (0, 1), 8
PARTITIONS = {"skewed": LabelSkew(beta=0.5), "equal": Iid()}
RULES: dict[str, Reducer] = {
    "mean": Average(),
    "declared": Average(weights=(1.0,) * CLIENTS),
    "capped": Average(cap=100.0),
    "clipped": Clipped(norm=1.0),
    "median": Median(),
    "trimmed": Trimmed(share=0.2),
    "krum": Krum(f=2),
}
Change = Callable[[Model, Update], Update]


def moved(factor: float) -> Change:
    """The update, times a factor."""
    return lambda sent, own: dataclasses.replace(
        own, model=own.model.holding(sent.params + factor * (own.model.params - sent.params))
    )


def minus(sent: Model, own: Update) -> Update:
    return dataclasses.replace(own, model=own.model.holding(-1.0 * own.model.params))


def heavy(sent: Model, own: Update) -> Update:
    return dataclasses.replace(moved(-1.0)(sent, own), weight=1e300)


ATTACKS: dict[str, Change | None] = {
    "none": None,
    "reversed": moved(-1.0),
    "minus": minus,
    "uphill x10": moved(-10.0),
    "x1e6": moved(1e6),
    "1e300": heavy,
}


class OneProcess(Channel):
    """All sites in this process; each does its work when its reply is collected."""

    def __init__(self, folder: Path, change: Change | None) -> None:
        self.sites = [Site(folder / str(k), k, None, Consent(), "cpu", lambda words: None) for k in range(CLIENTS)]
        self.change = change
        self.packets: dict[str, tuple[int, Packet]] = {}
        self.sent = 0

    def open(self) -> None:
        """There is nothing to open."""

    def close(self) -> None:
        """There is nothing to close."""

    def nodes(self) -> set[int]:
        return set(range(CLIENTS))

    def owner(self, node: int) -> int:
        return node

    def signed(self, invitation: Invitation) -> Invitation:
        return invitation

    def send(self, node: int, packet: Packet, life: float) -> str:
        self.sent += 1
        self.packets[str(self.sent)] = node, packet
        return str(self.sent)

    def collect(self, tickets: Sequence[str], patience: float) -> Iterator[tuple[str, Packet]]:
        for ticket in tickets:
            if ticket in self.packets:
                yield ticket, self._reply(*self.packets.pop(ticket))

    def _reply(self, client: int, packet: Packet) -> Packet:
        site = self.sites[client]
        if packet.kind == INVITATION:
            return Packet(ENROLMENT, encode(site.enrol(decode(packet.head, Invitation)), Enrolment))
        if packet.kind != ORDER:
            return Packet(ANSWER)
        receipt, body = site.perform(packet.head, packet.body)
        if self.change is not None and client in HOSTILE:
            job = FedAvg.jobs[decode(packet.head, Order).job]
            sent = decode(packet.body, job.arguments).model
            body = encode(self.change(sent, decode(body, Update)), Update)
        return Packet(ANSWER, receipt, body)


def recipe(rule: Reducer, partition: str, seed: int, rounds: int) -> Recipe:
    """Ten clients that train a small classifier of 8x8 digits."""
    return Recipe(
        data=Digits(),
        clients=CLIENTS,
        partition=PARTITIONS[partition],
        model=Cnn(widths=(16, 32)),
        task=Classify(),
        algorithm=FedAvg(local=Adam(lr=2e-3, batch=32, epochs=2), aggregate=rule),
        rounds=rounds,
        seed=seed,
        threads=1,
        evaluate=Evaluate(grid=0, metrics=(Accuracy(),)),
    )


def measured(rule: Reducer, change: Change | None, partition: str, seed: int, rounds: int) -> dict[str, float]:
    """The accuracy of one run, and what its server's log says of whom."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        channel, terms = OneProcess(folder / "sites", change), Terms(quorum=CLIENTS - len(HOSTILE))

        def served(context: EngineContext) -> Flower:
            return Flower(context, channel, terms, "hostile")

        result = run(recipe(rule, partition, seed, rounds), folder / "run", device="cpu", served=served)
        log = (folder / "run" / "federation.log").read_text()
    refused, named = re.findall(r"client (\d+)'s answer is rejected", log), re.findall(r"look at client (\d+)", log)
    found = {"refused": _hostile(refused), "named": _hostile(named)}
    return found | {
        "accuracy": result.metrics["accuracy"].value,
        "blamed": len(refused) + len(named) - sum(found.values()),
    }


def _hostile(clients: Sequence[str]) -> int:
    """How many of these lines are about a hostile client."""
    return sum(int(client) in HOSTILE for client in clients)


def cell(rule: str, attack: str, partition: str, seeds: Sequence[int], rounds: int) -> dict[str, Any]:
    """One rule under one attack, over the seeds."""
    runs = [measured(RULES[rule], ATTACKS[attack], partition, seed, rounds) for seed in seeds]
    answers = rounds * len(seeds)
    accuracies = [found["accuracy"] for found in runs]
    refused, named, blamed = (sum(found[key] for found in runs) for key in ("refused", "named", "blamed"))
    accepted = answers * len(HOSTILE) - refused
    return {
        "rule": rule,
        "attack": attack,
        "accuracy": statistics.fmean(accuracies),
        "lowest": min(accuracies),
        "highest": max(accuracies),
        "refused": refused / (answers * len(HOSTILE)),
        "named": named / accepted if accepted else None,
        "blamed": blamed / (answers * (CLIENTS - len(HOSTILE))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partition", choices=PARTITIONS, default="skewed", help="how the digits are divided")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--quick", action="store_true", help="one round, one seed, two rules and two attacks")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rules, attacks, rounds = list(RULES), list(ATTACKS), ROUNDS
    if arguments.quick:
        rules, attacks, rounds, arguments.seeds = ["mean", "median"], ["minus", "1e300"], 1, [0]
    rows = []
    for rule in rules:
        for attack in attacks:
            rows.append(row := cell(rule, attack, arguments.partition, arguments.seeds, rounds))
            if not arguments.json:
                tell(row)
    if arguments.json:
        print(json.dumps({"partition": arguments.partition, "rounds": rounds, "seeds": arguments.seeds, "rows": rows}))


def tell(row: dict[str, Any]) -> None:
    named = "   -" if row["named"] is None else f"{row['named']:4.0%}"
    print(
        f"{row['rule']:>8} | {row['attack']:<10} | {row['accuracy']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f}) | "
        f"refused {row['refused']:4.0%} | named {named} | blamed {row['blamed']:4.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
