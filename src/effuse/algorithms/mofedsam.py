"""MoFedSAM: Qu et al., 2022, "Generalized Federated Learning via Sharpness Aware Minimization", Algorithm 2."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.core.aggregate import Average
from effuse.core.errors import WireError
from effuse.core.params import Mean
from effuse.core.prelude import Client, Federation, Given, Model, Params, RecipeError, Server, message, on_client, spec
from effuse.core.solvers import SGD


@message(name="mofedsam.server")
class MoFedSAMServer(Server):
    """The global model x and the global direction Delta: the mean v of the last round."""

    delta: Params


@message(name="mofedsam.update")
class MoFedSAMUpdate:
    """A client's model after local training, and its mean gradient where the momentum is made of gradients."""

    y: Model
    gradient: Params | None
    steps: int
    weight: float
    loss: float | None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise WireError(f"update: {self.steps} steps; a fit takes at least one")


def blended(grads: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """v = alpha g + (1 - alpha) Delta."""
    alpha, delta = given["alpha"], given["delta"]
    return {k: alpha * g + (1 - alpha) * delta[k] for k, g in grads.items()}


@spec
class MoFedSAM(FedAvg, name="mofedsam"):
    """FedAvg with sharpness-aware local steps, blended with the last round's direction; twice the gradient cost."""

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.1
    rho: PositiveFloat = 0.1
    eta_g: PositiveFloat = 1.0
    # under Adam, an update divided by tau eta is no gradient and would swamp g; the mean of raw gradients replaces it
    # None: update under SGD, else gradients, which doubles the upload
    momentum: Literal["update", "gradients"] | None = None

    def ready(self, clients: int) -> None:
        super().ready(clients)
        if type(self.aggregate) is not Average:
            raise RecipeError(
                f"algorithm.aggregate: {self.aggregate}, but {self.name} divides each update by its client's own steps, "
                "and takes means; leave it out"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        return MoFedSAMServer(model, delta=model.params.zeros())

    def round(self, server: MoFedSAMServer, fed: Federation) -> Server:
        x, rate = server.model, fed.workbench.rate(self.local)
        y, delta = Mean[Model](), Mean[Params]()
        for client, u in fed.ask(self.train, fed.sample(self.cohort), x=x, delta=server.delta):
            with fed.using(client):
                v = (x.params - u.y.params) / (u.steps * rate) if u.gradient is None else u.gradient
                weight = self.aggregate.weighed(client, u.weight)
                y.add(u.y, weight)
                delta.add(v, weight)
                del v
            del u  # or it would stay in memory while the next one arrives
        # an update contains v, a reported gradient only g: mean v = alpha mean g + (1 - alpha) Delta
        new = server.delta.lerp(delta.value, self.alpha) if self.averages_gradients else delta.value
        return MoFedSAMServer(y.value if self.eta_g == 1.0 else x.lerp(y.value, self.eta_g), delta=new)

    @on_client(covered=True)
    def train(self, client: Client, x: Model, delta: Params) -> MoFedSAMUpdate:
        net = client.load(x)
        fit = client.fit(
            net,
            self.local,
            client.data,
            direction=blended,
            given={"alpha": self.alpha, "delta": delta},
            uphill=self.rho,
            report_gradient=self.averages_gradients,
        )
        return MoFedSAMUpdate(client.unload(net), fit.gradient, fit.steps, self.weight(client), fit.loss)

    @property
    def averages_gradients(self) -> bool:
        # an update gives the mean gradient only under SGD without momentum
        rule = self.momentum or ("update" if isinstance(self.local, SGD) and not self.local.momentum else "gradients")
        return rule == "gradients"
