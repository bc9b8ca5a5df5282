"""Fed3R: Fani et al., 2024, ridge regression on frozen features from one message of moments for each client."""

from typing import Annotated

from pydantic import PositiveFloat
from torch import Tensor

from effuse.algorithms.shared.guide_math import features_of
from effuse.core.aggregate import by_weight
from effuse.core.model import Net
from effuse.core.prelude import (
    Algorithm,
    Client,
    Federation,
    Given,
    Model,
    Params,
    RecipeError,
    Server,
    message,
    on_client,
    spec,
)
from effuse.core.task import Batch
from effuse.metrics.linear_probe import Moments, moments, ridge

HEAD = ("head.weight", "head.bias")


@message(name="fed3r.told")
class Told:
    """A client's moments of features and labels, as means over its images."""

    second: Annotated[Tensor, by_weight]
    cross: Annotated[Tensor, by_weight]
    shares: Annotated[Tensor, by_weight]
    weight: float


def features(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x, give="features").float()


@spec
class Fed3R(Algorithm, name="fed3r"):
    """The head of the recipe's model, solved by ridge regression. All else stays as the run begins, such as a saved guide.

    The clients' moments add up to those of all images, so the head is that of data in one place, whatever the skew.
    """

    penalty: PositiveFloat = 1e-3  # beside a correlation matrix

    def setup(self, model: Model, fed: Federation) -> Server:
        features_of(model.arch, "model")
        missing = [name for name in HEAD if name not in model.params]
        if missing:
            raise RecipeError(f"model: {model.arch.name} has no {missing[0]} to solve for; use one with a linear head")
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        told = fed.mean(self.tell, fed.present, model=server.model).value
        held = server.model.params
        solved = zip(HEAD, ridge(Moments(told.second, told.cross, told.shares), self.penalty))
        return Server(server.model.holding(Params({name: value.to(held[name]) for name, value in solved})))

    @on_client
    def tell(self, client: Client, model: Model) -> Told:
        x = client.apply(client.load(model), features, client.data)
        return Told(*moments(x, client.data.labels, len(client.data.dataset.classes)), float(client.size))

    def warnings(self, rounds: int) -> list[str]:
        return [f"rounds={rounds}: clients tell the same moments again in every round; set rounds=1"] if rounds > 1 else []
