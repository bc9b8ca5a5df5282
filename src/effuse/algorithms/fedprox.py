"""FedProx: Li et al., 2020, Algorithm 2."""

from collections.abc import Mapping

from pydantic import NonNegativeFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.prelude import Client, Given, Model, on_client, spec


def proximal(grads: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """The gradient of f(y) + mu/2 |y - x|^2."""
    x, mu = given["x"], given["mu"]
    return {k: g + mu * (params[k] - x[k]) for k, g in grads.items()}


@spec
class FedProx(FedAvg, name="fedprox"):
    """FedAvg with a penalty on the distance from the global model."""

    mu: NonNegativeFloat = 0.01

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, direction=proximal, given={"x": model.params, "mu": self.mu})
        return Update(client.unload(net), self.weight(client), fit.loss)
