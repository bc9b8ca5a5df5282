"""The nearest noisy class mean: a classifier that nobody has trained, and a bar for private generators."""

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from effuse.algorithms.shared.central_images import Means, class_means
from effuse.core.errors import FederationError
from effuse.core.prelude import Algorithm, Client, Federation, Model, Params, RecipeError, Server, on_client, spec
from effuse.models.resnet import LinearClassifier


@spec
class NearestMean(Algorithm, name="nearest_mean"):
    """Clients send noisy means of their classes. The server delivers the classifier that chooses the nearest of them."""

    noise: NonNegativeFloat | None = None  # z: noise on sums and counts over their sensitivity; None: the budget's

    def setup(self, model: Model, fed: Federation) -> Server:
        if not isinstance(model.arch, LinearClassifier):
            refused = f"algorithm=nearest_mean delivers a linear classifier, not {model.arch.name}"
            raise RecipeError(f"{refused}; set model=linear_classifier()")
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        sums, counts = torch.zeros(()), torch.zeros(())
        for client, told in fed.ask(self.tell, fed.clients):
            with fed.using(client):
                sums, counts = sums + told.means.flatten(1) * told.counts[:, None], counts + told.counts
        if not counts.dim():
            raise FederationError(f"round {fed.t + 1}: no client told its class means")
        found = nearest(sums / counts.clamp(min=1.0)[:, None], counts)
        held = server.model.params
        params = {name: value.to(held[name]) for name, value in zip(("head.weight", "head.bias"), found)}
        return Server(server.model.holding(Params(params)))

    @on_client(covered=True)
    def tell(self, client: Client) -> Means:
        return Means(*class_means(client, self.noise))

    def warnings(self, rounds: int) -> list[str]:
        return [f"rounds={rounds}: clients tell the same means again in every round; set rounds=1"] if rounds > 1 else []


def nearest(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear classifier that chooses the nearest mean.

    |x - m|^2 is least where x m - |m|^2 / 2 is largest. Pixels lie in [-1, 1], so a class that nobody has is never chosen.
    """
    return means, torch.where(counts >= 1.0, -means.square().sum(1) / 2, -2.0 * means.shape[1])
