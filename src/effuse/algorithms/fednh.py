"""FedNH: Dai et al., 2023: a cosine head whose class vectors follow the means of the clients' features slowly."""

import dataclasses
import math
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.prototypes import class_sums, refuse_comparing
from effuse.core.aggregate import by_count
from effuse.core.model import Net
from effuse.core.params import Buffers
from effuse.core.prelude import Client, Federation, Model, Params, RecipeError, Server, message, on_client, spec

HEAD = "head.weight"  # W of a cosine head


@message(name="fednh.update")
class HeadUpdate(Update):
    """A client's model, and the directions of its features by class times its images of each."""

    told: Annotated[Params | None, by_count]


def moved(W: Tensor, told: Tensor, rho: float) -> Tensor:
    """W_c <- unit(rho W_c + (1 - rho) unit(sum of what clients told of c)); a class that nobody has keeps its W_c."""
    towards = F.normalize(rho * W + (1 - rho) * F.normalize(told, dim=1), dim=1)
    return torch.where(told.norm(dim=1, keepdim=True) > 0, towards, W)


@spec
class FedNH(FedAvg, name="fednh"):
    """FedAvg under a cosine head. No client trains the head's vectors; the server moves them to the classes' features."""

    rho: Annotated[float, Field(ge=0, le=1)] = 0.9  # how much of W stays in each round; at 1 nothing is told
    noise: NonNegativeFloat | None = None  # z: noise on sums and counts over their sensitivity; None: the budget's
    weights: Literal["size", "uniform"] = "uniform"  # as in the authors' code

    def ready(self, clients: int) -> None:
        super().ready(clients)
        refuse_comparing(self.aggregate)

    def setup(self, model: Model, fed: Federation) -> Server:
        if HEAD not in model.buffers:
            raise RecipeError(
                f"model: {model.arch.name} has no cosine head, whose vectors FedNH moves; set model.head=cosine"
            )
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        y = fed.mean(self.train, fed.sample(self.cohort), by=self.aggregate, model=server.model).value
        W = server.model.buffers[HEAD]  # not what the clients returned
        if y.told is not None:
            W = moved(W, y.told["classes"], self.rho)
        return Server(dataclasses.replace(y.model, buffers=y.model.buffers.holding(Buffers({HEAD: W}))))

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> HeadUpdate:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        told = self.told(client, net) if self.rho < 1 else None
        return HeadUpdate(client.unload(net), self.weight(client), fit.loss, told)

    def told(self, client: Client, net: Net) -> Params:
        """The directions of the classes' mean features by the model after training, times the images of each class.

        A unit changes a sum by at most one, and a count by at most one.
        """
        sums = torch.cat([t.view(len(t), -1) for t in class_sums(client, net, unit=True)], dim=1)
        sums = client.noised(sums, sensitivity=math.sqrt(2), noise=self.noise, what="class features")
        counts = sums[:, -1:].clamp(min=0.0)
        return Params({"classes": counts * F.normalize(sums[:, :-1], dim=1)})
