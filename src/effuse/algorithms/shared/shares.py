"""Shares of drawn images that go to the clients, which keep them."""

from torch import Tensor

from effuse.core.message import message

SHARE = "share"  # the key of a client's state that holds its share


@message(name="localaug.share")
class Share:
    """A client's share of the auxiliary set. It does not disclose whose model drew an image."""

    pixels: Tensor  # uint8, N x C x H x W
    labels: Tensor | None  # int64; None where models are unconditional
