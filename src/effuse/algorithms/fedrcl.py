"""FedRCL: Seo et al., 2024: relaxed supervised contrast of the images of a batch, on all levels of a classifier.

`fedrcl_guided` is the rival of FedDifRC's Table 6: the same with what a guide draws, and held to what it sees.
"""

import dataclasses
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.drawing import DRAWING, Drawing, Drawn
from effuse.algorithms.shared.guide import Basis, Guide
from effuse.algorithms.shared.guide_math import features_of
from effuse.algorithms.shared.looking import Looking, kept, sent
from effuse.algorithms.shared.shares import Share
from effuse.algorithms.shared.synthesis import joined
from effuse.core.aggregate import by_count
from effuse.core.data import Shard
from effuse.core.model import Arch, Net
from effuse.core.prelude import FEDERATE, Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch, in_fp32

HARDEST = 2  # images of other classes that each image is told from: the most similar ones
NONE = 2.0  # above every cosine
NOTHING: dict[str, None] = {"guide": None, "basis": None, "share": None}  # what comes once


@message(name="fedrcl.update")
class ContrastUpdate(Update):
    """A client's model, and what its loss adds to the cross-entropy."""

    contrast: Annotated[float | None, by_count]


def relaxed(z: Tensor, labels: Tensor, real: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """For each image: the contrast of its least similar image of the class, and the penalty on images too alike.

    -log of e^(s+/tau) over e^(s+/tau) + the sum of e^(s-/tau) of the most similar images of other classes; s+ may be of the
    image itself. The penalty is ln(1 + e^((s - 1)/tau)), with s of another image of the class, where s is `near` or more.
    """
    s = F.normalize(z, dim=1)
    s = s @ s.T
    same = labels[:, None] == labels
    alike = s.masked_fill(~(same & real), NONE)
    others = s.masked_fill(same | ~real, -torch.inf).topk(min(HARDEST, len(s))).values
    apart = (others - alike.amin(1, keepdim=True)) / given["tau"]
    contrast = torch.cat([torch.zeros_like(apart[:, :1]), apart], dim=1).logsumexp(1)
    least = alike.masked_fill(torch.eye(len(s), dtype=torch.bool, device=s.device), NONE).amin(1)
    close = (least >= given["near"]) & (least < NONE)
    return contrast, torch.where(close, F.softplus((least - 1.0) / given["tau"]), 0.0)


def contrasted(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor]:
    """The cross-entropy, and the mean over levels of the contrast and beta times the penalty. Padding is in none of them."""
    error, _, held = terms(net, batch, given)
    return error + held, held


def terms(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy, the features, and the contrast of all levels with its weight."""
    task: Any = batch.task
    output, z, levels = net(*task.inputs(batch), give="levels")
    real = torch.ones_like(batch.labels, dtype=torch.bool) if batch.weight is None else batch.weight > 0
    with in_fp32(output):
        pairs = [relaxed(level.float(), batch.labels, real, given) for level in levels]
        total = torch.stack([batch.mean(contrast + given["beta"] * penalty) for contrast, penalty in pairs]).mean()
        held = given["contrast"] * total
    return batch.mean(task.error(output, batch)), z, held


def pulled(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor]:
    """The same with the plain distance ||z - H||^2 of the features from the guide's."""
    error, z, held = terms(net, batch, given)
    with in_fp32(z):
        held = held + given["pull"] * batch.mean((z.float() - batch.columns["H"].float()).square().sum(1))
    return error + held, held


@spec
class FedRCL(FedAvg, name="fedrcl"):
    """FedAvg of classifiers that also tell the images of a batch apart by class, on every level."""

    contrast: NonNegativeFloat = 1.0  # the weight of the whole term; 1 in the paper
    beta: NonNegativeFloat = 1.0  # the weight of the penalty within it
    near: Annotated[float, Field(ge=-1, le=1)] = 0.7  # lambda: the similarity from which images of a class are pushed apart
    tau: PositiveFloat = 0.05

    def ready(self, clients: int) -> None:
        super().ready(clients)
        if self.contrast and self.local.privacy is not None:
            raise RecipeError(
                f"algorithm.local.privacy: the loss of {self.name} compares the images of a batch, so a single image has no "
                "gradient of its own; use another algorithm, or contrast=0"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        if not model.arch.levelled:
            raise RecipeError(
                f"model: {model.arch.name} shows no levels, which FedRCL compares; use a resnet(...) or a cnn(...)"
            )
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        y = fed.mean(self.train, fed.sample(self.cohort), by=self.aggregate, model=server.model).value
        if y.contrast is not None:
            fed.note(contrast=y.contrast)
        return Server(y.model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> ContrastUpdate:
        net = client.load(model)
        if not self.contrast:
            fit = client.fit(net, self.local, client.data)
        else:
            given = {"contrast": self.contrast, "beta": self.beta, "near": self.near, "tau": self.tau}
            fit = client.fit(net, self.local, client.data, loss=contrasted, given=given)
        return ContrastUpdate(client.unload(net), self.weight(client), fit.loss, fit.noted)


@message(name="fedrcl.guided.server")
class GuidedServer(Drawn):
    """The classifier, the images that the denoiser has drawn, and the basis of the guide's features."""

    basis: Basis | None = None


@spec
class FedRCLGuided(FedRCL, Looking, Drawing, name="fedrcl_guided"):
    """FedRCL beside a guide, as FedDifRC's Table 6 has it: with drawn images, held to the guide's features, or both."""

    guide: Guide | None = None
    draws: Arch | None = None  # the class-conditional denoiser that the server draws images from; None: no images
    pull: NonNegativeFloat = 1.0  # the weight of ||z - H||^2, where there is a `guide`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guide is None and self.draws is None:
            raise RecipeError("algorithm.guide: without a guide and without draws this is fedrcl(...); give one of them")

    @property
    def denoiser(self) -> tuple[str, Arch | None]:
        return "draws", self.draws

    def setup(self, model: Model, fed: Federation) -> GuidedServer:
        super().setup(model, fed)
        self.check_denoiser(model)
        if self.guide is not None:
            self.guide.ready(features_of(model.arch, "model"), model.arch.shape.classes, self.t)
        return GuidedServer(model, phase=FEDERATE if self.draws is None else DRAWING)

    def round(self, server: GuidedServer, fed: Federation) -> Server:
        if server.phase == DRAWING:
            return self.draw_more(server, fed)
        S, basis = fed.sample(self.cohort), server.basis
        once: dict[str, Any] = {}
        if self.guide is not None:
            basis = basis or self.basis(self.guide, server.model.arch, fed)
            once = {"basis": basis} | sent(self.guide, fed)
        late = {} if self.draws is None else self.late(S, server, fed)
        each = {k: once | late.get(k, {}) for k in S}
        y = fed.mean(self.train, S, by=self.aggregate, model=server.model, **NOTHING, once=each).value
        fed.note(held=y.contrast)
        return dataclasses.replace(server, model=y.model, basis=basis)

    @on_client
    def train(
        self, client: Client, model: Model, guide: Model | None, basis: Basis | None, share: Share | None
    ) -> ContrastUpdate:
        net, data = client.load(model), client.data
        given = {"contrast": self.contrast, "beta": self.beta, "near": self.near, "tau": self.tau}
        if self.draws is not None:
            drawn = self.kept_share(client, share)
            data = joined(data, drawn.pixels, drawn.labels)
        if self.guide is not None:
            H = self.features(client, data, kept(client, "guide", guide), kept(client, "basis", basis))
            data = data.with_columns(H=H)
            given["pull"] = self.pull
        loss = contrasted if self.guide is None else pulled
        fit = client.fit(net, self.local, data, loss=loss, given=given)
        return ContrastUpdate(client.unload(net), self.weight(client), fit.loss, fit.noted)

    def features(self, client: Client, data: Shard, guide: Model | None, basis: Basis | None) -> Tensor:
        """The guide's features of a client's images and of its drawn ones, computed at its first round."""
        if "H" not in client.state:
            assert self.guide is not None and basis is not None  # it came with the first model
            eye = self.guide.open(client, guide)
            client.state["H"] = self.guide.features(client, eye, basis, data.labels, self.t, data=data).half()
        for name in ("guide", "basis"):  # they are not needed again
            client.state.pop(name, None)
        H: Tensor = client.state["H"]
        return H
