"""FedAvg: McMahan et al., 2017, Algorithm 1."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from effuse.core.aggregate import Average, Reducer, by_weight
from effuse.core.federation import cohort_size
from effuse.core.prelude import Algorithm, Client, Federation, Model, RecipeError, Server, Solver, message, on_client, spec


@message(name="fedavg.update")
class Update:
    """A client's model after local training."""

    model: Annotated[Model, by_weight]
    weight: float
    loss: float | None


@spec
class FedAvg(Algorithm, name="fedavg"):
    """Clients train the global model on their data; the server averages their models."""

    local: Solver
    cohort: PositiveInt | Annotated[float, Field(gt=0, le=1)] | None = None  # clients a round: a count, a fraction, or all
    weights: Literal["size", "uniform"] = "size"
    aggregate: Reducer = Average()  # how the clients' models become one

    def __post_init__(self) -> None:
        if self.local.ema is not None:
            raise RecipeError("algorithm.local.ema: a per-step average would double the upload; use the recipe's `ema`")

    def ready(self, clients: int) -> None:
        if isinstance(self.cohort, int) and self.cohort > clients:
            raise RecipeError(
                f"algorithm.cohort: {self.cohort} clients a round, but there are {clients}; lower it or raise clients"
            )
        if (why := self.aggregate.unfit(clients) or self.aggregate.lacks(cohort_size(self.cohort, clients))) is not None:
            raise RecipeError(f"algorithm.aggregate: {why}")

    def round(self, server: Server, fed: Federation) -> Server:
        S = fed.sample(self.cohort)
        return Server(fed.mean(self.train, S, by=self.aggregate, model=server.model).value.model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        return Update(client.unload(net), self.weight(client), fit.loss)

    def weight(self, client: Client) -> float:
        return float(client.size) if self.weights == "size" else 1.0
