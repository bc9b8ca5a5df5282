"""FedAvg: McMahan et al., 2017, Algorithm 1."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.errors import RecipeError
from effuse.core.federation import Federation
from effuse.core.model import Model
from effuse.core.params import mean
from effuse.core.solvers import Solver
from effuse.core.spec import spec
from effuse.core.wire import message
from effuse.core.workbench import Client


@message(name="fedavg.update")
class Update:
    """A client's model after local training."""

    model: Model
    weight: float
    loss: float


@spec
class FedAvg(Algorithm, name="fedavg"):
    """Clients train the global model on their data; the server averages what comes back."""

    local: Solver
    cohort: PositiveInt | Annotated[float, Field(gt=0, le=1)] | None = None  # clients a round: a count, a fraction, or all
    weights: Literal["size", "uniform"] = "size"

    def __post_init__(self) -> None:
        if self.local.ema is not None:
            raise RecipeError("algorithm.local.ema: a per-step average would double the upload; use the recipe's `ema`")

    def ready(self, clients: int) -> None:
        if isinstance(self.cohort, int) and self.cohort > clients:
            raise RecipeError(
                f"algorithm.cohort: {self.cohort} clients a round, but there are {clients}; lower it or raise clients"
            )

    def round(self, server: Server, fed: Federation) -> Server:
        updates = fed.ask(self.train, fed.sample(self.cohort), model=server.model)
        return Server(mean((u.model, u.weight) for _, u in updates))

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        return Update(client.unload(net), self.weight(client), fit.loss)

    def weight(self, client: Client) -> float:
        return float(client.size) if self.weights == "size" else 1.0
