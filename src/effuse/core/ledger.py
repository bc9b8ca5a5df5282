"""The ledger: the traffic of every link, counted from the messages themselves."""

from collections import Counter
from typing import Any, NamedTuple

from effuse.core.params import Params
from effuse.core.visit import each_params

QUANTITIES = ("parameters", "bytes", "wire_bytes", "messages")
DIRECTIONS = ("up", "down")
DISCARDED = "discarded"  # the direction of uploads that the server rejected, or that came too late
TRAINING, EVALUATION = "training", "evaluation"
CLIENT_SERVER, CLIENT_EDGE, EDGE_CLOUD = "client-server", "client-edge", "edge-cloud"


class Account(NamedTuple):
    """Where a message is charged."""

    column: str  # training or evaluation
    link: str  # client-server, or client-edge and edge-cloud in a tree
    direction: str  # up, down or discarded
    client: int  # between edge and cloud: the edge


def size_of(message: Any, wire: str) -> tuple[int, int]:
    """(parameters, bytes) of a message: the elements of its Params, and the bytes of all its tensors on the wire."""
    parameters = size = 0
    for item in each_params(message):
        rounded = wire == "bf16" and isinstance(item, Params)
        for tensor in item.tensors if isinstance(item, Params) else [item]:
            narrow = rounded and tensor.element_size() == 4 and tensor.is_floating_point()
            size += tensor.numel() * (2 if narrow else tensor.element_size())
        if isinstance(item, Params) and item.counted:
            parameters += item.numel
    return parameters, size


class Ledger:
    """Sums per link, direction and client, for the whole run and for the round in progress."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.total: dict[Account, Counter[str]] = {}
        self.round: dict[Account, Counter[str]] = {}

    def charge(self, account: Account, message: Any, wire_bytes: int = 0) -> None:
        """Count one message."""
        parameters, size = size_of(message, self.wire)
        entry = Counter(parameters=parameters, bytes=size, wire_bytes=wire_bytes, messages=1)
        for book in (self.total, self.round):
            book.setdefault(account, Counter()).update(entry)

    def discard(self, account: Account, wire_bytes: int) -> None:
        """Count an upload that was not used, and perhaps not read."""
        self.charge(account._replace(direction=DISCARDED), None, wire_bytes)

    def close(self) -> dict[str, Any]:
        """The report of the round that ends here."""
        report = summary(self.round, TRAINING)
        evaluation = summary(self.round, EVALUATION)
        if evaluation["links"]:
            report["evaluation"] = evaluation
        self.round = {}
        return report

    def report(self) -> dict[str, Any]:
        """The report of the whole run so far."""
        return {column: summary(self.total, column) for column in (TRAINING, EVALUATION)}

    def saved(self) -> dict[str, list[int]]:
        return {" ".join(map(str, account)): [entry[q] for q in QUANTITIES] for account, entry in self.total.items()}

    def restore(self, saved: dict[str, list[int]]) -> None:
        self.round, self.total = {}, {}
        for key, values in saved.items():
            column, link, direction, client = key.split(" ")
            self.total[Account(column, link, direction, int(client))] = Counter(dict(zip(QUANTITIES, values)))


def summary(book: dict[Account, Counter[str]], column: str) -> dict[str, Any]:
    """Totals, per link and per client, of one column."""
    links: dict[str, dict[str, Counter[str]]] = {}
    clients: dict[int, dict[str, int]] = {}
    edges: dict[int, dict[str, int]] = {}
    totals: dict[str, Counter[str]] = {d: Counter() for d in DIRECTIONS}
    discarded: Counter[str] = Counter()
    for account, entry in book.items():
        if account.column != column:
            continue
        if account.direction == DISCARDED:
            discarded.update(entry)
            continue
        totals[account.direction].update(entry)
        links.setdefault(account.link, {d: Counter() for d in DIRECTIONS})[account.direction].update(entry)
        ends = edges if account.link == EDGE_CLOUD else clients
        ends.setdefault(account.client, dict.fromkeys(DIRECTIONS, 0))[account.direction] += entry["bytes"]
    report: dict[str, Any] = {}
    for quantity in QUANTITIES:
        up, down = totals["up"][quantity], totals["down"][quantity]
        report[quantity] = {"up": up, "down": down, "total": up + down}
    report["links"] = {k: {d: {q: v[d][q] for q in QUANTITIES} for d in DIRECTIONS} for k, v in sorted(links.items())}
    report["clients"] = {str(k): clients[k] for k in sorted(clients)}
    if discarded:
        report["discarded"] = {"messages": discarded["messages"], "wire_bytes": discarded["wire_bytes"]}
    if edges:
        report["edges"] = {str(e): edges[e] for e in sorted(edges)}
    return report
