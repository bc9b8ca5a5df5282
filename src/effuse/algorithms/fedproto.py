"""FedProto: Tan et al., 2022: clients hold the features of each class to the mean of all clients' means."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.guides import features_of
from effuse.algorithms.shared.prototypes import class_sums, refuse_comparing
from effuse.core.aggregate import by_count
from effuse.core.capabilities import Personal
from effuse.core.errors import WireError
from effuse.core.fit import Fit
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
        refuse_negative(self.told)


@message(name="fedproto.means")
class ProtoMeans:
    """The same without the model, which stays at its client."""

    weight: float
    loss: float | None
    told: Annotated[Params | None, by_count]
    held: Annotated[float | None, by_count]

    def __post_init__(self) -> None:
        refuse_negative(self.told)


def refuse_negative(told: Params | None) -> None:
    """Refuse counts below nought, which no client has."""
    counts = None if told is None else told["counts"]
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
    means: Literal["uniform", "size"] = "uniform"  # what a client's mean of a class counts for: one, or its images of it

    def ready(self, clients: int) -> None:
        super().ready(clients)
        refuse_comparing(self.aggregate)

    def setup(self, model: Model, fed: Federation) -> Server:
        features_of(model.arch, "model")  # refuses a network that has none
        return ProtoServer(model)

    def round(self, server: ProtoServer, fed: Federation) -> Server:
        S, known = fed.sample(self.cohort), server.prototypes
        y = fed.mean(self.train, S, by=self.aggregate, model=server.model, known=known).value
        return ProtoServer(y.model, prototypes=self.renewed(y, known, fed))

    def renewed(self, y: Any, known: Params | None, fed: Federation) -> Params | None:
        """The prototypes after a round. The distance of the features from the known ones is noted."""
        if y.held is not None:
            fed.note(held=y.held)
        return known if y.told is None else prototypes(y.told, known)

    @on_client
    def train(self, client: Client, model: Model, known: Params | None) -> ProtoUpdate:
        net = client.load(model)
        fit, told = self.fitted(client, net, known)
        return ProtoUpdate(client.unload(net), self.weight(client), fit.loss, told, fit.noted)

    def fitted(self, client: Client, net: Net, known: Params | None) -> tuple[Fit, Params | None]:
        """Local training, and what the client then tells of its features."""
        if known is None:  # nobody has told a prototype yet, or they have no weight
            fit = client.fit(net, self.local, client.data)
        else:
            given = {**known, "pull": self.pull}
            fit = client.fit(net, self.local, client.data, loss=prototyped, given=given)
        return fit, self.told(client, net) if self.pull else None

    def told(self, client: Client, net: Net) -> Params:
        """The means of each class by the model after training, times what each counts for."""
        sums, counts = class_sums(client, net)
        if self.means == "uniform":
            sums, counts = sums / counts.clamp(min=1.0)[:, None], counts.clamp(max=1.0)
        return Params({"sums": sums, "counts": counts})


@spec
class FedProtoOriginal(FedProto, Personal, name="fedproto_original"):
    """As published: every client trains a model of its own, and only the means of features travel."""

    def round(self, server: ProtoServer, fed: Federation) -> Server:
        S, known, once = fed.sample(self.cohort), server.prototypes, {"model": server.model}
        y = fed.mean(self.train, S, by=self.aggregate, model=None, known=known, once=once).value
        return ProtoServer(server.model, prototypes=self.renewed(y, known, fed))

    @on_client
    def train(self, client: Client, model: Model | None, known: Params | None) -> ProtoMeans:
        net = client.load(self.own(client, model))
        fit, told = self.fitted(client, net, known)
        client.state["model"] = client.unload(net)
        return ProtoMeans(self.weight(client), fit.loss, told, fit.noted)

    def owners(self, server: Server, fed: Federation) -> Sequence[int]:
        return sorted(fed.has("model"))

    def own(self, client: Client, model: Model | None) -> Model:
        own: Model | None = client.state.get("model", model)
        assert own is not None  # the first message brings one
        return own
