"""FedDISC: Yang et al., 2024: one message of centroids from clients without labels, and images drawn from these.

The server has labelled images. It and all sites have Stable Diffusion 2.1 unCLIP, whose weights were not at hand here.
"""

from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from effuse.core.data import Dataset, Shard, Source
from effuse.core.errors import TrainingError
from effuse.core.model import Net
from effuse.core.prelude import (
    Algorithm,
    Client,
    Federation,
    Given,
    Model,
    Params,
    RecipeError,
    Server,
    message,
    on_client,
    spec,
)
from effuse.core.rng import Stream
from effuse.core.task import Batch, Task
from effuse.metrics.linear_probe import logistic
from effuse.models.headed import Embedded
from effuse.models.unclip import UnClip

HEAD = ("head.weight", "head.bias")


@message(name="feddisc.told")
class Told:
    """What a client tells, once: centroids of its pseudo-classes, how many of each, and the mean of each."""

    centroids: Tensor  # classes x K x width
    counts: Tensor  # classes, int64: centroids of each, at most K
    domain: Tensor  # classes x width; nought where there is none


@spec
class Imagined(Task):
    """Random numbers for drawing: a latent image and the noise of an embedding. Nothing is trained for it."""

    channels: int
    side: int
    width: int

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        latent = torch.randn((n, self.channels, self.side, self.side), generator=generator, device=generator.device)
        return {"latent": latent, "noise": torch.randn((n, self.width), generator=generator, device=generator.device)}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        raise TrainingError("imagined: nothing is trained for drawing")


def features(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x, give="features").float()


def imagined(net: Net, batch: Batch, given: Given) -> Tensor:
    """The features of an image drawn for each row: under its embedding with noise, and its class in words."""
    unclip: Any = net.module
    unclip = unclip.network
    condition = unclip.noisy(batch.columns["embedding"], batch.drawn["noise"], int(given["level"]))
    states, empty = given["prompts"][batch.columns["class"]], given["prompts"][-1:]
    steps, guidance = int(given["steps"]), float(given["guidance"])
    drawn = unclip.drawn(condition, states, empty, batch.drawn["latent"], steps, guidance)
    found: Tensor = unclip(drawn).float()
    return found


@spec
class FedDISC(Algorithm, name="feddisc"):
    """One-shot and semi-supervised: clients name no labels. The server draws from their centroids and fits a linear head."""

    labelled: Source  # the server's images, with labels of the same classes
    K: PositiveInt = 5  # centroids of each pseudo-class; all of its images where there are fewer
    noise: NonNegativeFloat = 0.0  # the deviation of noise that a client adds to what it tells; no budget is kept by it
    level: NonNegativeInt = 200  # of the noise of centroids when images are drawn
    mix: Annotated[float, Field(ge=0, le=1)] = 0.5  # how much of a condition is another client's mean of the class
    each: PositiveInt = 10  # images from each centroid
    steps: PositiveInt = 20
    guidance: PositiveFloat = 10.0
    prompt: str = "{}"  # with the name of the class
    penalty: PositiveFloat = 1e-3  # of the head, logistic regression on standardised features

    def setup(self, model: Model, fed: Federation) -> Server:
        arch = model.arch
        if not isinstance(arch, Embedded) or not isinstance(arch.network, UnClip):
            raise RecipeError(
                f'model: FedDISC needs embedded(network=unclip("FOLDER")), which draws images; got {arch.name}'
            )
        return Server(model)

    def warnings(self, rounds: int) -> list[str]:
        return [f"rounds={rounds}: clients tell the same centroids again in every round; set rounds=1"] if rounds > 1 else []

    def round(self, server: Server, fed: Federation) -> Server:
        net = fed.workbench.load(server.model)
        labelled, device = self.labelled.load("train"), fed.workbench.machine.device
        labelled = labelled if device.type == "meta" else labelled.to(device)  # a rehearsal needs the labels' values
        if len(labelled.classes) != server.model.arch.shape.classes:
            raise RecipeError(
                f"algorithm.labelled: {len(labelled.classes)} classes, but the data have {server.model.arch.shape.classes}"
            )
        known = fed.workbench.apply(net, features, Shard.whole(labelled))
        prototypes = means(F.normalize(known, dim=1), labelled.labels, len(labelled.classes))
        told = [reply for _, reply in fed.ask(self.tell, fed.present, model=server.model, prototypes=prototypes)]
        x, labels = self.conditions(told, fed.workbench.stream("conditions"))
        drawn = self.drawn(net, x, labels, labelled, fed)
        fed.note(drawn=len(labels))
        head = _hollow_head(drawn, prototypes) if drawn.is_meta else logistic(drawn, labels, len(prototypes), self.penalty)
        held = server.model.params
        return Server(server.model.holding(Params({name: value.to(held[name]) for name, value in zip(HEAD, head)})))

    @on_client
    def tell(self, client: Client, model: Model, prototypes: Tensor) -> Told:
        """Pseudo-labels by the nearest prototype, then K-means of each pseudo-class."""
        e = client.apply(client.load(model), features, client.data)
        C, width = prototypes.shape
        told = Told(e.new_zeros(C, self.K, width), torch.zeros(C, dtype=torch.int64), e.new_zeros(C, width))
        if e.is_meta:
            return told
        labels = (F.normalize(e, dim=1) @ prototypes.to(e).T).argmax(1)
        seed = int(client.stream("centroids").numpy().integers(2**31))
        for c in labels.unique().tolist():
            own = e[labels == c]
            found = centroids(own, self.K, seed)
            told.centroids[c, : len(found)], told.counts[c], told.domain[c] = found, len(found), own.mean(0)
        if self.noise:
            generator = client.stream("noise").torch()
            for value in (told.centroids, told.domain):
                value += self.noise * torch.randn(value.shape, generator=generator).to(value)
        return told

    def conditions(self, told: list[Told], stream: Stream) -> tuple[Tensor, Tensor]:
        """An embedding and a class for each image to draw: a centroid mixed with a random client's mean of its class."""
        rng = stream.numpy()
        rows: list[Tensor] = []
        labels: list[int] = []
        for one in told:
            # a rehearsal knows no counts: as many as there may be
            counts = [self.K] * len(one.counts) if one.centroids.is_meta else one.counts.tolist()
            for c, n in enumerate(counts):
                owners = [t.domain[c] for t in told if t.centroids.is_meta or t.counts[c] > 0]
                for k in np.repeat(np.arange(n), self.each):
                    other = owners[int(rng.integers(len(owners)))]
                    rows.append((1 - self.mix) * one.centroids[c, k] + self.mix * other)
                    labels.append(c)
        return torch.stack(rows), torch.tensor(labels)

    def drawn(self, net: Net, x: Tensor, labels: Tensor, like: Dataset, fed: Federation) -> Tensor:
        """The features of an image for each condition."""
        module: Any = net.module
        arch: Any = net.arch
        channels, side = arch.network.latent_shape
        blank = torch.zeros((len(x), *like.images.shape[1:]), dtype=torch.uint8, device=like.images.device)
        shard = Shard.whole(Dataset(blank, labels, like.classes)).with_columns(**{"embedding": x, "class": labels})
        prompts = module.network.embedded([*(self.prompt.replace("{}", name) for name in like.classes), ""])
        given = {"prompts": prompts, "level": float(self.level), "steps": float(self.steps), "guidance": self.guidance}
        task = Imagined(channels=channels, side=side, width=x.shape[1])
        return fed.workbench.apply(net, imagined, shard, task=task, given=given)


def means(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean of each class, brought to length one; nought for a class without images."""
    y = F.one_hot(labels.cpu(), classes).to(x)
    return F.normalize(y.T @ x, dim=1)


def centroids(x: Tensor, k: int, seed: int) -> Tensor:
    """K-means of rows; the rows themselves where there are no more than k."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    if len(x) <= k:
        return x
    with threadpool_limits(1):
        found = KMeans(n_clusters=k, n_init=10, random_state=seed).fit(x.double().cpu().numpy()).cluster_centers_
    return torch.from_numpy(found).to(x)


def _hollow_head(drawn: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    return drawn.new_empty(prototypes.shape), drawn.new_empty(len(prototypes))
