"""Guides: frozen features of an image under a class, to which a classifier's own features are held (FedDifRC)."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.model import Arch, Net
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, message, spec
from effuse.core.rng import Stream
from effuse.core.spec import Spec
from effuse.core.task import Batch
from effuse.metrics.cost import macs
from effuse.tasks.denoise import NULL, Denoise
from effuse.tasks.schedules import signal_and_noise


@message(name="guide.basis")
class Basis:
    """What brings a guide's channels to the width of a classifier's features, equal at every client."""

    centre: tuple[Tensor, ...]  # of each stage, subtracted first
    axes: tuple[Tensor, ...]  # of each stage, channels x width; of class vectors, the vectors
    condition: Tensor | None  # from a classifier's features to a condition of the guide's network


@spec
class Guide(Spec, ABC):
    """A source of frozen features, as wide as the classifier's."""

    labelled: ClassVar[bool] = True  # whether features depend on the class that is asked for
    conditioned: ClassVar[bool] = False  # whether it takes a condition, such as a classifier's features

    def ready(self, width: int, classes: int, t: int) -> None:
        """Refuse what cannot guide a network with features of that width, at that time step; without labels classes is 0."""

    @property
    def asks(self) -> bool:
        """Whether its basis is made from moments that the clients tell."""
        return False

    def model(self, fed: Federation) -> Model | None:
        """The frozen network that every client is sent; None where there is none."""
        return None

    @abstractmethod
    def basis(self, width: int, classes: int, source: Stream, moments: Tensor | None) -> Basis:
        """The basis for a classifier with features of that width, random or from the moments that it asks for."""

    @property
    def cost(self) -> int:
        """Multiply-accumulates of one image under one class."""
        return 0

    def moments(self, client: Client, net: Net, t: int, labels: Tensor | None = None) -> Tensor:
        """What a client tells for the basis, to be averaged over images; only of a guide that asks.

        Without `labels`, the images are asked for under their own.
        """
        raise RecipeError(f"algorithm.guide: {self.name} asks for no moments")

    def unlabelled(self, classes: int) -> tuple[int, tuple[int, ...]]:
        """What is asked for in runs without labels: one for noisy images; for clean ones a positive, then negatives.

        A positive alone has the other images of a batch as its negatives.
        """
        return NULL, (NULL,)

    def entry(self, width: int, source: Stream) -> Tensor | None:
        """From a unit vector of that width to a condition; None where it takes none."""
        return None

    @abstractmethod
    def features(
        self, client: Client, net: Net | None, basis: Basis, labels: Tensor, t: int | None, z: Tensor | None = None
    ) -> Tensor:
        """A vector for each of the client's images, asked for under these labels.

        The image has the noise of step `t`, or none at None. `z` goes in as a condition.
        """


@spec
class Vectors(Guide):
    """Control: random orthonormal vectors, one for each class. They know the label and no image."""

    def ready(self, width: int, classes: int, t: int) -> None:
        if not classes:
            raise RecipeError("algorithm.guide: vectors know labels only, and the task has none; use own(...)")

    def basis(self, width: int, classes: int, source: Stream, moments: Tensor | None) -> Basis:
        return Basis((), (orthonormal(width, classes, source.torch()).T.contiguous(),), None)

    def features(
        self, client: Client, net: Net | None, basis: Basis, labels: Tensor, t: int | None, z: Tensor | None = None
    ) -> Tensor:
        vectors = basis.axes[0]
        return vectors[labels.to(vectors.device)]


@spec
class Network(Guide):
    """A frozen network. Of its stages' channels few directions are kept: principal ones, or random ones.

    The network is a saved one (`from_pretrained(folder)`), or any other with random weights: an untrained control.
    """

    network: Arch
    reduce: Literal["pca", "random"] = "pca"
    pool: Literal["mean", "l2"] = "mean"  # over positions: the mean, or the norm, which is never negative
    widths: tuple[PositiveInt, ...] | None = None  # of each stage when reduced; None: half for the first, equal ones after

    @property
    def arch(self) -> Arch:
        """The network's architecture; that of a saved one is in its folder."""
        return self.network.portable

    @property
    def asks(self) -> bool:
        return self.reduce == "pca"

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers of the stages that are used."""
        return (0,)

    @property
    @abstractmethod
    def channels(self) -> tuple[int, ...]:
        """The channels of each stage that is used."""

    def ready(self, width: int, classes: int, t: int) -> None:
        for channels, w in zip(self.channels, self.split(width)):
            if self.reduce == "pca" and w > channels:
                raise RecipeError(
                    f"algorithm.guide: {w} principal axes of a stage of {channels} channels do not exist; "
                    "set widths or other stages, or reduce=random"
                )

    def model(self, fed: Federation) -> Model:
        if "guide" not in fed.memo:
            # the same in every round, since a client may come late
            model = fed.workbench.machine.initial(self.network, fed.workbench.lasting("guide"))
            fed.memo["guide"] = dataclasses.replace(model, arch=self.arch)
        guide: Model = fed.memo["guide"]
        return guide

    def split(self, width: int) -> tuple[int, ...]:
        """How much of the classifier's width each stage gets: of 512 and three stages 256, 128 and 128, as in the paper."""
        n = len(self.wanted)
        rest = width // (2 * n - 2) if n > 1 else 0
        widths = self.widths or (width - (n - 1) * rest, *[rest] * (n - 1))
        if len(widths) != n or sum(widths) != width or min(widths) < 1:
            raise RecipeError(
                f"algorithm.guide: widths {list(widths)} of {n} stages must add up to the classifier's {width} features"
            )
        return widths

    def basis(self, width: int, classes: int, source: Stream, moments: Tensor | None) -> Basis:
        if moments is not None:
            return self._principal(moments, width)
        pairs, generator = list(zip(self.channels, self.split(width))), source.torch()
        axes = tuple(torch.randn(c, w, generator=generator) / math.sqrt(w) for c, w in pairs)
        return Basis(tuple(torch.zeros(c) for c, _ in pairs), axes, None)

    def moments(self, client: Client, net: Net, t: int, labels: Tensor | None = None) -> Tensor:
        """Means and second moments of the pooled stages of the client's images, with noise and without, in one row."""
        labels, everything = client.data.labels if labels is None else labels, Basis((), (), None)
        rows = torch.cat([self.features(client, net, everything, labels, step) for step in (t, None)])
        parts = rows.double().split(self.channels, dim=1)
        return torch.cat([m for x in parts for m in (x.mean(0), (x.T @ x / len(x)).flatten())])

    def _principal(self, moments: Tensor, width: int) -> Basis:
        """The axes of most variance of each stage, the largest entry of each positive."""
        centre: list[Tensor] = []
        axes: list[Tensor] = []
        at = 0
        for c, w in zip(self.channels, self.split(width)):
            m, square = moments[at : at + c], moments[at + c : at + c + c * c].view(c, c)
            at += c + c * c
            found = torch.empty(c, w, device="meta") if moments.is_meta else largest(square - torch.outer(m, m), w)
            centre.append(m.float())
            axes.append(found.to(moments.device))
        return Basis(tuple(centre), tuple(axes), None)

    def given(self, basis: Basis) -> dict[str, Any]:
        """The stages that are used, and their basis where there is one."""
        told: dict[str, Any] = {f"stage{k}": 1.0 for k in self.wanted}
        for k, centre, axes in zip(self.wanted, basis.centre, basis.axes):
            told |= {f"centre{k}": centre, f"axes{k}": axes}
        return told | ({"l2": 1.0} if self.pool == "l2" and basis.axes else {})


def denoised(net: Net, batch: Batch, given: Given) -> Tensor:
    """The pooled stages of a denoiser, of each image with noise."""
    x = given["a"] * batch.x + given["s"] * batch.drawn["noise"]
    t = torch.zeros_like(batch.labels) + given["t"]
    more: dict[str, Any] = {"condition": batch.columns["condition"]} if "condition" in batch.columns else {}
    return pooled(net(x, t, batch.columns["labels"], give="stages", **more), given)


@spec
class Own(Network):
    """A U-Net of effuse, conditional where labels are used. Stage 0 is its middle; 1, 2, ... are those of its decoder."""

    conditioned: ClassVar[bool] = True

    network: Arch
    stages: tuple[NonNegativeInt, ...] = (2, 3, 4)
    task: Denoise = Denoise()  # what it was trained for: its noise
    label: Literal["own", "null"] = "own"  # of noisy images; "null" is the control without the class
    image: Literal["own", "other"] = "own"  # "other" is the control that sees another image of the same class

    def __post_init__(self) -> None:
        if not self.stages or len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages={list(self.stages)} must name at least one stage, each once")

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.stages

    @property
    def channels(self) -> tuple[int, ...]:
        arch = self.arch
        if not arch.staged:
            raise self._unfit()
        maps = arch.hollow_net()(*arch.example(), give="stages")
        if max(self.stages) >= len(maps):
            raise RecipeError(
                f"algorithm.guide: there is no stage {max(self.stages)}; {arch.name} has 0 to {len(maps) - 1}, set stages"
            )
        return tuple(maps[k].shape[1] for k in self.stages)

    def ready(self, width: int, classes: int, t: int) -> None:
        super().ready(width, classes, t)
        if classes and not self.arch.conditional:
            raise self._unfit()
        if not classes and self.image == "other":
            raise RecipeError("algorithm.guide: image=other takes another image of the class, and the task has no labels")
        if classes and self.arch.shape.classes != classes:
            raise RecipeError(
                f"algorithm.guide: a network of {self.arch.shape.classes} classes cannot guide one of {classes}; "
                "train a guide on the same classes"
            )
        if t >= self.task.schedule.steps:
            raise RecipeError(f"algorithm.t: there is no step {t}; the guide's task has {self.task.schedule.steps}")

    def _unfit(self) -> RecipeError:
        why = f"{self.arch.name} shows no stages under a class; use a unet(...) with conditional=True"
        return RecipeError(f"algorithm.guide: {why}")

    @property
    def cost(self) -> int:
        return macs(self.arch, "stages")

    def entry(self, width: int, source: Stream) -> Tensor:
        # a unit vector then has the variance of a new class embedding, one
        to: Any = self.arch.hollow_net().condition_width
        return torch.randn(width, to, generator=source.child("condition").torch())

    def features(
        self, client: Client, net: Net | None, basis: Basis, labels: Tensor, t: int | None, z: Tensor | None = None
    ) -> Tensor:
        assert net is not None
        if self.label == "null" and t is not None:
            labels = torch.full_like(labels, NULL)
        data = self._shown(client).with_columns(labels=labels)
        if z is not None:
            assert basis.condition is not None
            data = data.with_columns(condition=F.normalize(z.float(), dim=1) @ basis.condition)
        a, s = (1.0, 0.0) if t is None else signal_and_noise(self.task.schedule, torch.device("cpu"))[t].tolist()
        given = {"t": torch.tensor(t or 0), "a": a, "s": s, **self.given(basis)}
        return client.apply(net, denoised, data, task=self.task, given=given)

    def _shown(self, client: Client) -> Shard:
        """The images that the network sees: the client's own, or in the place of each another one of its class."""
        data = client.data
        if self.image == "own":
            return data
        order = torch.randperm(len(data), generator=client.lasting("other image").torch())
        return Shard(data.dataset, data.rows[another(data.labels, order)])


def recognised(net: Net, batch: Batch, given: Given) -> Tensor:
    """The features of a classifier, as one stage of one position."""
    return pooled((net(batch.x, give="features")[:, :, None, None],), given)


@spec
class Encoder(Network):
    """Control: the features of a classifier, which knows no class that it is asked for. It has no noise."""

    labelled: ClassVar[bool] = False

    network: Arch

    @property
    def channels(self) -> tuple[int, ...]:
        return (features_of(self.arch, "algorithm.guide"),)

    def features(
        self, client: Client, net: Net | None, basis: Basis, labels: Tensor, t: int | None, z: Tensor | None = None
    ) -> Tensor:
        assert net is not None
        return client.apply(net, recognised, client.data, given=self.given(basis))


def pooled(maps: Sequence[Tensor], given: Given) -> Tensor:
    """The wanted stages of each image as one vector: channels reduced by the basis, if any, and pooled over positions.

    A mean is taken first: it is the mean of reduced positions too, since the basis is linear.
    """
    vectors: list[Tensor] = []
    for k, channels in enumerate(maps):
        if f"stage{k}" not in given:
            continue
        x = channels.float().flatten(2).transpose(1, 2)  # image, position, channel
        if "l2" not in given:
            x = x.mean(1, keepdim=True)
        if f"axes{k}" in given:
            x = (x - given[f"centre{k}"]) @ given[f"axes{k}"]
        vectors.append(x.norm(dim=1) if "l2" in given else x[:, 0])
    return torch.cat(vectors, dim=1)


def features_of(arch: Arch, where: str) -> int:
    """How many features a classifier has."""
    if not arch.featured or arch.parts:
        raise RecipeError(f"{where}: {arch.name} is no classifier with features; use a resnet(...) or a cnn(...)")
    width: int = arch.hollow_net()(*arch.example(), give="features").shape[1]
    return width


def another(labels: Tensor, order: Tensor) -> Tensor:
    """For each image another one of its class, each taken once: the next of the class in that order. An only one stays."""
    chosen = torch.empty_like(order)
    for label in labels.unique():
        own = order[labels[order] == label]
        chosen[own] = own.roll(-1)
    return chosen


def largest(covariance: Tensor, width: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues as columns, the largest entry of each positive."""
    axes = torch.linalg.eigh(covariance.cpu())[1].flip(1)[:, :width]
    signs = axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    return (axes * signs).float()


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns; columns of norm one where there are more than rows."""
    drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (torch.linalg.qr(drawn)[0] if columns <= rows else F.normalize(drawn, dim=0)).float()
