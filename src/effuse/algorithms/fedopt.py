"""FedOpt: Reddi et al., 2021, "Adaptive Federated Optimization", Algorithm 2; FedAvgM: Hsu et al., 2019, section 4.3."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, PositiveFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.core.prelude import Federation, Model, Params, Server, message, spec

Beta = Annotated[float, Field(ge=0, lt=1)]


@message(name="fedopt.momentum")
class Momentum(Server):
    """The global model x and the server's momentum m."""

    m: Params


@message(name="fedopt.moments")
class Moments(Momentum):
    """Beside the momentum, the accumulated squares v."""

    v: Params


@spec
class FedAvgM(FedAvg, name="fedavgm"):
    """FedAvg whose server moves with momentum."""

    eta: PositiveFloat = 1.0  # eta, the server's rate
    beta: Beta = 0.9  # beta, the momentum

    def setup(self, model: Model, fed: Federation) -> Server:
        return Momentum(model, m=model.params.zeros())

    def round(self, server: Momentum, fed: Federation) -> Server:
        x, S = server.model.params, fed.sample(self.cohort)
        mean = fed.mean(self.train, S, by=self.aggregate, model=server.model).value.model
        m = self.beta * server.m + (mean.params - x)
        return Momentum(mean.holding(x + self.eta * m), m=m)


@spec
class FedOpt(FedAvg):
    """FedAvg whose server moves each weight by its own rate."""

    eta: PositiveFloat = 0.01  # eta, the server's rate
    beta_1: Beta = 0.9  # beta_1, the momentum
    tau: PositiveFloat = 1e-3  # tau, the degree of adaptivity: the smaller, the more the rates differ

    def setup(self, model: Model, fed: Federation) -> Server:
        # the paper asks for v >= tau^2 before the first round
        return Moments(model, m=model.params.zeros(), v=model.params.map(lambda t: t.new_full(t.shape, self.tau**2)))

    def round(self, server: Moments, fed: Federation) -> Server:
        x, S = server.model.params, fed.sample(self.cohort)
        mean = fed.mean(self.train, S, by=self.aggregate, model=server.model).value.model
        delta = mean.params - x
        m = self.beta_1 * server.m + (1 - self.beta_1) * delta
        v = each(self.squares, server.v, delta)
        step = each(lambda m, v: m / (v.sqrt() + self.tau), m, v)
        return Moments(mean.holding(x + self.eta * step), m=m, v=v)

    @abstractmethod
    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        """v after a round whose mean update is Delta."""


@spec
class FedAdagrad(FedOpt, name="fedadagrad"):
    """FedOpt with the sum of all squares."""

    beta_1: Beta = 0.0

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta.square()


@spec
class FedYogi(FedOpt, name="fedyogi"):
    """FedOpt with squares that change by at most their own size."""

    beta_2: Beta = 0.99  # beta_2

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        square = delta.square()
        return v - (1 - self.beta_2) * square * (v - square).sign()


@spec
class FedAdam(FedOpt, name="fedadam"):
    """FedOpt with a moving average of squares."""

    beta_2: Beta = 0.99  # beta_2

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * delta.square()


def each(function: Callable[[Tensor, Tensor], Tensor], a: Params, b: Params) -> Params:
    """A function of two tensors of each name; a rehearsal's shapes stay as they are."""
    return a if a.hollow else Params({k: function(t, b[k]) for k, t in a.items()})
