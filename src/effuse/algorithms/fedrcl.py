"""FedRCL: Seo et al., 2024: relaxed supervised contrast of the images of a batch, on all levels of a classifier."""

from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.aggregate import by_count
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch, in_fp32

HARDEST = 2  # images of other classes that each image is told from: the most similar ones
NONE = 2.0  # above every cosine


@message(name="fedrcl.update")
class ContrastUpdate(Update):
    """A client's model, and the contrastive term of its loss."""

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
    task: Any = batch.task
    output, levels = net(*task.inputs(batch), give="levels")
    real = torch.ones_like(batch.labels, dtype=torch.bool) if batch.weight is None else batch.weight > 0
    with in_fp32(output):
        terms = [relaxed(level.float(), batch.labels, real, given) for level in levels]
        total = torch.stack([batch.mean(contrast + given["beta"] * penalty) for contrast, penalty in terms]).mean()
        held = given["contrast"] * total
    return batch.mean(task.error(output, batch)) + held, held


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
