"""A classifier trained on copies of noisy class means: a bar for private generators, since clients train no network."""

import dataclasses
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from effuse.algorithms.shared.central_images import Means, class_means, copied
from effuse.algorithms.shared.synthesis import AuxiliarySet, together
from effuse.core.capabilities import Draws
from effuse.core.metric import Images
from effuse.core.model import Arch
from effuse.core.prelude import FEDERATE, Client, Federation, Model, Server, Solver, message, on_client, spec
from effuse.core.recipe import Recipe
from effuse.core.task import Task

MEANS = "means"  # the phase in which every client tells its means, once


@message(name="class_means.server")
class ClassMeansServer(Server):
    """The classifier and the images that it is trained on."""

    auxiliary: AuxiliarySet | None = None


@spec
class ClassMeans(Draws, name="class_means"):
    """Clients send noisy means of their classes once. The server trains a classifier on copies of them with fresh noise."""

    generated: ClassVar[bool] = False  # the mean of one image is that image

    central: Solver  # one pass over the copies in each round
    noise: NonNegativeFloat | None = None  # z: noise on sums and counts over their sensitivity; None: the budget's
    fresh: NonNegativeFloat = 0.3  # the standard deviation of each copy's noise, for images in [-1, 1]
    share: Annotated[PositiveFloat, Field(le=100)] = 1.0  # copies for each real image

    def setup(self, model: Model, fed: Federation) -> ClassMeansServer:
        return ClassMeansServer(model, phase=MEANS)

    def round(self, server: ClassMeansServer, fed: Federation) -> Server:
        bench = fed.workbench
        if server.phase == MEANS:
            made: list[AuxiliarySet] = []
            for client, told in fed.ask(self.tell, fed.clients):
                with fed.using(client):
                    made.append(self._copies(fed, client, told))
            return dataclasses.replace(server, auxiliary=together(made), phase=FEDERATE)
        assert server.auxiliary is not None
        net = bench.load(server.model)
        fit = bench.fit(net, self.central, server.auxiliary.shard(server.model.arch.shape.classes, bench.machine.device))
        fed.report_loss(fit.loss, fit.images)
        return dataclasses.replace(server, model=bench.unload(net))

    @on_client(covered=True)
    def tell(self, client: Client) -> Means:
        return Means(*class_means(client, self.noise))

    def _copies(self, fed: Federation, client: int, told: Means) -> AuxiliarySet:
        counts = torch.ones(len(told.counts)) if told.counts.is_meta else told.counts.cpu()
        labels = torch.arange(len(counts)).repeat_interleave((self.share * counts).round().long())
        generator = None if told.means.is_meta else fed.workbench.stream("fresh").torch(told.means.device)
        pixels = copied(told.means, labels, self.fresh, generator)
        return AuxiliarySet(pixels, labels, torch.full((len(labels),), client))

    def images(self, server: ClassMeansServer) -> Images | None:
        return None if server.auxiliary is None else server.auxiliary.images(labelled=True)

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        return []
