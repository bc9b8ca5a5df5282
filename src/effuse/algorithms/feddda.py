"""FedDDA: Zhao, Yang and Liang, 2023: clients add images that a denoiser of the whole federation drew to their own."""

import dataclasses
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.shares import SHARE, Share
from effuse.algorithms.shared.synthesis import NOBODY, AuxiliarySet, joined, synthesised, together
from effuse.core.capabilities import Draws
from effuse.core.data import Dataset, Shard
from effuse.core.metric import Images
from effuse.core.model import Arch, Net
from effuse.core.prelude import FEDERATE, Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.recipe import Recipe
from effuse.core.sampler import Sampler
from effuse.core.task import Batch, Task
from effuse.diffusion.samplers import Ancestral
from effuse.tasks.denoise import Denoise

DRAWING = "drawing"


@message(name="feddda.server")
class Drawn(Server):
    """The classifier, and the images that the guide has drawn so far."""

    auxiliary: AuxiliarySet | None = None


@spec
class FedDDA(FedAvg, Draws, name="feddda"):
    """FedAvg of classifiers on the clients' images and on shares of those that a guide drew, each sent once."""

    guide: Arch  # a class-conditional denoiser, such as from_pretrained("RUN/model")
    task: Task = Denoise()  # what the guide was trained for
    sampler: Sampler = Ancestral(batch=500)
    n: PositiveInt = 100_000  # images that the server draws
    share: PositiveInt = 10_000  # of these, at random for each client
    deal: Literal["add", "add_lack"] = "add"  # add_lack: a client uses those of classes of which it has no image
    filter: NonNegativeInt | None = None  # the round from which clients leave out what the global model calls another class
    group: PositiveInt = 10_000  # images in a round of drawing: the most that a killed run repeats

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share > self.n:
            raise RecipeError(f"algorithm.share: {self.share} images for each client, but n={self.n} are drawn; lower it")

    def setup(self, model: Model, fed: Federation) -> Drawn:
        if not self.guide.conditional:
            raise RecipeError(
                f"algorithm.guide: {self.guide.name} draws images without labels; use one with conditional=True"
            )
        if self.guide.shape != model.arch.shape:
            drawn, wanted = tuple(self.guide.shape), tuple(model.arch.shape)
            raise RecipeError(
                f"algorithm.guide: side, channels and classes of the guide are {drawn}, those of the data {wanted}; "
                "train a guide on the same data"
            )
        return Drawn(model, phase=DRAWING)

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        return [(self.guide, self.task)]

    def images(self, server: Drawn) -> Images | None:
        return None if server.auxiliary is None else server.auxiliary.images(labelled=True)

    def round(self, server: Drawn, fed: Federation) -> Server:
        if server.phase == DRAWING:
            return self.draw_more(server, fed)
        S = fed.sample(self.cohort)
        late = {k: {"share": self.dealt(k, server, fed)} for k in S if k not in fed.has("share")}
        w = fed.mean(self.train, S, by=self.aggregate, model=server.model, share=None, once=late or None).value.model
        return dataclasses.replace(server, model=w)

    def draw_more(self, server: Drawn, fed: Federation) -> Drawn:
        """Draw the next group of images, as many of every class."""
        before = [] if server.auxiliary is None else [server.auxiliary]
        done = sum(len(a) for a in before)
        now = min(self.group, self.n - done)
        guide = fed.workbench.machine.initial(self.guide, fed.workbench.lasting("guide"))
        evenly = [1] * self.guide.shape.classes
        drawn = synthesised(fed.workbench, NOBODY, guide, now, self.sampler, evenly, self.task)
        fed.note(drawn=done + now)
        phase = FEDERATE if done + now == self.n else DRAWING
        return dataclasses.replace(server, auxiliary=together([*before, drawn]), phase=phase)

    def dealt(self, client: int, server: Drawn, fed: Federation) -> Share:
        """A client's images, the same whenever it needs them."""
        assert server.auxiliary is not None
        source = fed.workbench.lasting("shares").child(client)
        chosen = torch.from_numpy(source.numpy().permutation(self.n)[: self.share])
        some = server.auxiliary.rows(chosen)
        return Share(some.pixels, some.labels)

    @on_client(covered=True)
    def train(self, client: Client, model: Model, share: Share | None) -> Update:
        if share is not None:
            client.state[SHARE] = share
        net = client.load(model)
        added = self.added(client, net, client.state[SHARE])
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
