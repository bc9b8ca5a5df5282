"""FedDifRC: Wang et al., 2025, features held to those of a denoiser: TDCL (Eqs. 10, 11) and NDCR (Eq. 12)."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from effuse.algorithms.fedavg import Update
from effuse.algorithms.shared.guide_math import features_of
from effuse.algorithms.shared.guides import Basis, Guide
from effuse.algorithms.shared.looking import Looking, kept, sent
from effuse.core.aggregate import by_count
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch, in_fp32
from effuse.core.workbench import Workbench
from effuse.tasks.views import Views

Term: TypeAlias = Callable[[Tensor, Batch, Given], Tensor]  # a loss of each image's features
BLOCK = 64  # images whose distances from the client's bank are computed at a time


@message(name="feddifrc.server")
class Guided(Server):
    """The classifier, and the basis of the guide's features."""

    basis: Basis | None = None


@message(name="feddifrc.update")
class GuidedUpdate(Update):
    """A client's model, and how far its features are from the guide's: TDCL and NDCR with their weights."""

    held: Annotated[float | None, by_count]


@message(name="feddifrc.seen")
class Seen:
    """What the guide sees in a client's images, in fp16. Without labels, C counts what is asked for instead."""

    H: Tensor | None  # of the noisy image under its class, N x d
    F: Tensor | None  # of the clean image under every class, N x C x d
    at: int  # the federated round in which F was computed


def scale(z: Tensor, batch: Batch, given: Given) -> Tensor:
    """U of Eq. 10: the mean distance of the client's features from each F. No gradient flows through it."""
    if "U" in batch.columns:  # of the whole client, at the beginning of the round
        return batch.columns["U"]
    if "U" in given:
        return given["U"]
    weight = torch.ones(len(z), device=z.device) if batch.weight is None else batch.weight
    return mean_distance(z.detach(), weight, batch.columns["F"].float())


def mean_distance(z: Tensor, weight: Tensor, F: Tensor) -> Tensor:
    """The weighted mean of ||z_m - F|| over m, for each F of N x C."""
    # without products: they would round, and differ with the number of rows
    far = torch.cdist(z, F.flatten(0, 1), compute_mode="donot_use_mm_for_euclid_dist")
    return ((weight @ far) / weight.sum()).view(F.shape[:2])


def tdcl(z: Tensor, batch: Batch, given: Given) -> Tensor:
    """Eq. 11: -log of e^(s+/tau) over the sum of e^(s/tau) of all classes, with s(z, F) = cos(z, F) / U (Eq. 10)."""
    s = functional.cosine_similarity(z[:, None], batch.columns["F"].float(), dim=2) / scale(z, batch, given)
    return functional.cross_entropy(s / given["tau"], batch.labels, reduction="none")


def tdcl_alone(z: Tensor, batch: Batch, given: Given) -> Tensor:
    """Eq. 11 without labels. The first F is the positive; where it is alone, F of the batch's others are the negatives."""
    if batch.columns["F"].shape[1] > 1:
        return tdcl(z, dataclasses.replace(batch, labels=torch.zeros_like(batch.labels)), given)
    U = scale(z, batch, given).expand(len(z), 1).T
    s = functional.cosine_similarity(z[:, None], batch.columns["F"].float()[None, :, 0], dim=2) / U
    own = torch.arange(len(z), device=z.device)
    if batch.weight is not None:  # padding is a copy of an image, and no negative
        s = s.masked_fill((batch.weight == 0) & (own != own[:, None]), -math.inf)
    return functional.cross_entropy(s / given["tau"], own, reduction="none")


def unit(z: Tensor, H: Tensor) -> Tensor:
    """Eq. 12 on unit vectors, whose scale does not depend on the guide's."""
    return l2(functional.normalize(z, dim=1), functional.normalize(H, dim=1))


def l2(z: Tensor, H: Tensor) -> Tensor:
    """Eq. 12: ||z - H||^2."""
    return (z - H).square().sum(1)


def kl(z: Tensor, H: Tensor) -> Tensor:
    """The release: the divergence of softmax(z/|z|) from softmax(H/|H|)."""
    p, q = (functional.log_softmax(functional.normalize(v, dim=1), dim=1) for v in (H, z))
    return (p.exp() * (p - q)).sum(1)


NDCR: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"unit": unit, "l2": l2, "kl": kl}


def guided(net: Net, batch: Batch, given: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Eq. 14: the cross-entropy, TDCL and NDCR. A term without a weight is not computed."""
    task: Any = batch.task
    output, z = net(*task.inputs(batch), give="both")
    error = batch.mean(task.error(output, batch))
    with in_fp32(z):
        held = terms(z.float(), batch, given, tdcl)
    return error if held is None else (error + held, held)


def unlabelled(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor]:
    """Section 4.3 of the paper: TDCL and NDCR without labels, the mean of both views. There is no cross-entropy."""
    task: Any = batch.task
    both = net(task.seen(batch), give="features")
    with in_fp32(both):
        held = torch.stack(
            [h for z in both.float().chunk(2) if (h := terms(z, batch, given, tdcl_alone)) is not None]
        ).mean()
    return held, held


def terms(z: Tensor, batch: Batch, given: Given, contrast: Term) -> Tensor | None:
    """TDCL and NDCR with their weights; None where both have none."""
    held: list[Tensor] = []
    if "tdcl" in given:
        held.append(given["tdcl"] * batch.mean(contrast(z, batch, given)))
    for name, distance in NDCR.items():
        if name in given:
            held.append(given[name] * batch.mean(distance(z, batch.columns["H"].float())))
    return torch.stack(held).sum() if held else None


def features(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x, give="features").float()


@spec
class FedDifRC(Looking, name="feddifrc"):
    """FedAvg of classifiers whose features are drawn to those of a frozen guide. With task=views() it uses no labels."""

    guide: Guide
    tdcl: NonNegativeFloat = 1.0
    ndcr: NonNegativeFloat = 1.0
    tau: PositiveFloat = 0.06
    t: NonNegativeInt = 150  # the time step of H
    U: Literal["batch", "round", "none"] = "batch"  # over the batch, over the client's images at the round's start, or 1
    distance: Literal["unit", "l2", "kl"] = "unit"
    refresh: PositiveInt | None = None  # rounds after which F is computed again under the client's z; None: once, without z

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.guide.name
        if self.tdcl and not self.guide.labelled:
            raise RecipeError(f"algorithm.tdcl: {name} gives the same features for every class; set tdcl=0")
        if self.refresh is not None and not (self.tdcl and self.guide.conditioned):
            raise RecipeError(
                f"algorithm.refresh: only F takes z as a condition, and only some guides do; with {name} and "
                f"tdcl={self.tdcl:g} leave refresh out"
            )

    @property
    def looks(self) -> bool:
        """Whether the guide is used at all."""
        return bool(self.tdcl or self.ndcr)

    def setup(self, model: Model, fed: Federation) -> Guided:
        width, free = features_of(model.arch, "model"), label_free(fed.workbench)
        if free and not self.looks:
            raise RecipeError("algorithm.tdcl: without labels and with tdcl=0, ndcr=0 there is nothing to learn; set one")
        if self.looks:
            self.guide.ready(width, 0 if free else model.arch.shape.classes, self.t)
        return Guided(model)

    def round(self, server: Guided, fed: Federation) -> Server:
        S, basis = fed.sample(self.cohort), server.basis
        once: dict[str, Any] = {}
        if self.looks:
            basis = basis or self.basis(self.guide, server.model.arch, fed, entry=self.refresh is not None)
            once = {"basis": basis} | sent(self.guide, fed)
        y = fed.mean(self.train, S, by=self.aggregate, model=server.model, guide=None, basis=None, once=once).value
        if y.held is not None:
            fed.note(held=y.held)
        return Guided(y.model, basis=basis)

    def warnings(self, rounds: int) -> list[str]:
        if self.refresh is None or rounds <= self.refresh:
            return []
        looks = math.ceil(rounds / self.refresh)
        return [
            f"algorithm.refresh: clients look {looks} times instead of once; each time every image passes the guide once "
            f"for every class, at {self.guide.cost:,} multiply-adds a pass"
        ]

    @on_client
    def train(self, client: Client, model: Model, guide: Model | None, basis: Basis | None) -> GuidedUpdate:
        net, data, given = client.load(model), client.data, {}
        if self.looks:
            data = data.with_columns(**self.columns(client, net, kept(client, "guide", guide), kept(client, "basis", basis)))
            given = self.given()
        fit = client.fit(net, self.local, data, loss=unlabelled if label_free(client) else guided, given=given)
        return GuidedUpdate(client.unload(net), self.weight(client), fit.loss, fit.noted)

    def columns(self, client: Client, net: Net, guide: Model | None, basis: Basis | None) -> dict[str, Tensor]:
        """What the guide sees in the client's images, computed at its first round and where F has become old."""
        seen: Seen | None = client.state.get("seen")
        if seen is None or (self.refresh is not None and client.federated - seen.at >= self.refresh):
            assert basis is not None  # it came with the first model
            seen = client.state["seen"] = self.look(client, net, guide, basis, seen)
        if self.refresh is None:  # they are not needed again
            for name in ("guide", "basis"):
                client.state.pop(name, None)
        columns = {name: value for name, value in (("H", seen.H), ("F", seen.F)) if value is not None}
        if seen.F is not None and self.U == "round":
            z = client.apply(net, features, client.data)
            weight = torch.ones(len(z), device=z.device)
            columns["U"] = torch.cat([mean_distance(z, weight, F.float()) for F in seen.F.split(BLOCK)])
        return columns

    def look(self, client: Client, net: Net, guide: Model | None, basis: Basis, before: Seen | None) -> Seen:
        """Compute H and F, each where its term has a weight; H takes no condition, so it stays."""
        eye, labels = self.guide.open(client, guide), self.labels(client)
        H = before.H if before else None
        if self.ndcr and H is None:
            H = self.guide.features(client, eye, basis, labels, self.t).half()
        if not self.tdcl:
            return Seen(H, None, client.federated)
        z = None if self.refresh is None else client.apply(net, features, client.data)
        C = len(client.data.dataset.classes)
        classes = self.guide.unlabelled(C)[1] if label_free(client) else range(C)
        asked = (torch.full_like(labels, c) for c in classes)
        F = torch.stack([self.guide.features(client, eye, basis, c, None, z).half() for c in asked], dim=1)
        return Seen(H, F, client.federated)

    def labels(self, client: Client) -> Tensor:
        """What noisy images are asked for under: their labels, or what the guide has instead."""
        labels = client.data.labels
        if not label_free(client):
            return labels
        return torch.full_like(labels, self.guide.unlabelled(len(client.data.dataset.classes))[0])

    def given(self) -> dict[str, float]:
        """The weights of the terms, under the names by which `guided` finds them."""
        given = {"tdcl": self.tdcl, "tau": self.tau} if self.tdcl else {}
        given |= {"U": 1.0} if self.tdcl and self.U == "none" else {}
        return given | ({self.distance: self.ndcr} if self.ndcr else {})


def label_free(bench: Workbench) -> bool:
    """Whether the run's task has no labels."""
    return isinstance(bench.task, Views)
