"""FedProto: Tan et al., 2022: clients hold the features of each class to the mean of all clients' means."""

from typing import Annotated, Any, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.guides import features_of
from effuse.algorithms.shared.prototypes import class_sums
from effuse.core.aggregate import by_count
from effuse.core.errors import WireError
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, Params, Server, message, on_client, spec
from effuse.core.task import Batch, in_fp32


@message(name="fedproto.server")
class ProtoServer(Server):
    """The global model, and the prototypes: `means` of the classes, C x d, and which are `known`, 0 or 1."""

    prototypes: Params | None = None


@message(name="fedproto.update")
class ProtoUpdate(Update):
    """A client's model, the means of its features by class times what each counts for, and how far its features are off."""

    told: Annotated[Params | None, by_count]
    held: Annotated[float | None, by_count]

    def __post_init__(self) -> None:
        counts = None if self.told is None else self.told["counts"]
        if counts is not None and not counts.is_meta and bool((counts < 0).any()):
            raise WireError(f"fedproto: {counts.tolist()[:20]} are no counts of classes; counts are not negative")


def prototyped(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor]:
    """The cross-entropy, and the mean of (z - P_y)^2 over batch and features; it is 0 where P_y is not known."""
    task: Any = batch.task
    output, z = net(*task.inputs(batch), give="both")
    with in_fp32(z):
        far = (z.float() - given["means"][batch.labels]).square().mean(1) * given["known"][batch.labels]
        held = given["pull"] * batch.mean(far)
    return batch.mean(task.error(output, batch)) + held, held


def prototypes(told: Params, before: Params | None) -> Params:
    """The means over the clients that told a class. A class that nobody told keeps its prototype."""
    counts = told["counts"]
    known = (counts > 0).to(counts.dtype)
    means = told["sums"] / torch.where(counts > 0, counts, 1.0)[:, None]
    if before is not None:
        means = torch.where(counts[:, None] > 0, means, before["means"])
        known = torch.maximum(known, before["known"])
    return Params({"means": means, "known": known})


@spec
class FedProto(FedAvg, name="fedproto"):
    """FedAvg whose clients also share the means of their features by class, and hold their features to these."""

    pull: NonNegativeFloat = 1.0  # lambda: the weight of the distance from the prototypes
    owners: Literal["uniform", "size"] = "uniform"  # what a client's mean of a class counts for: one, or its images of it

    def setup(self, model: Model, fed: Federation) -> Server:
        features_of(model.arch, "model")  # refuses a network that has none
        return ProtoServer(model)

    def round(self, server: ProtoServer, fed: Federation) -> Server:
        S, known = fed.sample(self.cohort), server.prototypes
        y = fed.mean(self.train, S, by=self.aggregate, model=server.model, known=known).value
        if y.held is not None:
            fed.note(held=y.held)
        return ProtoServer(y.model, prototypes=known if y.told is None else prototypes(y.told, known))

    @on_client
    def train(self, client: Client, model: Model, known: Params | None) -> ProtoUpdate:
        net = client.load(model)
        if known is None:  # nobody has told a prototype yet, or they have no weight
            fit = client.fit(net, self.local, client.data)
        else:
            given = {**known, "pull": self.pull}
            fit = client.fit(net, self.local, client.data, loss=prototyped, given=given)
        told = self.told(client, net) if self.pull else None
        return ProtoUpdate(client.unload(net), self.weight(client), fit.loss, told, fit.noted)

    def told(self, client: Client, net: Net) -> Params:
        """The means of each class by the model after training, times what each counts for."""
        sums, counts = class_sums(client, net)
        if self.owners == "uniform":
            sums, counts = sums / counts.clamp(min=1.0)[:, None], counts.clamp(max=1.0)
        return Params({"sums": sums, "counts": counts})
