"""Clients that look at their images through a frozen guide: what all share, is sent once, and is told (FedDifRC)."""

import dataclasses
from abc import abstractmethod
from typing import Annotated, Any

from pydantic import NonNegativeInt
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.shared.guide import Basis, Guide
from effuse.algorithms.shared.guide_math import features_of
from effuse.core.aggregate import by_weight
from effuse.core.model import Arch
from effuse.core.prelude import Client, Federation, Model, Server, message, on_client, spec
from effuse.core.visit import placed


@message(name="feddifrc.moments")
class Moments:
    """What a client tells of the guide's features for their principal axes."""

    moments: Annotated[Tensor, by_weight]
    weight: float


@spec
class Looking(FedAvg):
    """FedAvg whose clients hold features of a frozen guide."""

    guide: Guide | None
    t: NonNegativeInt = 150  # the time step of noisy images

    @abstractmethod
    def setup(self, model: Model, fed: Federation) -> Server: ...

    def basis(self, guide: Guide, arch: Arch, fed: Federation, entry: bool = False) -> Basis:
        """The basis that all clients share, from the moments that all of them tell where the guide asks for these.

        With `entry` it also holds how a classifier's features enter the guide as a condition.
        """
        moments = None
        if guide.asks:
            moments = fed.mean(self.describe, fed.present, guide=None, once=sent(guide, fed)).value.moments
        width, source = features_of(arch, "model"), fed.workbench.lasting("basis")
        basis = guide.basis(width, arch.shape.classes, source, moments)
        if entry:
            basis = dataclasses.replace(basis, condition=guide.entry(width, source))
        return placed(basis, fed.workbench.machine.device)

    def labels(self, client: Client) -> Tensor:
        """What noisy images are asked for under."""
        return client.data.labels

    @on_client
    def describe(self, client: Client, guide: Model | None) -> Moments:
        assert self.guide is not None
        eye = self.guide.open(client, kept(client, "guide", guide))
        assert eye is not None
        return Moments(self.guide.moments(client, eye, self.t, self.labels(client)), float(client.size))


def sent(guide: Guide, fed: Federation) -> dict[str, Any]:
    """The guide's network, which every client is sent once."""
    model = guide.model(fed)
    return {} if model is None else {"guide": model}


def kept(client: Client, name: str, value: Any) -> Any:
    """What a client is sent once: now, or in an earlier round."""
    if value is not None:
        client.state[name] = value
    return client.state.get(name)
