"""FedDDA: Zhao, Yang and Liang, 2023: clients add images that a denoiser of the whole federation drew to their own."""

import dataclasses
from typing import Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from effuse.algorithms.fedavg import Update
from effuse.algorithms.shared.drawing import DRAWING, Drawing, Drawn
from effuse.algorithms.shared.shares import Share
from effuse.algorithms.shared.synthesis import joined
from effuse.core.data import Dataset, Shard
from effuse.core.model import Arch, Net
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, Server, on_client, spec
from effuse.core.task import Batch


@spec
class FedDDA(Drawing, name="feddda"):
    """FedAvg of classifiers on the clients' images and on shares of those that a guide drew, each sent once."""

    guide: Arch  # a class-conditional denoiser, such as from_pretrained("RUN/model")
    deal: Literal["add", "add_lack"] = "add"  # add_lack: a client uses those of classes of which it has no image
    filter: NonNegativeInt | None = None  # the round from which clients leave out what the global model calls another class

    @property
    def denoiser(self) -> tuple[str, Arch | None]:
        return "guide", self.guide

    def setup(self, model: Model, fed: Federation) -> Drawn:
        self.check_denoiser(model)
        return Drawn(model, phase=DRAWING)

    def round(self, server: Drawn, fed: Federation) -> Server:
        if server.phase == DRAWING:
            return self.draw_more(server, fed)
        S = fed.sample(self.cohort)
        late = self.late(S, server, fed)
        w = fed.mean(self.train, S, by=self.aggregate, model=server.model, share=None, once=late or None).value.model
        return dataclasses.replace(server, model=w)

    @on_client(covered=True)
    def train(self, client: Client, model: Model, share: Share | None) -> Update:
        net = client.load(model)
        added = self.added(client, net, self.kept_share(client, share))
        data = joined(client.data, added.pixels, added.labels) if len(added.pixels) else client.data
        fit = client.fit(net, self.local, data)
        return Update(client.unload(net), self.weight(client), fit.loss)

    def added(self, client: Client, net: Net, share: Share) -> Share:
        """The images of its share that a client uses in this round."""
        filters = self.filter is not None and client.federated >= self.filter
        if client.protection is not None and (self.deal == "add_lack" or filters):
            raise RecipeError(
                "algorithm.deal, algorithm.filter: the number of images would depend on private ones, and the recipe has a "
                "budget; leave both out"
            )
        assert share.labels is not None
        if share.pixels.is_meta:  # a rehearsal does not know which: it trains on all
            return share
        pixels, labels = share.pixels, share.labels.cpu()
        if self.deal == "add_lack":
            pixels, labels = picked(pixels, labels, torch.tensor(client.data.histogram)[labels] == 0)
        if filters and len(labels):
            shown = Dataset(pixels, labels, client.data.dataset.classes)
            p = client.apply(net, probabilities, Shard.whole(shown.to(client.machine.device))).cpu()
            pixels, labels = picked(pixels, labels, ~mistaken(p, labels))
        return Share(pixels, labels)


def picked(pixels: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The wanted images and their labels."""
    return pixels[wanted.nonzero().flatten().to(pixels.device)], labels[wanted]


def probabilities(net: Net, batch: Batch, given: Given) -> Tensor:
    """The model's probability of each class."""
    return net(batch.x).float().softmax(1)


def mistaken(p: Tensor, labels: Tensor) -> Tensor:
    """Confident learning (Northcutt et al., 2021): images that the model confidently assigns to another class.

    It is confident of a class where its probability is at least the mean one of the images so labelled.
    """
    own = torch.nn.functional.one_hot(labels, p.shape[1]).to(p.dtype)
    counts = own.sum(0)
    usual = torch.where(counts > 0, (own * p).sum(0) / counts.clamp(min=1.0), torch.inf)
    sure = p.masked_fill(p < usual, -1.0)
    return (sure.max(1).values >= 0) & (sure.argmax(1) != labels)
