"""Whether an answer is one that its client can give to its order."""

from typing import Any

from effuse.core.algorithm import Job
from effuse.core.errors import EffuseError, FederationError, shown
from effuse.core.federation import Order
from effuse.core.wire import decode
from effuse.transport.flower.bounds import refuse_lies
from effuse.transport.flower.expectation import Expectation
from effuse.transport.flower.messages import HEAD_LIMIT, SHOWN_LIMIT, Packet
from effuse.transport.worker import Receipt


class Answers:
    """Reads answers; an error where one cannot be the answer to its order."""

    def __init__(self, expectation: Expectation, images: int) -> None:
        self.expected, self.images = expectation.of, images

    def read(self, job: Job, order: Order, packet: Packet, message: Any, evaluated: bool) -> tuple[Any, Receipt]:
        """The reply and its receipt."""
        receipt = decode(packet.head, Receipt, HEAD_LIMIT)
        if receipt.client != order.client:
            raise FederationError(f"its receipt names client {receipt.client}")
        if (receipt.t, receipt.call) != (order.t, order.call):
            raise FederationError(f"its receipt names call {receipt.call} of round {receipt.t + 1}, another order")
        if evaluated and receipt.snapshot != order.base:
            raise FederationError("the client changed its state while being evaluated")
        if receipt.snapshot not in (order.base, f"{order.t}_{order.call}"):
            raise FederationError("its receipt names a state that this order cannot lead to")
        expected = self.expected(job, message)
        reply = decode(packet.body, job.returns, expected.limit)
        refuse_lies(reply, self.images)
        expected.check(reply)
        return reply, receipt


def in_words(error: Exception) -> str:
    """Why an answer is rejected: one line of limited length."""
    words = " ".join(str(error).split())
    return shown(words if isinstance(error, EffuseError) else f"{type(error).__name__}: {words}", SHOWN_LIMIT)
