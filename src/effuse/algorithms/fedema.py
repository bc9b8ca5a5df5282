"""FedEMA: Zhuang, Wen and Zhang, 2022: clients train by BYOL (Grill et al., 2020) and keep a share of their networks."""

from typing import Any

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn import functional

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, Params, RecipeError, Server, message, on_client, spec
from effuse.core.task import Batch
from effuse.models.projected import Projected
from effuse.tasks.views import in_fp32, require_views

LEAST = 1e-12  # of a first change, which lambda divides by


@message(name="fedema.last")
class Last:
    """What a client keeps of its last training."""

    online: Model
    target: Params
    moved: float  # d: how far the encoder went
    scale: float  # lambda
    at: int  # the federated round


def byol(net: Net, batch: Batch, given: Given) -> Tensor:
    """2 - 2 cos of each view's prediction and the other view's projection by the target, the moving average; summed."""
    task: Any = batch.task
    views = task.seen(batch)
    predicted = net(views)
    with torch.no_grad():
        wanted = net(views, give="projection", params=given["average"])
    with in_fp32(predicted):
        crossed = wanted.float().roll(len(batch.labels), 0)  # the other view's
        near = functional.cosine_similarity(predicted.float(), crossed)
    return batch.mean((2.0 - 2.0 * near).view(2, -1).sum(0))


@spec
class FedEMA(FedAvg, name="fedema"):
    """Federated BYOL: a client mixes the global network into its own by how far its last training went.

    `local.ema` is the decay of BYOL's target in each step; the paper's is 0.99.
    """

    tau: PositiveFloat = 0.7  # lambda = tau / d of a client's first training

    def __post_init__(self) -> None:  # not FedAvg's, which refuses the average that is the target here
        if self.local.ema is None:
            raise RecipeError("algorithm.local.ema: BYOL's target is the moving average over steps; set ema=0.99")

    def setup(self, model: Model, fed: Federation) -> Server:
        require_views(self, fed.workbench.task)
        if not (isinstance(model.arch, Projected) and model.arch.predictor):
            raise RecipeError(
                f"model: {model.arch.name} predicts no projection; use projected(encoder={model.arch.name}(...))"
            )
        if not convolutions(model.params):
            raise RecipeError("model.encoder: FedEMA measures how far convolutions move, and there are none; use a cnn(...)")
        return Server(model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        last: Last | None = client.state.get("last")
        online, target = model, None  # the target of a client that is new, or missed a round, begins as the global network
        if last is not None and last.at == client.federated - 1:
            online, target = model.lerp(last.online, kept_share(last.scale, last.moved)), last.target
        net = client.load(online)
        fit = client.fit(net, self.local, client.data, loss=byol, average=target)
        trained = client.unload(net)
        assert fit.average is not None  # the solver keeps it
        d = moved(online.params, trained.params)
        scale = self.tau / max(d, LEAST) if last is None else last.scale
        client.state["last"] = Last(trained, fit.average, d, scale, client.federated)
        return Update(trained, self.weight(client), fit.loss)


def kept_share(scale: float, d: float) -> float:
    """mu: the weight of the client's own network beside the global one's."""
    return min(scale * d, 1.0)


def convolutions(params: Params) -> list[str]:
    """The weights of the encoder's convolutions."""
    return [name for name, value in params.items() if name.startswith("encoder.") and value.dim() == 4]


def moved(before: Params, after: Params) -> float:
    """d: the mean over the encoder's convolutions of the distance between their weights."""
    if before.hollow:
        return 0.0
    return float(torch.stack([(after[name] - before[name]).norm() for name in convolutions(before)]).mean())
