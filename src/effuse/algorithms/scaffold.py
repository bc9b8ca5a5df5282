"""SCAFFOLD: Karimireddy et al., 2020, Algorithm 1, options I and II."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import PositiveFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.core.aggregate import by_count, by_weight
from effuse.core.prelude import Client, Federation, Given, Model, Params, Server, message, on_client, spec
from effuse.core.solvers import SGD


@message(name="scaffold.server")
class ScaffoldServer(Server):
    """The global model x and the server's control variate c."""

    c: Params


@message(name="scaffold.update")
class ScaffoldUpdate:
    """A client's model after local training, and by how much its control variate changed."""

    y: Annotated[Model, by_weight]
    dc: Annotated[Params, by_count]
    weight: float
    loss: float | None


def corrected(grads: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """g - c_i + c."""
    return {k: g - given["c_i"][k] + given["c"][k] for k, g in grads.items()}


@spec
class Scaffold(FedAvg, name="scaffold"):
    """FedAvg whose clients step along g - c_i + c, which reduces client drift; traffic is doubled."""

    # "gradients" is the mean of the raw gradients over the steps; II holds under plain SGD only, where both are equal
    option: Literal["I", "II", "gradients"] | None = None  # None: II under plain SGD, else gradients
    eta_g: PositiveFloat = 1.0
    weights: Literal["size", "uniform"] = "uniform"  # as in the paper; c is always averaged uniformly

    def setup(self, model: Model, fed: Federation) -> Server:
        return ScaffoldServer(model, c=model.params.zeros())

    def round(self, server: ScaffoldServer, fed: Federation) -> Server:
        x, c, S = server.model, server.c, fed.sample(self.cohort)
        updates = fed.mean(self.train, S, by=self.aggregate, x=x, c=c)
        y, dc = updates.value.y, updates.value.dc
        step = y if self.eta_g == 1.0 else x.lerp(y, self.eta_g)
        return ScaffoldServer(step, c=c + (len(updates.heard) / len(fed.clients)) * dc)  # those of S who answered

    @on_client(covered=True)
    def train(self, client: Client, x: Model, c: Params) -> ScaffoldUpdate:
        c_i = client.state.get("c_i", c.zeros())
        net = client.load(x)
        fit = client.fit(
            net,
            self.local,
            client.data,
            direction=corrected,
            given={"c_i": c_i, "c": c},
            report_gradient=self.rule == "gradients",
        )
        y = client.unload(net)
        if self.rule == "I":
            c_new = self.gradient_at(client, x)
        elif self.rule == "II":
            # steps is tau, the number of batches: neither epochs nor images
            c_new = c_i - c + (x.params - y.params) / (fit.steps * client.rate(self.local))
        else:
            assert fit.gradient is not None  # as `report_gradient` says
            c_new = fit.gradient
        client.state["c_i"] = c_new
        return ScaffoldUpdate(y, c_new - c_i, self.weight(client), fit.loss)

    @property
    def rule(self) -> str:
        """How c_i is updated: the chosen option, or the one that holds for the solver."""
        solver = self.local
        plain = isinstance(solver, SGD) and not solver.momentum and not solver.weight_decay and solver.clip is None
        return self.option or ("II" if plain else "gradients")

    def gradient_at(self, client: Client, x: Model) -> Params:
        """Option I: one more pass over the data, at x."""
        return client.gradient(client.load(x), client.data, batch=self.local.batch)
