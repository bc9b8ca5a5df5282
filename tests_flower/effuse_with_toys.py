"""The command line in a process that also knows the tests' algorithms; a site in it may be told to send wrong answers."""

import dataclasses
import os
import sys
from pathlib import Path

import effuse  # noqa: F401  (before torch: it sets how threads wait)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from slow import ToySlow  # noqa: F401  (registers ToySlow and the toys)

from effuse.algorithms.fedavg import Update
from effuse.cli import main
from effuse.core.params import Params
from effuse.core.wire import decode, encode


def wrong(head: bytes, body: bytes, n: int) -> tuple[str, bytes, bytes]:
    """The n-th answer, made wrong: a NaN, a wrong shape, a missing key, an unknown type, too many bytes."""
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


if os.environ.get("EFFUSE_TEST_WRONG"):
    from effuse.transport.flower import supernode

    right, numbers = supernode.SiteClient._reply_or_refusal, iter(range(100))

    def wrong_answer(self, make):
        packet = right(self, make)
        if packet.kind != supernode.ANSWER:
            return packet
        return supernode.Packet(*wrong(packet.head, packet.body, next(numbers)))

    supernode.SiteClient._reply_or_refusal = wrong_answer

if __name__ == "__main__":
    main()
