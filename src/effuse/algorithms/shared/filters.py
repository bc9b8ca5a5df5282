"""Which drawn images a server keeps: FedDiff's Fourier magnitude filter, and what it is compared with."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from effuse.algorithms.shared.synthesis import AuxiliarySet
from effuse.core.model import Model, Net
from effuse.core.prelude import Client, Federation, Solver, spec
from effuse.core.solvers import AdamW
from effuse.core.spec import Spec
from effuse.core.task import Batch, Given
from effuse.tasks.classify import Classify

BLOCK = 1000  # images transformed at a time
Share = Annotated[float, Field(ge=0, lt=1)]


@spec
class Filter(Spec, ABC):
    """A rule that discards some of the drawn images."""

    def described(self, client: Client) -> Tensor | None:
        """What a client tells of its images for this rule."""
        return None

    @abstractmethod
    def kept(self, images: AuxiliarySet, told: Mapping[int, Tensor], classifier: Model, fed: Federation) -> Tensor:
        """The numbers of the images to keep, in order; `classifier` is the untrained one of the run."""


@spec
class Everything(Filter):
    """Keep all images."""

    def kept(self, images: AuxiliarySet, told: Mapping[int, Tensor], classifier: Model, fed: Federation) -> Tensor:
        return torch.arange(len(images))


@spec
class AtRandom(Filter):
    """Discard a share of the images at random: the control of every other rule."""

    gamma: Share = 0.05

    def kept(self, images: AuxiliarySet, told: Mapping[int, Tensor], classifier: Model, fed: Federation) -> Tensor:
        order = torch.from_numpy(fed.workbench.stream("filter").numpy().permutation(len(images)))
        return order[math.floor(self.gamma * len(images)) :].sort().values


@spec
class Fmf(Filter):
    """Discard the images whose Fourier magnitudes are farthest from the mean magnitudes of their client's images."""

    gamma: Share = 0.05  # the share to discard, gamma
    scope: Literal["global", "client"] = "global"  # rank all images together, or those of each client
    norm: Literal["ortho", "backward"] = "ortho"  # of the transform; "backward" multiplies every magnitude by the side
    log: bool = False  # compare log(1 + magnitude): the lowest frequencies count less
    dc: bool = True  # False leaves out the lowest frequency, which is the mean brightness
    noise: NonNegativeFloat | None = 0.0  # z: noise on the told mean over its sensitivity; 10 to 20 is right under a budget

    def described(self, client: Client) -> Tensor:
        """M: the mean orthonormal magnitudes of the client's images in [0, 1]."""
        data, weights = client.data.gathered(), client.unit_weights
        total = torch.zeros(data.images.shape[1:], dtype=torch.float64, device=data.images.device)
        for images, w in zip(data.images.split(BLOCK), weights.split(BLOCK)):
            magnitudes_here = magnitudes(images.float() / data.peak)
            total += torch.einsum("n,nchw->chw", w.double().to(magnitudes_here.device), magnitudes_here.double())
        # by Parseval the magnitudes have the image's norm, which is at most the root of its number of values
        bound = math.sqrt(total.numel())
        units = float(weights.sum())
        return client.noised(total.float(), sensitivity=bound, noise=self.noise, what="magnitudes") / units

    def scores(self, images: AuxiliarySet, told: Mapping[int, Tensor]) -> Tensor:
        """The distance of each image's magnitudes from those that its client told."""
        found = torch.empty(len(images))
        for client in images.origin.unique().tolist():
            mean = self.compared(told[client].cpu().clamp(min=0.0))
            for rows in (images.origin == client).nonzero().flatten().split(BLOCK):
                z = self.compared(magnitudes(images.pixels[rows.to(images.pixels.device)].float().cpu() / 255))
                found[rows] = (z - mean).flatten(1).norm(dim=1)
        return found

    def compared(self, magnitude: Tensor) -> Tensor:
        """Orthonormal magnitudes as they are compared."""
        if self.norm == "backward":
            magnitude = magnitude * magnitude.shape[-1]
        if self.log:
            magnitude = magnitude.log1p()
        if not self.dc:
            magnitude = magnitude.clone()
            magnitude[..., 0, 0] = 0.0
        return magnitude

    def kept(self, images: AuxiliarySet, told: Mapping[int, Tensor], classifier: Model, fed: Federation) -> Tensor:
        groups = [torch.arange(len(images))]
        if self.scope == "client":
            groups = [(images.origin == k).nonzero().flatten() for k in images.origin.unique().tolist()]
        scores = torch.zeros(len(images)) if fed.rehearsing else self.scores(images, told)
        lowest = [g[scores[g].argsort(stable=True)[: len(g) - math.floor(self.gamma * len(g))]] for g in groups]
        return torch.cat(lowest).sort().values


@spec
class Oracle(Filter):
    """Keep the images that a classifier trained on all real images assigns to their label. Only a simulation can."""

    solver: Solver = AdamW(lr=1e-3, epochs=10)

    def kept(self, images: AuxiliarySet, told: Mapping[int, Tensor], classifier: Model, fed: Federation) -> Tensor:
        bench, pool = fed.workbench, fed.unprotected_pool("algorithm.filter: oracle() trains on")
        net = bench.load(classifier)
        bench.fit(net, self.solver, pool, task=Classify())
        shard = images.shard(classifier.arch.shape.classes, bench.machine.device)
        right = bench.apply(net, classified, shard, task=Classify())
        if fed.rehearsing:  # a choice that depends on values takes the longest way
            return torch.arange(len(images))
        return right.cpu().nonzero().flatten()


def classified(net: Net, batch: Batch, given: Given) -> Tensor:
    """Whether the network assigns each image to its label."""
    return net(batch.x).argmax(1) == batch.labels


def magnitudes(images: Tensor) -> Tensor:
    """The absolute values of the orthonormal two-dimensional Fourier transform."""
    return torch.fft.fft2(images, norm="ortho").abs()
