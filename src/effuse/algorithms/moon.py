"""MOON: Li et al., 2021, Algorithm 1; for U-Nets as FedPhD compares with it, on the pooled bottleneck of a noisy image."""

import math
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.aggregate import by_count
from effuse.core.capabilities import Companions
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch


@message(name="moon.update")
class MoonUpdate(Update):
    """A client's model, and the contrastive loss of its features."""

    contrast: Annotated[float | None, by_count]  # None at its first participation, without an earlier model


def contrastive(net: Net, batch: Batch, given: Given) -> tuple[Tensor, Tensor]:
    """l_sup + mu l_con; all three models see the same input: image, noise and time step."""
    task: Any = batch.task  # one that has inputs and a per-image error: denoise or classify
    inputs = task.inputs(batch)
    output, z = net(*inputs, give="both")
    with torch.no_grad():
        z_glob = net(*inputs, give="features", params=given["glob"])
        z_prev = net(*inputs, give="features", params=given["prev"])
    near, far = (F.cosine_similarity(z.float(), other.float()) / given["T"] for other in (z_glob, z_prev))
    l_con = batch.mean(F.softplus(far - near))  # -log(e^near / (e^near + e^far))
    return batch.mean(task.error(output, batch)) + given["mu"] * l_con, l_con


@spec
class Moon(FedAvg, Companions):
    """FedAvg with a contrastive loss: towards the global model's features, away from those of the client's last model."""

    frozen: ClassVar[int] = 2

    mu: NonNegativeFloat = 1.0
    T: PositiveFloat = 0.5

    def setup(self, model: Model, fed: Federation) -> Server:
        if not model.arch.featured:
            raise RecipeError(
                f"model: {model.arch.name} shows no features, which MOON compares; use a U-Net or a classifier"
            )
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        y = fed.mean(self.train, fed.sample(self.cohort), by=self.aggregate, model=server.model).value
        if y.contrast is not None:  # at ln 2 the two similarities are equal
            fed.note(contrast_from_ln2=y.contrast - math.log(2))
        return Server(y.model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> MoonUpdate:
        net, prev = client.load(model), client.state.get("prev")
        if prev is None:
            fit = client.fit(net, self.local, client.data)
        else:
            given = {"glob": model.params, "prev": prev, "mu": self.mu, "T": self.T}
            fit = client.fit(net, self.local, client.data, loss=contrastive, given=given)
        y = client.unload(net)
        client.state["prev"] = y.params
        return MoonUpdate(y, self.weight(client), fit.loss, fit.noted)
