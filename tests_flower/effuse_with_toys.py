"""The command line in a process that also knows the tests' own algorithms, and sites that lie."""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from slow import ToySlow  # noqa: F401  (known by name from now on)

import effuse  # noqa: F401  (sets how threads wait, before torch is imported)
from effuse.algorithms.fedavg import Update
from effuse.cli import main
from effuse.core.params import Params
from effuse.core.wire import decode, encode


def lie(head: bytes, body: bytes, n: int) -> tuple[str, bytes, bytes]:
    """The n-th answer of a client that sends what it should not."""
    update = decode(body, Update)

    def with_params(change) -> bytes:
        params = Params(change(dict(update.model.params)))
        return encode(dataclasses.replace(update, model=dataclasses.replace(update.model, params=params)), Update)

    if n == 0:
        return "answer", head, body[:-4] + bytes.fromhex("0000c07f")
    if n == 1:
        return "answer", head, with_params(lambda p: p | {"up.bias": torch.zeros(7)})
    if n == 2:
        return "answer", head, with_params(lambda p: {k: v for k, v in p.items() if k != "up.bias"})
    if n == 3:
        return "gossip", head, body
    return "answer", head, body + b"\x00" * 2_000_000


if os.environ.get("EFFUSE_TEST_LIES"):
    from effuse.transport.flower import supernode as link

    plain, told = link.SiteClient._reply_or_refusal, iter(range(100))

    def answered(self, make):
        packet = plain(self, make)
        return link.Packet(*lie(packet.head, packet.body, next(told))) if packet.kind == link.ANSWER else packet

    link.SiteClient._reply_or_refusal = answered

if __name__ == "__main__":
    main()
