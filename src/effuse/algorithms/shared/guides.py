"""Guides: frozen features of an image under a class, to which a classifier's own features are held (FedDifRC)."""

import dataclasses
import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.algorithms.shared.guide import Basis, Guide
from effuse.algorithms.shared.guide_math import another, denoised, features_of, largest, orthonormal, recognised
from effuse.core.data import Shard
from effuse.core.model import Arch, Net
from effuse.core.prelude import Client, Federation, Model, RecipeError, spec
from effuse.core.rng import Stream
from effuse.metrics.cost import macs
from effuse.models.local import LocalCopy, here
from effuse.tasks.denoise import NULL, Denoise
from effuse.tasks.schedules import signal_and_noise


@spec
class Vectors(Guide):
    """Control: random orthonormal vectors, one for each class. They know the label and no image."""

    def ready(self, width: int, classes: int, t: int) -> None:
        if not classes:
            raise RecipeError("algorithm.guide: vectors know labels only, and the task has none; use own(...)")

    def basis(self, width: int, classes: int, source: Stream, moments: Tensor | None) -> Basis:
        return Basis((), (orthonormal(width, classes, source.torch()).T.contiguous(),), None)

    def features(
        self,
        client: Client,
        net: Net | None,
        basis: Basis,
        labels: Tensor,
        t: int | None,
        z: Tensor | None = None,
        data: Shard | None = None,
    ) -> Tensor:
        vectors = basis.axes[0]
        return vectors[labels.to(vectors.device)]


@spec
class Network(Guide):
    """A frozen network. Of its stages' channels few directions are kept: principal ones, or random ones.

    The network is a saved one (`from_pretrained(folder)`), or any other with random weights: an untrained control.
    """

    noised: ClassVar[bool] = True  # whether it sees noisy images and clean ones apart

    network: Arch
    reduce: Literal["pca", "random"] = "pca"
    pool: Literal["mean", "l2"] = "mean"  # over positions: the mean, or the root mean square, never negative
    widths: tuple[PositiveInt, ...] | None = None  # of each stage when reduced; None: half for the first, equal ones after

    @property
    def arch(self) -> Arch:
        """The network's architecture; that of a saved one is in its folder."""
        return here(self.network)

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

    def open(self, client: Client, model: Model | None) -> Net | None:
        return super().open(client, self.network.empty if isinstance(self.network, LocalCopy) else model)

    def model(self, fed: Federation) -> Model | None:
        if isinstance(self.network, LocalCopy):
            return None
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
        steps = (t, None) if self.noised else (None,)
        rows = torch.cat([self.features(client, net, everything, labels, step) for step in steps])
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
        self,
        client: Client,
        net: Net | None,
        basis: Basis,
        labels: Tensor,
        t: int | None,
        z: Tensor | None = None,
        data: Shard | None = None,
    ) -> Tensor:
        assert net is not None
        if self.label == "null" and t is not None:
            labels = torch.full_like(labels, NULL)
        shown = self._shown(client, client.data if data is None else data).with_columns(labels=labels)
        if z is not None:
            assert basis.condition is not None
            shown = shown.with_columns(condition=F.normalize(z.float(), dim=1) @ basis.condition)
        a, s = (1.0, 0.0) if t is None else signal_and_noise(self.task.schedule, torch.device("cpu"))[t].tolist()
        given = {"t": torch.tensor(t or 0), "a": a, "s": s, **self.given(basis)}
        return self.applied(client, net, shown, given)

    def applied(self, client: Client, net: Net, data: Shard, given: dict[str, Any]) -> Tensor:
        """The pooled stages of these images under these labels."""
        return client.apply(net, denoised, data, task=self.task, given=given)

    def _shown(self, client: Client, data: Shard) -> Shard:
        """The images that the network sees: these, or in the place of each another one of its class."""
        if self.image == "own":
            return data
        order = torch.randperm(len(data), generator=client.lasting("other image").torch())
        return Shard(data.dataset, data.rows[another(data.labels, order)])


@spec
class Encoder(Network):
    """Control: the features of a classifier, which knows no class that it is asked for. It has no noise."""

    labelled: ClassVar[bool] = False
    noised: ClassVar[bool] = False

    network: Arch

    @property
    def channels(self) -> tuple[int, ...]:
        return (features_of(self.arch, "algorithm.guide"),)

    def features(
        self,
        client: Client,
        net: Net | None,
        basis: Basis,
        labels: Tensor,
        t: int | None,
        z: Tensor | None = None,
        data: Shard | None = None,
    ) -> Tensor:
        assert net is not None
        shown = client.data if data is None else data
        return client.apply(net, recognised, shown, given=self.given(basis))
