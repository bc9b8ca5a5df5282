"""Lies: every way to change one field of an answer on the wire, whatever its type, and sites that tell them."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from fake import FakeChannel
from torch import Tensor

from effuse.core.federation import Order
from effuse.core.wire import decode, encode
from effuse.transport.flower.messages import ANSWER, ENROLMENT, INVITATION, ORDER, Enrolment, Packet, refusal
from effuse.transport.worker import Receipt

HUGE = 3e38  # finite in fp32, and its square is not
NUMBERS: tuple[Any, ...] = (-1, 0, 10**18, -(2**62), 0.5, 1e308, -1e308, 10**400, None, True, "1", [], {})
WORDS: tuple[Any, ...] = ("", "x" * 5000, "\x1b[31mred\x1b[0m\r\n", "\u202e", "adam(lr=1e9)", None, 7, [], {})
ABSENT: tuple[Any, ...] = (0, 1, 10**18, 1e308, "x", [], {}, [0], {"": "model"})


def lies(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Every lie about an answer's body, with a name that says which field has which value."""
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    tree, tensors = json.loads(header["__metadata__"]["effuse"]), safetensors.torch.load(body)
    for name, changed in varied(tree, "reply"):
        yield name, assembled(changed, tensors)
    for key in [*tensors][:3] + [*tensors][-3:]:
        for name, tensor in untrue(tensors[key]):
            yield f"tensor {key} {name}", assembled(tree, tensors | {key: tensor})
    yield "no tensors", assembled(tree, {})
    yield "a tensor more", assembled(tree, tensors | {"999999": torch.ones(1)})
    yield from (
        ("empty", b""),
        ("cut", body[: len(body) // 2]),
        ("longer", body + bytes(9)),
        ("noise", bytes(range(256)) * 8),
    )
    yield "a header of a billion bytes", (10**9).to_bytes(8, "little") + body[8:]


def assembled(tree: Any, tensors: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}, {"effuse": json.dumps(tree)})


def varied(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The JSON tree with one of its values changed, for every value."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield f"{place} without {key}", {k: v for k, v in tree.items() if k != key}
            yield from ((name, tree | {key: changed}) for name, changed in varied(item, f"{place}.{key}"))
        yield f"{place} with more", tree | {"more": 1}
        yield f"{place} is null", None
    elif isinstance(tree, list):
        for name, other in (("empty", []), ("twice", tree + tree), ("backwards", tree[::-1]), ("null", None)):
            yield f"{place} is {name}", other
        yield f"{place} with a million", tree + [7] * 10**6 if place.count(".") == 1 and len(tree) < 9 else tree[:1]
        for i in {0, 1, len(tree) - 1} & {*range(len(tree))}:
            changes = ((name, changed) for name, changed in varied(tree[i], f"{place}[{i}]"))
            yield from ((name, [*tree[:i], changed, *tree[i + 1 :]]) for name, changed in changes)
    else:
        others = ABSENT if tree is None else WORDS if isinstance(tree, str) else NUMBERS
        yield from ((f"{place} = {str(other)[:20]!r}", other) for other in others)


def untrue(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.is_floating_point():
        for value in (HUGE, -HUGE, float("nan"), float("inf")):
            yield f"full of {value:g}", torch.full_like(tensor, value)
    else:
        for value in (-1, torch.iinfo(tensor.dtype).max, torch.iinfo(tensor.dtype).min):
            yield f"full of {value}", torch.full_like(tensor, value)
    for dtype in (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool):
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)
    yield (
        "flat and longer",
        torch.cat([tensor.flatten(), tensor.flatten()[:1]]) if tensor.numel() else torch.ones(3).to(tensor),
    )
    yield "empty", tensor.new_zeros(0)


def about(packet: Packet, client: int) -> Iterator[tuple[str, Packet]]:
    """Lies about the head and the kind of an answer."""
    true = decode(packet.head, Receipt)
    for field, values in {"client": (0, -1, 10**18), "t": (true.t - 1, -(10**18)), "call": (true.call + 1, 10**18)}.items():
        for value in values:
            changed = dataclasses.replace(true, **{field: value})
            yield f"receipt of {field} {value}", packet._replace(head=encode(changed, Receipt))
    yield "no head", packet._replace(head=b"")
    yield "head of noise", packet._replace(head=bytes(range(256)))
    yield "head of another message", packet._replace(head=encode(Enrolment(client, "s"), Enrolment))
    yield (
        "snapshot of nobody",
        packet._replace(head=encode(dataclasses.replace(true, snapshot="../../9_9\x1b[31m"), Receipt)),
    )
    for kind in ("", "gossip", "x" * 10**5, "\x1b[31m", ORDER, INVITATION, "undelivered"):
        yield f"kind {kind[:9]!r}", packet._replace(kind=kind)
    yield "refusal", refusal("no\x1b[31m\n" * 1000)
    yield "refusal of noise", Packet("refusal", bytes(range(256)))


class LyingChannel(FakeChannel):
    """Honest clients have sites. Every other client tells one lie about what the first honest client has answered."""

    def __init__(self, folder: Path, honest: int, liars: int) -> None:
        super().__init__(folder, honest)
        self.honest, self.liars = honest, liars
        self.true: dict[tuple[int, int], Packet] = {}  # (t, call) -> an honest answer
        self.bodies: dict[tuple[int, int], list[tuple[str, bytes]]] = {}  # the lies about it
        self.told: dict[tuple[str, int], str] = {}  # (job and round, client) -> its lie
        self.most = 0  # lies about one answer

    def nodes(self) -> set[int]:
        return {100 + k for k in range(self.honest + self.liars)}

    def reply(self, node: int, packet: Packet) -> Packet | None:
        client = node - 100
        if client < self.honest:
            answer = super().reply(node, packet)
            if packet.kind == ORDER and answer is not None and answer.kind == ANSWER:
                order = decode(packet.head, Order)
                self.true.setdefault((order.t, order.call), answer)
            return answer
        if packet.kind == INVITATION:
            return Packet(ENROLMENT, encode(Enrolment(client, "liar"), Enrolment))
        if packet.kind != ORDER:
            return Packet(ANSWER)
        order = decode(packet.head, Order)
        key = order.t, order.call
        if key not in self.true:
            return Packet(ANSWER)  # no honest client was asked
        true = self.true[key]
        if key not in self.bodies:
            self.bodies = {key: list(lies(true.body))}
        snapshot = None if decode(true.head, Receipt).snapshot is None else f"{order.t}_{order.call}"
        true = true._replace(head=encode(Receipt(client, order.t, order.call, snapshot), Receipt))
        every = [*((name, true._replace(body=body)) for name, body in self.bodies[key]), *about(true, client)]
        self.most = max(self.most, len(every))
        name, lie = every[(client - self.honest + order.t * self.liars) % len(every)]
        self.told[f"{order.job} {order.t}", client] = name
        return lie
